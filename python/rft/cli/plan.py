"""`rft plan cfg.toml`: will it fit, and how long, before anything is loaded."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rft import __version__, log
from rft.cli.arguments import ConfigPath, Sets, leave_stdout_to_json
from rft.config.load import load_config
from rft.errors import ConfigError
from rft.words import counted

if TYPE_CHECKING:
    from rft.training.machine import Machine
    from rft.training.planning import Answer

GIB = 2**30
MOST_GPUS = 65_536
DEFAULT_PER_NODE = 8
LEAST_MEMORY, MOST_MEMORY = 64 * 2**20, 4096 * GIB
_SHOWN = {
    "weights": "weights", "adapter": "adapter", "gradients": "gradients", "optimizer": "optimizer", "activations": "activations",
    "backward of a layer": "backward of a layer", "communication": "communication", "loss": "loss", "slack": "allocator's slack", "context": "CUDA context", "graph": "held by CUDA graphs",
}  # fmt: skip


def command(
    config: ConfigPath,
    sets: Sets = None,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", help="Plan for this GPU: H200, H100, A100-80, L40S, 4090, ...", show_default=False),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option("--memory", help="Memory of each GPU: 24GiB. Default: what it has.", show_default=False),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", help="How many GPUs.", min=1, max=MOST_GPUS, show_default=False)
    ] = None,
    per_node: Annotated[
        int | None, typer.Option("--per-node", help="GPUs of one node. Default: at most 8.", min=1, show_default=False)
    ] = None,
    probe: Annotated[bool, typer.Option("--probe", help="Run a few real steps here and compare.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> int:
    """Show what each rank will hold, what is chosen for every `auto` and why, and how fast it will be.

    Needs the model's config, neither its weights nor a GPU. Exit status 1 where it does not fit.
    """
    if as_json:
        leave_stdout_to_json()
    checked = load_config(config, sets or [], check_files=probe)
    machine = _machine(gpu, memory, gpus, per_node, probe=probe)
    from rft.training.planning import answer

    made = answer(checked, machine)
    measured = _probe(checked) if probe else None
    if as_json:
        report = {"rft": __version__, **made.to_json(), **({"probe": measured} if measured else {})}
        log.output(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    else:
        _show(made)
        if measured:
            _show_probe(made, measured)
    return 0 if made.planned.fits else 1


def _machine(gpu: str | None, memory: str | None, gpus: int | None, per_node: int | None, *, probe: bool) -> Machine:
    """The machine that is asked about. Raises ConfigError for a GPU that is not known and has no --memory."""
    import torch

    from rft.memory.devices import GPUS, UNKNOWN, find_gpu
    from rft.training.machine import Machine, inspect_machine

    ranks = gpus or 1
    node = _gpus_of_a_node(ranks, per_node)
    if probe and (gpu or memory or gpus):
        raise ConfigError("--probe", "runs on this machine", do="leave out --gpu, --memory and --gpus")
    if gpu is None and memory is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        ranks = gpus or (1 if device.type == "cpu" or probe else torch.cuda.device_count())
        found = inspect_machine(device, ranks)
        if device.type == "cpu" and not probe:
            names = ", ".join(g.name for g in GPUS)
            raise ConfigError(
                "rft plan",
                "this machine has no GPU to plan for",
                wanted="--gpu or --memory",
                do=f"--gpu with one of {names}",
            )
        return found
    known = find_gpu(gpu) if gpu else UNKNOWN
    if known is None and memory is None:
        raise ConfigError(
            f"--gpu {gpu}",
            "is not in the table of GPUs",
            wanted=", ".join(g.name for g in GPUS),
            do="add --memory for another one",
        )
    known = known or UNKNOWN
    size = _bytes(memory) if memory else known.memory_bytes
    return Machine(
        kind="cuda", device_name=known.name if gpu is None or known is not UNKNOWN else gpu, memory_bytes=size, world_size=ranks,
        bf16=known.capability >= (8, 0), cores=16, per_node=node,
    )  # fmt: skip


def _gpus_of_a_node(gpus: int, per_node: int | None) -> int:
    """As asked, or at most 8; nodes are alike. Raises ConfigError where that many are not whole nodes."""
    if per_node is not None and gpus % per_node:
        fewer, whole = _largest_divisor(gpus, per_node), max(per_node, gpus // per_node * per_node)
        raise ConfigError(
            f"--per-node {per_node}",
            f"{counted(gpus, 'GPU')} in all: no whole nodes of {per_node}",
            wanted="a number that divides --gpus",
            do=f"--per-node {fewer}, or --gpus {whole}",
        )
    return per_node or _largest_divisor(gpus, DEFAULT_PER_NODE)


def _largest_divisor(number: int, most: int) -> int:
    return max(n for n in range(1, min(number, most) + 1) if number % n == 0)


def _bytes(text: str) -> int:
    """24GiB, 24 (GiB), 80GB."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(GiB|G|GB|MiB|M)?\s*", text, re.IGNORECASE)
    if not match or float(match[1]) <= 0:
        raise ConfigError(f"--memory {text}", "is no size", wanted="a number of GiB, as in 24GiB")
    unit = {"gib": GIB, "g": GIB, "gb": 10**9, "mib": 2**20, "m": 2**20}[(match[2] or "GiB").lower()]
    size = float(match[1]) * unit
    if not LEAST_MEMORY <= size <= MOST_MEMORY:
        raise ConfigError(f"--memory {text}", "no GPU has so much or so little", wanted="64MiB to 4096GiB, as in 24GiB")
    return int(size)


