"""Keys of [memory], [loss] and [train] that were given and that the resolved run has no use for: each is told in one line.

What two keys of a file say against each other is refused earlier (config/compatibility.py). Here it is what was decided, the machine or the
length of the run that leaves a key without effect. A key that is left out, or says what happens anyway, is not told. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from rft import log
from rft.config.compatibility import is_set, uses_disk
from rft.config.root import Config
from rft.memory.devices import rates_of
from rft.memory.plan import recomputed
from rft.training.machine import Machine
from rft.words import counted

GIB = 2**30


@dataclass(frozen=True)
class Resolved:
    """A config before and after its `auto` were decided."""

    given: Config
    made: Config
    machine: Machine
    num_layers: int
    steps: int | None = None
    """Optimizer steps of the run; None: not known yet."""


Why = Callable[[Resolved], str | None]


def _recompute_layers(r: Resolved) -> str | None:
    count, recompute = r.given.memory.recompute_layers, r.made.memory.recompute
    assert recompute != "auto", "resolve() decides memory.recompute"
    named = len(recomputed(recompute, r.num_layers))
    if not isinstance(count, int) or count <= named:
        return None
    return f"memory.recompute = {recompute} names {counted(named, 'layer')}" if named else "memory.recompute is none"


def _offload_layers(r: Resolved) -> str | None:
    return _without_offload(r) if isinstance(r.given.memory.offload_layers, int) else None


def _without_offload(r: Resolved) -> str | None:
    return "memory.offload is none" if r.made.memory.offload == "none" else None


def _offload_keep(r: Resolved) -> str | None:
    return _without_offload(r) if r.given.memory.offload_keep > 0 else None


def _offload_dir(r: Resolved) -> str | None:
    return None if uses_disk(r.made) else "nothing goes to disk"


def _limit(r: Resolved) -> str | None:
    limit, machine = r.given.memory.limit, r.machine
    assert limit is not None
    if machine.kind == "cpu":
        return "the memory of a CPU run is not planned"
    context = rates_of(machine.device_name).context
    if limit * GIB >= machine.memory_bytes - context:
        total, beside = machine.memory_bytes / GIB, context / GIB
        return f"the GPU has {total:.1f} GiB, {beside:.1f} of them for the CUDA context: tensors cannot take more"
    memory = r.given.memory
    autos = [key for key in type(memory).model_fields if getattr(memory, key) == "auto"]
    if isinstance(r.given.train.micro_batch, int) and not autos:
        return "train.micro_batch and every way to save memory are given, so it decides nothing"
    return None


def _tiled_mlp(r: Resolved) -> str | None:
    given, packs = r.given.memory.tiled_mlp, r.made.train.micro_batch
    if not isinstance(given, int) or given == 1 or r.made.data.packing == "none":
        return None
    from rft.memory.tiled_mlp import MULTIPLE, pieces_of

    assert isinstance(packs, int), "resolve() decides train.micro_batch"
    assert r.made.data.seq_len is not None, "resolve() decides data.seq_len"
    tokens = packs * r.made.data.seq_len
    count = len(pieces_of(tokens, given))
    return None if count == given else f"{tokens:,} tokens in multiples of {MULTIPLE} are {counted(count, 'piece')}"


def _epochs(r: Resolved) -> str | None:
    most, epochs = r.given.train.max_steps, r.given.train.epochs
    return None if most is None or epochs == 1.0 else f"train.max_steps = {most} says when the run ends"


def _deterministic(r: Resolved) -> str | None:
    cpu = r.machine.kind == "cpu" and r.given.train.deterministic is False
    return "a CPU is always deterministic" if cpu else None


def _eval_every_steps(r: Resolved) -> str | None:
    every = r.given.train.eval_every_steps or math.inf
    short = r.steps is not None and r.steps < every
    return (
        f"the run has {counted(r.steps or 0, 'step')}: it is evaluated before the first and after the last"
        if short
        else None
    )


def _early_stop(r: Resolved) -> str | None:
    train = r.given.train
    assert train.early_stop is not None
    assert train.eval_every_steps is not None, "a rule refuses early stop without it"
    if r.steps is None or r.steps // train.eval_every_steps >= train.early_stop.patience:
        return None
    found = counted(r.steps // train.eval_every_steps, "evaluation")
    return f"{found} in {counted(r.steps, 'step')} are fewer than its patience of {train.early_stop.patience}"


IDLE: dict[str, Why] = {
    "memory.recompute_layers": _recompute_layers,
    "memory.offload_layers": _offload_layers,
    "memory.offload_host": _without_offload,
    "memory.offload_keep": _offload_keep,
    "memory.offload_dir": _offload_dir,
    "memory.limit": _limit,
    "memory.tiled_mlp": _tiled_mlp,
    "train.epochs": _epochs,
    "train.deterministic": _deterministic,
    "train.eval_every_steps": _eval_every_steps,
    "train.early_stop": _early_stop,
}
"""Key -> why it has no effect, or None. Asked only where the key was given."""


def without_effect(r: Resolved) -> dict[str, str]:
    """Key -> why, of every key that was given for nothing."""
    found: dict[str, str] = {}
    for key, why in IDLE.items():
        table, name = key.split(".")
        if is_set(getattr(r.given, table), name) and (reason := why(r)):
            found[key] = reason
    return found


def lines(r: Resolved) -> list[str]:
    """`memory.recompute_layers = 4 has no effect: memory.recompute is none`"""
    shown = []
    for key, reason in without_effect(r).items():
        table, name = key.split(".")
        value = getattr(getattr(r.given, table), name)
        plain = (
            f" = {str(value).lower() if isinstance(value, bool) else value}"
            if isinstance(value, bool | int | float | str)
            else ""
        )
        shown.append(f"{key}{plain} has no effect: {reason}")
    return shown


def tell(r: Resolved, *, but: Resolved | None = None) -> None:
    """A line for each, less those that were told of `but`."""
    told = () if but is None else lines(but)
    for line in lines(r):
        if line not in told:
            log.warn(line)
