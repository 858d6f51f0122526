"""The one module that is wrapped and called: a batch goes in, sums of loss terms come out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor, nn

from rft.data.batch import Batch
from rft.losses import SftLoss
from rft.models.aux_loss import RouterLoss

Backbone = Callable[[Batch], tuple[Tensor, tuple[Tensor, ...] | None]]
"""Batch -> hidden states (T, D) after the final norm, and the router's logits (T, experts) of each layer or None."""


class LossHead(Protocol):
    """The model's own head as the trainee calls it."""

    def loss_sums(
        self, hidden_TD: Tensor, labels: Tensor, weights: Tensor | None = None, *, num_label_tokens: int | None = None
    ) -> dict[str, Tensor]:
        """{"next_token": sum over the labelled tokens}; the number of labels is known, so that the host need not wait."""
        ...


class Trainee(nn.Module):
    """Base model, then head. Nothing else calls them in training or evaluation.

    model: the whole CausalLM, which owns every parameter: names begin with "model.". The other parts hold no parameter of
    their own.
    """

    def __init__(
        self,
        model: nn.Module,
        backbone: Backbone,
        head: LossHead,
        losses: SftLoss,
        *,
        router: RouterLoss | None = None,
    ):
        super().__init__()
        self.model = model
        self.losses = losses
        # In a tuple, so that what of them is a module is not registered a second time: each parameter keeps one name.
        self._parts = (backbone, head, router)

    @property
    def head(self) -> LossHead:
        return self._parts[1]

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Sums by term, fp32 scalars. Every trained parameter is in their graph, also for a filler pack without a label."""
        backbone, head, router = self._parts
        hidden_TD, router_logits = backbone(batch)
        weights = None if batch.weights is None else batch.weights[0]
        terms = head.loss_sums(hidden_TD, batch.labels[0], weights, num_label_tokens=batch.num_label_tokens)
        if router is not None and self.training:
            terms |= router.loss_sums(router_logits, batch)
        return terms
