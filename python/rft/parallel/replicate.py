"""Replicas: gradients summed over ranks in fp32 while the last micro-batch's backward still runs. Parameter names never change.

Trained parameters are dealt into buckets, last ones first, as backward reaches them. A bucket starts its all-reduce when
its last gradient is there and all buckets before it have started, so every rank starts them in one order and the sums are
the same in every run. A large fp32 gradient is summed in place; small ones, and bf16 ones, in a flat fp32 buffer that is
copied back and freed a few buckets later.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rft.parallel.mesh import World

BUCKET_NUMBERS = (
    8 * 1024 * 1024
)  # 32 MiB of fp32: NCCL reaches its bandwidth, and little is left to reduce after backward
BUCKETS_IN_FLIGHT = 4  # flat buffers alive at one time: 128 MiB


@dataclass
class _Bucket:
    parameters: list[nn.Parameter]
    places: list[int]
    """Number of each parameter among all trained ones."""
    missing: int = 0
    """Gradients that the last backward has not brought yet."""
    flat: Tensor | None = None
    works: list[dist.Work] = field(default_factory=list)


class GradientReducer:
    """Sums the gradients of `parameters` over ranks. `last` arms it: the next backward is the step's last."""

    def __init__(self, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup):
        self.group = group
        self.parameters = list(parameters)
        self.buckets = _deal(self.parameters)
        self.armed = False
        self._started = 0
        self._finished = 0
        self._ones = torch.ones(len(self.parameters), device=self.parameters[0].device)
        self._bucket_of = {id(p): bucket for bucket in self.buckets for p in bucket.parameters}
        self._hooks = [p.register_post_accumulate_grad_hook(self._arrived) for p in self.parameters]

    def arm(self) -> None:
        """The backward that comes now is the last of the step."""
        self.armed = True
        self._started = self._finished = 0
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)

    def disarm(self) -> None:
        """Give the step up: an error ended the backward."""
        self.armed = False

    def finish(self) -> None:
        """Start what is left, put the sums into `.grad`, and leave the reducer as it was before `arm`."""
        self.armed = False
        had = [p.grad is not None for p in self.parameters]
        for bucket in self.buckets[self._started :]:
            self._start(bucket)
        flags = self._ones.clone() if all(had) else torch.tensor(had, dtype=torch.float32).to(self._ones.device)
        dist.all_reduce(flags, group=self.group)
        for bucket in self.buckets[self._finished :]:
            self._finish(bucket)
        if not all(had):
            self._drop_unused(flags.tolist())  # the host waits here, only where a parameter took no part in this step

    def _arrived(self, parameter: nn.Parameter) -> None:
        if not self.armed:
            return
        self._bucket_of[id(parameter)].missing -= 1
        while self._started < len(self.buckets) and self.buckets[self._started].missing == 0:
            self._start(self.buckets[self._started])
            self._started += 1
            if self._started - self._finished > BUCKETS_IN_FLIGHT:
                self._finish(self.buckets[self._finished])
                self._finished += 1

    @torch.no_grad()
    def _start(self, bucket: _Bucket) -> None:
        for parameter in bucket.parameters:
            if parameter.grad is None:  # no rank may leave out a collective
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype or parameter.dtype)
        gradients = [p.grad for p in bucket.parameters if p.grad is not None]
        if len(gradients) == 1 and gradients[0].dtype == torch.float32 and gradients[0].is_contiguous():
            target = gradients[0]
        else:
            target = bucket.flat = torch.cat([g.reshape(-1).float() for g in gradients])
        bucket.works = [dist.all_reduce(target, group=self.group, async_op=True)]

    @torch.no_grad()
    def _finish(self, bucket: _Bucket) -> None:
        for work in bucket.works:
            work.wait()  # on CUDA the stream waits, not the host
        if bucket.flat is not None:
            gradients = [p.grad for p in bucket.parameters if p.grad is not None]
            parts = bucket.flat.split([g.numel() for g in gradients])
            torch._foreach_copy_(gradients, [part.view_as(g) for part, g in zip(parts, gradients, strict=True)])
        bucket.flat, bucket.works = None, []

    def _drop_unused(self, ranks_with_gradient: list[float]) -> None:
        """A parameter without a gradient on any rank has none after the sum either, as on one rank."""
        for parameter, count in zip(self.parameters, ranks_with_gradient, strict=True):
            if count == 0:
                parameter.grad = None


def _deal(parameters: list[nn.Parameter]) -> list[_Bucket]:
    """Buckets in the order of backward: the last parameters first. A parameter as large as a bucket gets one alone."""
    buckets: list[_Bucket] = []
    room = 0
    for place in range(len(parameters) - 1, -1, -1):
        size = parameters[place].numel()
        if size > room or size >= BUCKET_NUMBERS:
            buckets.append(_Bucket([], []))
            room = BUCKET_NUMBERS
        buckets[-1].parameters.append(parameters[place])
        buckets[-1].places.append(place)
        room = 0 if size >= BUCKET_NUMBERS else room - size
    return buckets


def apply_replicate(trainee: nn.Module, world: World) -> nn.Module:
    """Make the replicas equal (rank 0's trained values) and sum their gradients in each step's last backward.

    Call it on the materialised model. Nothing at one rank.
    """
    if world.group is None:
        return trainee
    trained = [p for p in trainee.parameters() if p.requires_grad]
    with torch.no_grad():
        for parameter in trained:
            dist.broadcast(parameter.detach(), src=0, group=world.group)
    # A plain attribute: no submodule, so no parameter changes its name.
    object.__setattr__(trainee, "gradient_reducer", GradientReducer(trained, world.group))
    return trainee


def gradient_reducer(trainee: nn.Module) -> GradientReducer | None:
    """What `apply_replicate` left on the trainee."""
    return getattr(trainee, "gradient_reducer", None)
