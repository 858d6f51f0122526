"""RoPE of queries and keys against Liger, transformers and torch.compile, with its bandwidth floor."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rft.kernels.rope import rope
from timing import compare_passes, randn, start

NEEDS = "a CUDA GPU; liger-kernel as a peer"
ROWS = (1024, 4096, 16384)
HEADS = ((32, 8, 64), (32, 8, 128))  # queries, keys, head size: Llama 1B, Llama 8B and Qwen3


def main() -> None:
    results, bandwidth = start(__doc__, "liger-kernel")

    def ours(q, k, cos, sin):
        half = cos.shape[-1] // 2
        return rope(q, k, cos[..., :half], sin[..., :half])

    def liger(q, k, cos, sin):
        from liger_kernel.ops.rope import LigerRopeFunction

        return LigerRopeFunction.apply(q, k, cos, sin)

    def plain(q, k, cos, sin):
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        return apply_rotary_pos_emb(q, k, cos, sin)

    for heads, kv_heads, size in HEADS:
        for rows in ROWS:
            q, k = (randn(1, rows, n, size).transpose(1, 2) for n in (heads, kv_heads))
            angles = torch.randn(1, rows, size // 2, device="cuda")
            tables = [torch.cat([t, t], -1).bfloat16() for t in (angles.cos(), angles.sin())]
            systems = {"rft": ours, "liger": liger, "torch": plain}
            if rows == ROWS[-1] and size == HEADS[-1][-1]:
                systems["torch-compile"] = torch.compile(plain, dynamic=False)
            pass_ms = 4 * (q.numel() + k.numel()) / bandwidth * 1e3
            compare_passes(
                results,
                f"rope/{rows}x{heads}+{kv_heads}x{size}",
                systems,
                [q, k],
                *tables,
                floor_ms=(pass_ms, 2 * pass_ms),
            )


if __name__ == "__main__":
    main()
