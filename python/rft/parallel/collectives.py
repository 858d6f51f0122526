"""Sums, flags and small values over ranks. Without a group (one process) each returns its argument.

All but `sum_tensor_over_ranks` work on CPU numbers over gloo, so none of them makes the host wait for a GPU.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def sum_over_ranks(terms: dict[str, float], group: dist.ProcessGroup | None) -> dict[str, float]:
    """The same keys with the sums of all ranks, in float64. Every rank gives the same keys."""
    if group is None or not terms:
        return dict(terms)
    names = sorted(terms)
    values = torch.tensor([terms[name] for name in names], dtype=torch.float64)
    dist.all_reduce(values, group=group)
    return dict(zip(names, values.tolist(), strict=True))


def sum_tensor_over_ranks(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """A new tensor with the sum of all ranks, on the device that it is on; the host does not wait."""
    if group is None:
        return tensor
    total = tensor.detach().clone()
    dist.all_reduce(total, group=group)
    return total


def any_over_ranks(flag: bool, group: dist.ProcessGroup | None) -> bool:
    """Whether any rank says so; the same answer on all."""
    return max_over_ranks(float(flag), group) > 0


def max_over_ranks(value: float, group: dist.ProcessGroup | None) -> float:
    """The largest value of all ranks."""
    return maxima_over_ranks([value], group)[0]


def maxima_over_ranks(values: list[float], group: dist.ProcessGroup | None) -> list[float]:
    """The largest of all ranks at each place."""
    if group is None:
        return list(values)
    shared = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=group)
    return shared.tolist()


def barrier(group: dist.ProcessGroup | None) -> None:
    """Wait until every rank is here. The host waits, a GPU does not."""
    max_over_ranks(0.0, group)


def broadcast_json(value: Any, group: dist.ProcessGroup | None) -> Any:
    """Rank 0's value, which JSON can hold, on every rank. No pickle travels."""
    if group is None:
        return value
    rank = dist.get_rank(group)
    text = json.dumps(value).encode() if rank == 0 else b""
    length = torch.tensor([len(text)], dtype=torch.int64)
    dist.broadcast(length, src=0, group=group)
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8) if rank == 0 else torch.empty(0, dtype=torch.uint8)
    if rank != 0:
        data = torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(data, src=0, group=group)
    return json.loads(bytes(data.tolist()))
