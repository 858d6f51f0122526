"""Next-token cross entropy, and the router's balance loss of mixture-of-experts models: sums, and what they are divided by."""

from __future__ import annotations

from dataclasses import dataclass

from rft.data.batch import Batch
from rft.models.aux_loss import TERM as ROUTER

NEXT_TOKEN = "next_token"


@dataclass(frozen=True)
class SftLoss:
    """Which terms a micro-batch gives, and how much of each it holds."""

    router: bool = False
    """Whether the model's router balance loss is added (full training of mixture-of-experts models)."""

    @property
    def terms(self) -> tuple[str, ...]:
        return (NEXT_TOKEN, ROUTER) if self.router else (NEXT_TOKEN,)

    def count_terms(self, batch: Batch) -> dict[str, float]:
        """Denominator that a micro-batch adds to each term, from counts that are on the CPU.

        next_token: the weights of its labelled tokens. router_aux: its packs with real tokens, so that neither accumulation nor the
        number of ranks changes what a pack weighs.
        """
        counts = {NEXT_TOKEN: float(batch.label_weight), ROUTER: float(batch.num_packs)}
        return {term: counts[term] for term in self.terms}
