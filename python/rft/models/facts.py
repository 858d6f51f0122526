"""What is known of a model as numbers. Imports no torch: decisions are made from these alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Facts:
    """Numbers of one model as built: adapters included, before sharding."""

    name: str
    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_positions: int | None
    """Longest sequence that the config says it was trained for."""
    num_parameters: int
    """Without adapters; a tied weight once."""
    num_trained: int
    weight_bytes: int
    trained_bytes: int
    matmul_frozen: int
    """Weights that every token is multiplied with and that are not trained; of experts, the chosen ones."""
    matmul_trained: int
    num_heads: int
    head_size: int
    is_moe: bool
    num_experts: int
    experts_per_token: int
    is_tied: bool
    num_kv_heads: int = 0
    intermediate_size: int = 0
    """Of one token: of all experts that it meets."""
    norm_width: int = 0
    """Numbers of one token that the norms of a decoder layer read, those of q and k apart; 0: two of the hidden size."""
    qk_norm_width: int = 0
    """The same of the norms of q and k."""
    layer_rank: int = 0
    """Numbers of one token between the A and B of a decoder layer's adapters."""
    linear_frozen: int = 0
    """Weights of frozen plain linears in the decoder layers: those that a quantised base holds in fewer bits."""
    largest_linear: int = 0
    """Weights of the largest of these."""
    windows: tuple[int | None, ...] = ()
    """Sliding window of each layer's attention; empty: none has one."""

    def flops(self, lengths: Iterable[int]) -> float:
        """FLOPs that one training step on documents of these lengths really needs: no recompute.

        4 a frozen and 6 a trained matmul weight and token; causal attention 2 matmuls x (1 forward + 2 backward) over half a square.
        """
        lengths = list(lengths)
        tokens, squares = sum(lengths), sum(n * n for n in lengths)
        weights = tokens * (4 * self.matmul_frozen + 6 * self.matmul_trained)
        return float(weights + 6 * self.num_layers * self.num_heads * self.head_size * squares)
