"""Both small gradients of a low-rank branch against two cuBLAS products, with the floor of reading once."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rft.kernels.lora import Pair, lowrank_gradients
from timing import graph_times, randn, start

NEEDS = "a CUDA GPU; liger-kernel as a peer"


def main() -> None:
    results, bandwidth = start(__doc__)

    def two_products(dy, s, B):
        return dy @ B, torch.mm(dy.t(), s, out_dtype=torch.float32)

    def ours(dy, s, B):
        return lowrank_gradients([Pair(dy, s, B)])

    for width in (4096, 14336):
        for r in (16, 64):
            case = f"lowrank_gradients/16384x{width}/r{r}"
            inputs = randn(16384, width), randn(16384, r), randn(width, r)
            results.add(case, "floor", "ms", 2 * inputs[0].numel() / bandwidth * 1e3)
            for name, function in {"rft": ours, "torch": two_products}.items():
                try:
                    results.add(case, name, "ms", graph_times(lambda f=function, i=inputs: f(*i)))
                except Exception as error:
                    results.error(case, name, f"{type(error).__name__}: {str(error)[:300]}")


if __name__ == "__main__":
    main()
