"""int8: a frozen weight of N x K in eight bits a number, one fp32 scale a row (the layout of bitsandbytes' LLM.int8 weights).

w ~ code * largest / 127. Products read it out of the buffer that NF4 weights share (nf4.py). No op here has a gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rft.kernels.nf4 import shared_buffer


class Weight(NamedTuple):
    """A frozen (N, K) weight."""

    codes: Tensor
    """(N, K) int8."""
    largest: Tensor
    """(N,) fp32: largest magnitude of each row."""

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def dequantised(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """(N, K), made anew: products in fp32, rounded once."""
        return (self.codes * (self.largest / 127)[:, None]).to(dtype)

    def plain(self, dtype: torch.dtype) -> Tensor:
        """(N, K) in a buffer that the next call overwrites. One pass: codes read, numbers written."""
        out = shared_buffer(self.shape, dtype, self.codes.device)
        return torch.mul(self.codes, (self.largest / 127)[:, None], out=out)


@torch.no_grad()
def quantise(weight: Tensor) -> Weight:
    """(N, K) of any float type -> int8, a block of rows at a time."""
    N, K = weight.shape
    codes = torch.empty(N, K, dtype=torch.int8, device=weight.device)
    largest = torch.empty(N, dtype=torch.float32, device=weight.device)
    step = max(1, (1 << 24) // max(K, 1))
    for start in range(0, N, step):
        rows = weight[start : start + step].float()
        most = rows.abs().amax(1)
        largest[start : start + step] = most
        codes[start : start + step] = (rows * (127 / torch.where(most > 0, most, 1.0))[:, None]).round()
    return Weight(codes, largest)
