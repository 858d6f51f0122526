"""RMSNorm and add + RMSNorm against Liger, torch and torch.compile, with the bandwidth floor of each."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rft.kernels.rms_norm import add_rms_norm, rms_norm
from timing import compare_passes, randn, start

NEEDS = "a CUDA GPU; liger-kernel as a peer"
ROWS = (1024, 4096, 16384)
WIDTHS = (2048, 2560, 4096)  # Llama 1B, Qwen3 4B, Llama 8B
# torch.compile at the largest alone: it compiles anew for each shape.


def main() -> None:
    results, bandwidth = start(__doc__, "liger-kernel")

    def liger(x, weight):
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        return LigerRMSNormFunction.apply(x, weight, 1e-6)

    def liger_add(x, residual, weight):
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

        return LigerFusedAddRMSNormFunction.apply(x, residual, weight, 1e-6)

    def plain(x, weight):
        return F.rms_norm(x, (x.shape[-1],), weight, 1e-6)

    def plain_add(x, residual, weight):
        total = x + residual
        return F.rms_norm(total, (x.shape[-1],), weight, 1e-6), total

    for width in WIDTHS:
        for rows in ROWS:
            weight = randn(width)
            systems = {"rft": rms_norm, "liger": liger, "torch": plain}
            added = {"rft": add_rms_norm, "liger": liger_add, "torch": plain_add}
            if rows == ROWS[-1] and width == WIDTHS[-1]:
                systems["torch-compile"] = torch.compile(plain, dynamic=False)
                added["torch-compile"] = torch.compile(plain_add, dynamic=False)
            pass_ms = rows * width / bandwidth * 1e3
            x = randn(rows, width)
            compare_passes(
                results, f"rms_norm/{rows}x{width}", systems, [x, weight], floor_ms=(4 * pass_ms, 10 * pass_ms)
            )
            if width == WIDTHS[-1]:
                compare_passes(
                    results,
                    f"add_rms_norm/{rows}x{width}",
                    added,
                    [x, randn(rows, width), weight],
                    floor_ms=(8 * pass_ms, 16 * pass_ms),
                )


if __name__ == "__main__":
    main()
