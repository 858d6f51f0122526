"""The router's auxiliary (load balance) loss of mixture-of-experts models, per pack over its real tokens.

Legend: L MoE layers, T tokens of the row, P packs, E experts, K chosen experts a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rft.errors import Refused
from rft.models.documents import PackedBatch
from rft.models.probe import Probed

TERM = "router_aux"


class RouterLoss:
    """coefficient * E * sum over experts of (share of choices x mean probability), per pack, summed over real packs.

    The share and the mean run over all MoE layers of a pack's real tokens together, as `transformers` defines it for a
    batch. The denominator of the term is the number of real packs, so that accumulation and ranks do not change it.
    """

    def __init__(self, coefficient: float, num_experts: int, experts_per_token: int):
        self.coefficient = coefficient
        self.num_experts, self.experts_per_token = num_experts, experts_per_token

    @staticmethod
    def of(config: Any, probed: Probed) -> RouterLoss:
        """The loss that full training of this MoE model needs.

        Raises Refused where the model gives no router logits, or its config has no coefficient for them.
        """
        config = config.get_text_config()
        name = config.model_type
        do = 'train a LoRA (adapter.name = "lora"), which leaves the router alone'
        if not probed.router_logits:
            raise Refused(
                'adapter.name = "none"',
                f"{name} hands out no router logits in this version of transformers, so its load balance loss cannot be added",
                do=do,
            )
        coefficient = getattr(config, "router_aux_loss_coef", None)
        if coefficient is None:
            raise Refused(
                'adapter.name = "none"',
                f"{name} balances its experts in a way that its config gives no auxiliary loss for",
                do=do,
            )
        experts = next(
            v
            for n in ("num_local_experts", "num_experts", "n_routed_experts")
            if (v := getattr(config, n, None)) is not None
        )
        return RouterLoss(float(coefficient), experts, config.num_experts_per_tok)

    def loss_sums(self, router_logits: Sequence[Tensor] | None, batch: PackedBatch) -> dict[str, Tensor]:
        """{"router_aux": sum over the real packs of a micro-batch}; router_logits: [T, E] of each MoE layer."""
        if not router_logits:
            raise Refused("router_aux", "the model gave no router logits in this forward")
        each = balance_losses(
            torch.stack([t.float().view(-1, self.num_experts) for t in router_logits]),
            self.experts_per_token,
            batch.pack_tokens,
        )
        return {TERM: self.coefficient * each.sum()}

    def count_terms(self, batch: PackedBatch) -> dict[str, int]:
        """{"router_aux": real packs}: the denominator, from counts on the CPU."""
        return {TERM: sum(1 for tokens in batch.pack_tokens if tokens)}


def balance_losses(logits_LTE: Tensor, experts_per_token: int, pack_tokens: Sequence[int]) -> Tensor:
    """[P] load balance loss of each pack over its first `pack_tokens[p]` positions; 0 for a filler pack."""
    layers, tokens, experts = logits_LTE.shape
    packs = len(pack_tokens)
    probabilities = logits_LTE.softmax(-1).view(layers, packs, tokens // packs, experts)
    chosen = probabilities.topk(experts_per_token, dim=-1).indices
    counts = torch.zeros_like(probabilities).scatter_(-1, chosen, 1.0)
    lengths = torch.tensor(pack_tokens, device=logits_LTE.device)
    real = (torch.arange(tokens // packs, device=logits_LTE.device) < lengths[:, None])[None, :, :, None]
    total = (layers * lengths.clamp_min(1))[:, None]
    share = (counts * real).sum((0, 2)) / total
    mean = (probabilities * real).sum((0, 2)) / total
    return experts * (share * mean).sum(-1)
