"""Gated activation (SwiGLU) against Liger, torch and torch.compile, with its bandwidth floor."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rft.kernels.swiglu import gated_activation
from timing import compare_passes, randn, start

NEEDS = "a CUDA GPU; liger-kernel as a peer"
ROWS = (1024, 4096, 16384)
WIDTHS = (8192, 9728, 14336)  # Llama 1B, Qwen3 4B, Llama 8B
# torch.compile at the largest alone: it compiles anew for each shape.


def main() -> None:
    results, bandwidth = start(__doc__, "liger-kernel")

    def liger(gate, up):
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        return LigerSiLUMulFunction.apply(gate, up)

    def plain(gate, up):
        return F.silu(gate) * up

    for width in WIDTHS:
        for rows in ROWS:
            systems = {"rft": gated_activation, "liger": liger, "torch": plain}
            if rows == ROWS[-1] and width == WIDTHS[-1]:
                systems["torch-compile"] = torch.compile(plain, dynamic=False)
            pass_ms = rows * width / bandwidth * 1e3
            compare_passes(
                results,
                f"swiglu/{rows}x{width}",
                systems,
                [randn(rows, width), randn(rows, width)],
                floor_ms=(6 * pass_ms, 16 * pass_ms),
            )


if __name__ == "__main__":
    main()
