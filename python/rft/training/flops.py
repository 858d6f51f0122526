"""FLOPs that a micro-batch really needs, and what a device could do: the two halves of MFU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rft.data.batch import Batch
from rft.models.facts import Facts

# Dense peaks in TFLOP/s by the vendors' data sheets: bf16 tensor cores without sparsity, and plain fp32.
# The first name that the device's name contains counts, so longer names come first.
PEAK_TFLOPS: tuple[tuple[str, float, float], ...] = (
    ("GB300", 2500.0, 80.0),
    ("B300", 2250.0, 75.0),
    ("GB200", 2500.0, 80.0),
    ("B200", 2250.0, 75.0),
    ("GH200", 989.4, 67.0),
    ("H200 NVL", 835.5, 60.0),
    ("H200", 989.4, 67.0),
    ("H100 NVL", 835.5, 60.0),
    ("H100 PCIe", 756.0, 51.0),
    ("H100", 989.4, 67.0),
    ("H800", 989.4, 67.0),
    ("H20", 148.0, 44.0),
    ("A100", 312.0, 19.5),
    ("A800", 312.0, 19.5),
    ("L40S", 362.05, 91.6),
    ("L40", 181.05, 90.5),
    ("L4", 121.0, 30.3),
    ("A10G", 70.0, 35.0),
    ("A10", 125.0, 31.2),
    ("A40", 149.7, 37.4),
    ("A30", 165.0, 10.3),
    ("RTX 6000 Ada", 364.2, 91.1),
    ("RTX A6000", 154.8, 38.7),
    ("RTX 5090", 209.5, 104.8),
    ("RTX 4090", 165.2, 82.6),
    ("RTX 3090", 71.0, 35.6),
)


def peak_flops(device_name: str, precision: str) -> float | None:
    """FLOP/s of one device for matmuls of that precision ("bf16", "fp32"); None for a device that is not in the table."""
    for name, bf16, fp32 in PEAK_TFLOPS:
        if name in device_name:
            return 1e12 * (bf16 if precision == "bf16" else fp32)
    return None


@dataclass(frozen=True)
class FlopCounter:
    """Forward and backward FLOPs: 2 a weight and token forward, 2 for the input's gradient, 2 more for a trained weight's own.

    Recomputation is not counted, nor fill-up tokens; the head counts for labelled tokens alone. A query sees half of its document
    on average, the last `window` tokens at most.
    """

    frozen: int
    """Matmul weights outside the head that are not trained (for experts: those that one token meets)."""
    trained: int
    """Matmul weights outside the head that are trained, adapters among them."""
    head: int
    """Weights of the head."""
    head_trained: bool
    attention_widths: tuple[tuple[int, int | None], ...]
    """(query heads x (query + value head size) / 2, window or None) of each attention layer."""

    def of(self, batch: Batch) -> float:
        """FLOPs of one micro-batch on this rank."""
        linears = batch.num_tokens * (4.0 * self.frozen + 6.0 * self.trained)
        head = batch.num_label_tokens * (6.0 if self.head_trained else 4.0) * self.head
        return linears + head + self._attention(batch)

    def _attention(self, batch: Batch) -> float:
        lengths = real_lengths(batch)
        total = 0.0
        for window in {window for _, window in self.attention_widths}:
            width = sum(w for w, own in self.attention_widths if own == window)
            # Two matmuls (scores, values) of 2 FLOPs a pair and channel forward, twice that backward: 12.
            total += 12.0 * width * sum(seen_pairs(length, window) for length in lengths)
        return total


def seen_pairs(length: int, window: int | None) -> float:
    """Query-key pairs of one causal document of that length."""
    if window is None or length <= window:
        return length * (length + 1) / 2
    return window * (window + 1) / 2 + (length - window) * window


def real_lengths(batch: Batch) -> list[int]:
    """Lengths of the documents of a micro-batch without the fill-up at the end of each pack."""
    lengths, documents = [], iter(batch.lengths)
    for tokens in batch.pack_tokens:
        filled = 0
        while filled < tokens:
            length = next(documents)
            lengths.append(length)
            filled += length
        while filled < batch.input_ids.shape[1] // len(batch.pack_tokens):
            filled += next(documents)  # the fill-up is documents of its own
    return lengths


def count_flops(model: Any, facts: Facts) -> FlopCounter:
    """Counter for a model as it is trained, adapters included."""
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = causal.config.get_text_config()
    head = facts.vocab_size * facts.hidden_size
    head_trained = any(parameter.requires_grad for parameter in causal.get_output_embeddings().parameters())
    window = getattr(config, "sliding_window", None)
    kinds = (
        getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * facts.num_layers
    )
    attending = [kind for kind in kinds if "attention" in kind and "linear" not in kind]
    width = facts.num_heads * facts.head_size
    return FlopCounter(
        frozen=facts.matmul_frozen - (0 if head_trained else head),
        trained=facts.matmul_trained - (head if head_trained else 0),
        head=head,
        head_trained=head_trained,
        attention_widths=tuple((width, window if kind == "sliding_attention" else None) for kind in attending),
    )
