"""Dequantising NF4 weights of an 8B layer against bitsandbytes and the bandwidth floor; whether both give the same numbers."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rft.kernels import nf4
from timing import CACHE_BYTES, graph_times, randn, start

NEEDS = "a CUDA GPU; bitsandbytes as a peer"
SHAPES = ((14336, 4096), (4096, 4096), (1024, 4096), (8192, 2048))  # Llama 8B gate, q, k; 1B gate


def main() -> None:
    results, bandwidth = start(__doc__, "bitsandbytes")
    for rows, columns in SHAPES:
        case = f"nf4_dequantise/{rows}x{columns}"
        count = rows * columns
        results.add(case, "floor", "ms", count * (0.5 + 1 / 64 + 2) / bandwidth * 1e3)
        copies = max(1, CACHE_BYTES // (count * 3))
        weights = [nf4.quantise(randn(rows, columns) * 0.05) for _ in range(copies)]
        out = torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda")
        calls = [lambda w=w, out=out: nf4.dequantise(w, torch.bfloat16, out=out) for w in weights]
        results.add(case, "rft", "ms", graph_times(*calls))
        try:
            from bitsandbytes import functional

            plain = randn(rows, columns) * 0.05
            codes, state = functional.quantize_4bit(plain, blocksize=64, quant_type="nf4", compress_statistics=True)
            peers = [(codes.clone(), state) for _ in range(copies)]
            results.add(
                case, "bitsandbytes", "ms", graph_times(*[lambda p=p: functional.dequantize_4bit(*p) for p in peers])
            )
            read = nf4.Weight(codes.view(rows, columns // 2), state.absmax, state.state2.absmax, state.offset)
            same = torch.equal(read.dequantised(torch.bfloat16), functional.dequantize_4bit(codes, state))
            results.add(case, "rft", "same_numbers_as_bitsandbytes", float(same))
        except Exception as error:  # a peer that fails is written down as failed
            results.error(case, "bitsandbytes", f"{type(error).__name__}: {str(error)[:300]}")


if __name__ == "__main__":
    main()