# ---- for readers


def _show(made: Answer) -> None:
    from rft.training.headline import count

    planned, machine, config = made.planned, made.machine, made.config
    chosen, problem = planned.chosen, planned.problem
    name = Path(config.model.path).name
    nodes = "" if machine.world_size <= (machine.per_node or 8) else f", {machine.per_node} a node"
    log.say("model", f"{name} · {count(made.facts.num_parameters)} parameters, {count(made.facts.num_trained)} trained")
    rates = f" · rates: {planned.machinery.rates.source}" if machine.kind == "cuda" else ""
    log.say("machine", f"{machine.describe()}{nodes}{rates}")
    log.line()
    log.line(f"memory of a rank, GiB ({_MOMENTS[chosen.sizes.moment]})")
    rows = {**chosen.sizes.allocated, **chosen.sizes.beside}
    for key, size in rows.items():
        more = (
            "  "
            + ", ".join(f"{kind} {_gib(b * problem.facts.num_layers)}" for kind, b in chosen.sizes.layer.items() if b)
            if (key == "activations" and chosen.plan.recompute == chosen.plan.offload == "none")
            else ""
        )
        log.line(f"  {_SHOWN.get(key, key):22}{_gib(size):>8}{more}")
    log.line(f"  {'in all':22}{_gib(chosen.total):>8}  of {_gib(problem.memory_bytes)}")
    for what, size in (("host memory", chosen.sizes.host), ("disk", chosen.sizes.disk)):
        if size:
            log.line(f"  {what:22}{_gib(size):>8}")
    log.line()
    if machine.kind == "cuda":
        _show_speed(made)
    else:
        log.say("step", f"{made.tokens_per_step:,} tokens; the speed of a CPU is not planned")
    for decision in made.decisions:
        if decision.key in _PLANNED and not (decision.key.endswith("_layers") and decision.value == "all"):
            log.say("chosen", f"{decision.key} = {decision.value}: {decision.reason}")
    for words in made.without_effect:
        log.warn(words)
    if planned.fits:
        for words in planned.nearest() if machine.kind == "cuda" else ():
            log.say("or", words)
        return
    log.say(
        "too much",
        f"{_gib(chosen.total - problem.memory_bytes)} GiB more than there is, with the least that can be chosen",
    )
    for words in made.changes or (
        "nothing that this version can change alone would fit: a smaller model, or more GPUs",
    ):
        log.say("do", words)


def _show_speed(made: Answer) -> None:
    """A step by kind of work, and the run."""
    from rft.training.headline import count
    from rft.training.live import duration

    chosen, config = made.planned.chosen, made.config
    log.line("a step, ms of a rank")
    for key, seconds in chosen.times.parts.items():
        if seconds >= 5e-5:
            log.line(f"  {key:22}{1e3 * seconds:>8,.1f}")
    bound = (
        ""
        if chosen.times.launch < sum(chosen.times.parts.values())
        else f"  bound by the host's launches{_guessed(made)}"
    )
    log.line(f"  {'in all':22}{1e3 * chosen.seconds:>8,.1f}{bound}")
    log.line()
    if "disk" in (chosen.plan.offload, chosen.plan.offload_states):
        disk = made.planned.machinery.disk / 1e9
        log.say("assumed", f"a disk of {disk:.1f} GB/s each way; a run measures its own and writes it into its receipt")
    flops = made.step_flops()
    log.say(
        "step",
        f"{made.tokens_per_step:,} tokens, {flops / 1e12:,.0f} TFLOP · about {made.tokens_per_second:,.0f} tok/s",
    )
    if made.steps is not None:
        exact = "" if config.train.max_steps is not None else "about "
        tokens = made.steps * made.tokens_per_step
        steps = counted(made.steps, "step")
        log.say("run", f"{exact}{steps}, {count(tokens)} tokens, {duration(made.steps * chosen.seconds)}")
    else:
        log.say("run", "its length is not known: the training files are not here")


def _guessed(made: Answer) -> str:
    """What the reader has to know of the host's seconds where nobody measured them."""
    from rft.memory.devices import GUESSED_LAUNCH, GUESSED_PACKED_LAUNCH

    rates = made.planned.machinery.rates
    packed = made.planned.problem.base in ("nf4", "int8")
    guessed = rates.launch_packed == GUESSED_PACKED_LAUNCH if packed else rates.launch == GUESSED_LAUNCH
    if not made.planned.problem.kernels or guessed:
        return " (a guess until `rft doctor --calibrate` has measured this host)"
    return ""


_PLANNED = (
    "train.micro_batch",
    "memory.recompute",
    "memory.recompute_layers",
    "memory.offload",
    "memory.offload_layers",
    "memory.tiled_mlp",
    "loss.chunk_rows",
    "parallel.data",
)
_MOMENTS = {
    "forward": "most at the end of the forward pass", "loss": "most at the loss", "backward": "most in the backward pass of the last layer",
    "update": "most in the backward pass of the first layer", "embedding": "most at the embedding's gradient",
}  # fmt: skip


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}"


# ---- --probe


def _probe(config: Any) -> dict[str, Any]:
    """A few real steps of this config here: their time and peak, nothing of them kept."""
    from rft.training.probing import measure_steps

    with tempfile.TemporaryDirectory(prefix="rft-plan-") as folder, log.quiet():
        return measure_steps(config, Path(folder))


def _show_probe(made: Answer, measured: dict[str, Any]) -> None:
    chosen = made.planned.chosen
    log.line()
    log.line(f"measured over {measured['steps']} steps{'':9}planned  measured")
    if measured["peak_bytes"]:
        log.line(f"  {'peak, GiB':22}{_gib(chosen.sizes.peak):>10}{_gib(measured['peak_bytes']):>10}")
    if made.machine.kind == "cuda":
        log.line(f"  {'tokens/s':22}{made.tokens_per_second:>10,.0f}{measured['tokens_per_second']:>10,.0f}")
    else:
        log.line(
            f"  {'tokens/s':22}{'-':>10}{measured['tokens_per_second']:>10,.0f}  (the speed of a CPU is not planned)"
        )
