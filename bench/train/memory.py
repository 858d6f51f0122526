"""The fastest setting within a given memory: rft as its planner decides, Unsloth (and Liger + PEFT) at the best of theirs.

    python bench/train/memory.py --results FILE                    everything, in order of importance
    python bench/train/memory.py --parts nf4 --systems rft         some of it: nf4, bf16, least-memory, leak
    python bench/train/memory.py --systems rft unsloth liger
    python bench/train/memory.py --tiny                            the same path with tiny shapes on a CPU (no figures worth keeping)

Cases (Llama shapes, random weights, every token labelled):
- `train/llama-8b/qlora-nf4/doc-8192-8gib`: one document of 8,192 tokens, LoRA r 16 over NF4; rft with `memory.limit` = 8.05, Unsloth by its
  defaults. Its peak has to be within the limit, or rft's next cheaper plan is measured, and told.
- `train/llama-8b/qlora-nf4/doc-8192-24gib`, `train/llama-8b/lora-fastest/doc-8192-{24,48,80}gib`: all under `set_per_process_memory_fraction`;
  the fastest setting of each system that ran there, over NF4 or over either of NF4 and bf16. What ran within less counts for more too.
- `train/llama-8b/lora-bf16/doc-65536`: default settings of both, the whole GPU.
- `train/llama-1b/full-bf16/8x2048-least-memory`: all weights trained in bf16 with stochastic rounding, 8-bit states, step in backward.
- `memory/500-steps`: a small Llama with offload, recompute and tiles for 500 steps; what device and host hold grows by so much from the first
  to the last 50 steps.
rft's settings are those that `resolve` gives a config whose `memory` is left to it (with `memory.offload = "auto"` where there is a limit).
A child process measures several settings on one model, and writes each as it is done; the next one's imports overlap (turn.py).
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]
import turn
from step import SEQ_LEN, STEPS, WARM_UP, Case, Setting, peer_step, saved_model

NEEDS = "a CUDA GPU of 140 GB, 48 GiB of host memory; unsloth and liger-kernel as peers"
GIB = 2**30
LONG, LONG_WARM_UP, LONG_STEPS = 65536, 2, 2
LEAK_STEPS, LEAK_WINDOW, LEAK_WARM_UP = 500, 50, 10
LESS, MOST_TRIED = 0.98, 4
"""Where a plan did not stay within its memory, the next one is the fastest that takes at most this share of it."""
DOC = "doc-8192"
NAMES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Work:
    """One setting that a child measures."""

    name: str
    tokens: int = SEQ_LEN
    limit: float | None = None
    """GiB that rft is told; None: the whole GPU."""
    caps: tuple[float, ...] = ()
    """GiB that the allocator may hold: the first within which it runs is taken; none: the whole GPU."""


@dataclass(frozen=True)
class Child:
    """One process: a system, its weights and setting, and what it measures."""

    name: str
    part: str
    system: str
    weights: str
    works: tuple[Work, ...]
    checkpointing: str = ""
    """Of Unsloth: False, True or unsloth; of Liger + PEFT: False or True."""


CHILDREN = (
    Child("rft-nf4", "nf4", "rft", "nf4", (Work("8gib", limit=8.05), Work("24", limit=24, caps=(24,)))),
    Child("unsloth-nf4-unsloth", "nf4", "unsloth", "nf4", (Work("24", caps=(24,)),), "unsloth"),
    Child("rft-1b", "least-memory", "rft", "1b", (Work("least", 2048, limit=6.8),)),
    Child("rft-bf16", "bf16", "rft", "bf16", (Work("48", limit=48, caps=(48,)), Work("65536", LONG))),
    Child("unsloth-bf16-unsloth", "bf16", "unsloth", "bf16", (Work("24", caps=(24, 48)), Work("65536", LONG)), "unsloth"),
    Child("unsloth-nf4-True", "nf4", "unsloth", "nf4", (Work("24", caps=(24, 48)),), "True"),
    Child("unsloth-bf16-False", "bf16", "unsloth", "bf16", (Work("48", caps=(48, 80)),), "False"),
    Child("unsloth-nf4-False", "nf4", "unsloth", "nf4", (Work("48", caps=(48,)),), "False"),
    Child("liger-bf16-False", "bf16", "liger", "bf16", (Work("48", caps=(48, 80)),), "False"),
    Child("liger-bf16-True", "bf16", "liger", "bf16", (Work("24", caps=(24, 48)),), "True"),
    Child("liger-nf4-True", "nf4", "liger", "nf4", (Work("24", caps=(24, 48)),), "True"),
    Child("rft-leak", "leak", "rft", "leak", (Work("leak", 4096),)),
)  # fmt: skip
"""What matters most comes first, in case time runs out."""


@dataclass(frozen=True)
class Line:
    """A case of the results, and the runs that count for it: (child, work) by parts of their names."""

    case: str
    children: tuple[str, ...]
    works: tuple[str, ...]
    cap: float | None = None


LINES = (
    Line(f"train/llama-8b/qlora-nf4/{DOC}-8gib", ("rft-nf4", "unsloth-nf4-unsloth"), ("8gib", "24")),
    Line(f"train/llama-8b/qlora-nf4/{DOC}-24gib", ("nf4",), ("8gib", "24"), 24),
    Line("train/llama-8b/lora-bf16/doc-65536", ("rft-bf16", "unsloth-bf16-unsloth"), ("65536",)),
    *(
        Line(f"train/llama-8b/lora-fastest/{DOC}-{cap}gib", ("nf4", "bf16"), ("8gib", "24", "48"), cap)
        for cap in (24, 48, 80)
    ),
)


@dataclass(frozen=True)
class Sized(Setting):
    """step.py's setting for any length."""

    tokens: int = SEQ_LEN

    @property
    def seq_len(self) -> int:
        return 16 if self.tiny else self.tokens


# ---- a child


class Told:
    """Writes each work's figures when it is done."""

    def __init__(self, path: Path):
        self._path = path

    def add(self, work: Work, **found: Any) -> None:
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"work": work.name, **found}) + "\n")


def run_child(child: Child, told: Told, tiny: bool, host_gib: float) -> None:
    if child.weights == "leak":
        measure_leak(child.works[0], told, tiny)
    elif child.system == "rft":
        measure_rft(child, told, tiny, host_gib)
    else:
        measure_peer(child, told, tiny)


def measure_rft(child: Child, told: Told, tiny: bool, host_gib: float) -> None:
    """Each work by the planner's own choice."""
    from _memory_model import build

    full = child.weights == "1b"
    packs = 8 if full else 1
    optim = config_of(child, child.works[0], 16, tiny).optim if full else None
    shape = "llama-1b" if full else "llama-8b"
    first = length_of(child.works[0], tiny)
    model = build(shape, first, tiny=tiny, base="nf4" if child.weights == "nf4" else "bf16", optim=optim, packs=packs)
    for work in child.works:
        planned = plan_of(child, work, model, tiny, host_gib)
        tried: list[str] = []
        plan: Any = planned.chosen.plan
        while plan is not None:
            expected = next(c for c in (planned.chosen, *planned.alternatives) if c.plan == plan)
            words = {k: v for k, v in vars(plan).items() if v is not None}
            print(f"{work.name}: {words}; planned {expected.sizes.peak / GIB:.2f} GiB, {work_tokens(work, packs, tiny) / expected.seconds:,.0f} tok/s, "
                  f"{ {k: round(v / GIB, 2) for k, v in expected.sizes.allocated.items()} }", flush=True)  # fmt: skip
            found = try_plan(model, plan, work, packs, tiny, host_gib)
            if "error" not in found:
                break
            tried.append(f"{words}: {found['error']}")
            print(f"{work.name}: {found['error']}", flush=True)
            smaller = [c for c in planned.alternatives if c.total < LESS * expected.total]
            plan = min(smaller, key=lambda c: c.seconds).plan if smaller and len(tried) < MOST_TRIED else None
        model.save_memory("none")
        empty_cache()
        cap(None)
        setting = {**words, "planned gib": expected.sizes.peak / GIB, "planned tokens_per_second": work_tokens(work, packs, tiny) / expected.seconds}  # fmt: skip
        told.add(work, **found, setting=setting, tried=tried)


def try_plan(model: Any, plan: Any, work: Work, packs: int, tiny: bool, host_gib: float) -> dict[str, Any]:
    """Figures of a plan, or {"error": ...} where it does not stay within what the work has."""
    import torch
    from step import packed

    cap(work.caps[0] if work.caps else None)
    model.batch = packed([length_of(work, tiny)], packs, model.facts.vocab_size).to(model.device)
    if tiny:  # nothing is gained by it there: so that each of its lines runs
        plan = replace(plan, recompute="full", recompute_layers=2, offload="cpu", offload_layers=2)
    offloader = model.put(plan, host_gib=host_gib, smallest=64 if tiny else None)
    found: dict[str, Any]
    if not tiny:
        torch.cuda.reset_peak_memory_stats()
    try:
        found = clocked(lambda: (model.step(), model.batch.num_tokens), work, tiny)
    except torch.OutOfMemoryError as error:
        found = {"error": " ".join(str(error).split())[:200]}
    if "error" in found:
        model.optimizer.zero_grad()
    if work.limit is not None and not tiny and found.get("gib", 0.0) > work.limit:
        found = {"error": f"peak of {found['gib']:.2f} GiB, over the limit of {work.limit:g}"}
    if offloader is not None:
        found["offload"] = (
            f"{offloader.num_leaving} layers, {offloader.pool.peak_bytes / GIB:.1f} GiB host, {offloader.fetched_late} late"
        )
    model.save_memory("none")
    empty_cache()
    return found


def config_of(child: Child, work: Work, length: int, tiny: bool) -> Any:
    """The config of a user who asks for this and leaves the rest to rft."""
    from rft.config.root import Config

    tables: dict[str, Any] = {
        "model": {"path": "m", "base_weights": "nf4" if child.weights == "nf4" else "bf16"},
        "data": {"train": [{"path": "d"}], "seq_len": length},
        "train": {"tokens_per_step": length, "precision": "fp32" if tiny else "bf16"},
        "memory": {},
    }
    if work.limit is not None:
        tables["memory"] = {"limit": work.limit / 2e5 if tiny else work.limit, "offload": "auto"}
    if child.weights == "1b":
        tables["adapter"] = {"name": "none"}
        library = "bitsandbytes" if importlib.util.find_spec("bitsandbytes") else "torchao"
        tables["optim"] = {"name": "adamw_8bit", "lr": 1e-5, "in_backward": True, "library": library}
        tables["train"] = {
            "tokens_per_step": 8 * length, "micro_batch": 8, "max_grad_norm": "none", "precision": "fp32" if tiny else "bf16",
            **({} if tiny else {"master": "bfloat16"}),
        }  # fmt: skip
    return Config.model_validate(tables)


def plan_of(child: Child, work: Work, model: Any, tiny: bool, host_gib: float) -> Any:
    """What `resolve` decides for it on this machine. With tiny shapes: on a GPU that is not there."""
    from rft.memory import planner
    from rft.memory.plan import MemoryPlan
    from rft.training.machine import Machine, inspect_machine
    from rft.training.resolve import memory_problem, resolve, resolve_precision

    if tiny:
        machine = Machine("cuda", "NVIDIA H200", 140 * GIB, 1, True, 2, host_bytes=GIB)
    else:
        machine = replace(inspect_machine(model.device, 1), host_bytes=int(host_gib * GIB))
    asked, _ = resolve_precision(config_of(child, work, length_of(work, tiny), tiny), machine)
    config, decisions = resolve(
        asked, model.facts, machine, attention=(model.attention, "serves"), chunk_rows=model.rows, store="sets", kernels=not tiny
    )  # fmt: skip
    for decision in decisions:
        if decision.key.startswith(("memory.", "loss.", "train.micro_batch")):
            print(f"    {decision.key} = {decision.value}: {decision.reason}", flush=True)
    loss = config.loss.model_copy(update={"chunk_rows": model.rows})
    free = config.model_copy(update={"memory": asked.memory, "loss": loss})  # once more, for what else there is
    problem, given, machinery = memory_problem(
        free, model.facts, machine, kernels=not tiny, can_recompute=True, one_pack=False
    )
    planned = planner.plan(problem, replace(given, least_loss=not tiny), machinery)
    assert planned.chosen.plan == MemoryPlan.of(config), (planned.chosen.plan, MemoryPlan.of(config))
    return planned


def length_of(work: Work, tiny: bool) -> int:
    return work.tokens // 512 if tiny else work.tokens


def work_tokens(work: Work, packs: int, tiny: bool) -> int:
    return packs * length_of(work, tiny)


def measure_peer(child: Child, told: Told, tiny: bool) -> None:
    """Each work within the smallest of its caps in which it runs."""
    import torch

    longest = max(work.tokens for work in child.works)
    case = Case(child.name, "llama-8b", "lora", "bf16", "doc", defaults=child.checkpointing != "False")
    setting = Sized(case, tiny, "auto", tokens=longest)
    build = peer_unsloth if child.system == "unsloth" else peer_liger
    model = build(child, setting)
    for work in child.works:
        found: dict[str, Any] = {"error": "not run"}
        for limit in work.caps or (None,):
            cap(limit)
            try:
                step = peer_step(Sized(case, tiny, "auto", tokens=work.tokens), model, setting.device)
                found = {**clocked(step, work, tiny), "cap": limit}
            except torch.OutOfMemoryError as error:
                found = {"error": f"within {limit or 'all'} GiB: {' '.join(str(error).split())[:160]}"}
            step = None  # type: ignore[assignment]  # holds the optimizer
            model.zero_grad(set_to_none=True)
            empty_cache()
            if "error" not in found:
                break
            print(f"{work.name}: {found['error']}", flush=True)
        cap(None)
        told.add(work, **found, setting={"weights": child.weights, "checkpointing": child.checkpointing})


def peer_unsloth(child: Child, setting: Setting) -> Any:
    if setting.tiny:
        raise RuntimeError("Unsloth needs a GPU")
    import unsloth  # noqa: F401  # before transformers
    from unsloth import FastLanguageModel

    turn.take()
    folder = saved_model(setting)
    checkpointing: Any = {"False": False, "True": True}.get(child.checkpointing, child.checkpointing)
    model, _ = FastLanguageModel.from_pretrained(
        str(folder), max_seq_length=setting.seq_len, load_in_4bit=child.weights == "nf4"
    )
    return FastLanguageModel.get_peft_model(
        model, r=16, lora_alpha=32, lora_dropout=0, bias="none", target_modules=NAMES, use_gradient_checkpointing=checkpointing
    )  # fmt: skip


def peer_liger(child: Child, setting: Setting) -> Any:
    """transformers + Liger's kernels + PEFT; NF4 by bitsandbytes as transformers loads it."""
    import torch
    from peft import LoraConfig, get_peft_model
    from step import fill_on_device
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    if not setting.tiny:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    turn.take()
    if child.weights == "nf4" and not setting.tiny:
        four = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16
        )  # fmt: skip
        model = AutoModelForCausalLM.from_pretrained(
            saved_model(setting), quantization_config=four, dtype=torch.bfloat16, attn_implementation="sdpa", device_map="cuda"
        )  # fmt: skip
    else:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                setting.config(), attn_implementation="sdpa", dtype=torch.float32 if setting.tiny else torch.bfloat16
            )
        fill_on_device(model, torch.device(setting.device))
    model.config.use_cache = False
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=NAMES, task_type="CAUSAL_LM"))
    if child.checkpointing == "True":
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def clocked(step: Callable[[], tuple[Any, int]], work: Work, tiny: bool) -> dict[str, Any]:
    """tokens/s of each step, peaks of what is allocated and held over the measured steps, losses. Steps follow one another as in training."""
    import torch

    warm_up, steps = (1, 2) if tiny else (LONG_WARM_UP, LONG_STEPS) if work.tokens >= LONG else (WARM_UP, STEPS)
    losses = []
    for _ in range(warm_up):
        losses.append(float(step()[0]))
        gib = 0.0 if tiny else torch.cuda.max_memory_allocated() / GIB
        if work.limit is not None and not tiny and gib > work.limit:
            return {"error": f"peak of {gib:.2f} GiB, over the limit of {work.limit:g}, in its first steps"}
    if tiny:
        rates = []
        for _ in range(steps):
            began = time.perf_counter()
            loss, tokens = step()
            rates.append(tokens / (time.perf_counter() - began))
        return {"rates": rates, "gib": 0.0, "held": 0.0, "losses": [*losses, float(loss)]}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    clocks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    clocks[0].record()
    for clock in clocks[1:]:
        loss, tokens = step()
        clock.record()
    torch.cuda.synchronize()
    return {
        "rates": [tokens / (a.elapsed_time(b) / 1e3) for a, b in itertools.pairwise(clocks)],
        "gib": torch.cuda.max_memory_allocated() / GIB, "held": torch.cuda.max_memory_reserved() / GIB, "losses": [*losses, float(loss)],
    }  # fmt: skip


def cap(gib: float | None) -> None:
    """What the allocator of this process may hold; None: all there is."""
    import torch

    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(1.0 if gib is None else gib * GIB / total)


def empty_cache() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def measure_leak(work: Work, told: Told, tiny: bool) -> None:
    """What device and host hold, step by step, with everything that saves memory at work."""
    import torch
    from _memory_model import build

    from rft.memory.plan import MemoryPlan

    model = build("llama-1b", length_of(work, tiny), num_layers=4, tiny=tiny)
    model.put(
        MemoryPlan(recompute="selective", recompute_layers=2, offload="cpu", tiled_mlp=2, chunk_rows="least"),
        smallest=64 if tiny else None,
    )
    steps, window = (15, 5) if tiny else (LEAK_STEPS, LEAK_WINDOW)
    device, held, host = [], [], []
    cuda = model.device.type == "cuda"
    for _ in range(LEAK_WARM_UP + steps):
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        loss = model.step()
        if cuda:
            device.append(torch.cuda.max_memory_allocated())
            held.append(torch.cuda.memory_reserved())
        host.append(resident_bytes())
    series = {"host": host} | ({"device": device, "held": held} if cuda else {})
    kept = {name: values[LEAK_WARM_UP:] for name, values in series.items()}
    growth = {
        name: (statistics.median(values[-window:]) - statistics.median(values[:window])) / 2**20
        for name, values in kept.items()
    }
    last = {name: statistics.median(values[-window:]) / GIB for name, values in kept.items()}
    told.add(work, growth=growth, last=last, losses=[float(loss)], steps=steps)


def resident_bytes() -> int:
    """Of this process, what is pinned among it."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# ---- the parent


@dataclass(frozen=True)
class Run:
    """What a child measured."""

    child: Child
    work: str
    found: dict[str, Any]

    @property
    def rate(self) -> float:
        return statistics.median(self.found["rates"])

    def within(self, gib: float) -> bool:
        """Whether it ran where no more could be held, or held no more."""
        work = next(w for w in self.child.works if w.name == self.work)
        ran_in = self.found.get("cap") or (work.caps[0] if work.caps else None)
        return (ran_in is not None and ran_in <= gib) or self.found["held"] <= gib

    def describe(self) -> str:
        return f"{self.child.weights}, {self.found['setting']}"


def read_runs(child: Child, answer: Path, status: int | None, output: str, each: float, verbose: bool) -> list[Run]:
    """What it wrote; an error for each work that it did not come to, but for want of the bench's own time: that is told and is no result."""
    tail = [line for line in output.strip().splitlines() if line.strip()]
    if verbose or status != 0 or child.system == "rft":
        print("\n".join(f"    {line}" for line in tail[-60:]), flush=True)
    lines = answer.read_text(encoding="utf-8").splitlines() if answer.exists() else []
    found = {line.pop("work"): line for line in map(json.loads, lines)}
    if status == turn.OUT_OF_TIME:
        print(f"    {child.name}: no time left", flush=True)
        return [Run(child, work.name, found[work.name]) for work in child.works if work.name in found]
    why = f"no end after {each:.0f} s" if status is None else (tail[-1] if tail else f"exit status {status}")[:300]
    return [Run(child, work.name, found.get(work.name, {"error": why})) for work in child.works]


def write(results: Any, line: Line, runs: list[Run], systems: list[str]) -> None:
    """Of each system the fastest run that counts, with its setting, or its error. Nothing where one that may be the fastest was not run."""
    absent = unknown(line, runs, systems)
    if absent:
        print(f"{line.case}: not told, {', '.join(absent)} not run", flush=True)
        return
    for system in systems:
        of_system = [r for r in runs if r.child.system == system and r.work in line.works and counts(line, r.child)]
        if line.case.endswith("-8gib"):
            of_system = [r for r in of_system if r.work == ("8gib" if system == "rft" else "24")]
        good = [r for r in of_system if "error" not in r.found and (line.cap is None or r.within(line.cap))]
        if not good:
            if of_system:
                errors = [r.found.get("error", f"held {r.found.get('held', 0):.1f} GiB") for r in of_system]
                results.error(line.case, system, "; ".join(errors)[:300])
            continue
        best = max(good, key=lambda r: r.rate)
        results.add(line.case, system, "tokens_per_second", best.found["rates"])
        results.add(line.case, system, "gib", best.found["gib"])
        print(f"    {best.describe()}", flush=True)


def unknown(line: Line, runs: list[Run], systems: list[str]) -> list[str]:
    """What counts for a line and was not run: `process/work`."""
    done = {(r.child.name, r.work) for r in runs}
    return [
        f"{child.name}/{work.name}"
        for child in CHILDREN
        for work in child.works
        if child.system in systems and counts(line, child) and work.name in line.works
        and (line.cap is None or not work.caps or min(work.caps) <= line.cap) and (child.name, work.name) not in done
    ]  # fmt: skip


def counts(line: Line, child: Child) -> bool:
    return any(part in child.name for part in line.children)


def write_own(results: Any, run: Run) -> None:
    """Lines of one run alone: what was measured of it, whatever it counts for."""
    found, child = run.found, run.child
    if child.weights == "leak":
        case = "memory/500-steps"
        if "error" in found:
            results.error(case, "rft", found["error"])
            return
        for name, mib in found["growth"].items():
            results.add(case, "rft", f"mib_growth {name}", mib)
        for name, gib in found["last"].items():
            results.add(case, "rft", f"gib {name}", gib)
        return
    if child.weights == "1b":
        case = "train/llama-1b/full-bf16/8x2048-least-memory"
    else:
        case = f"memory/llama-8b/{child.weights}/{child.checkpointing or 'planned'}/doc-{run.work}"
    if "error" in found:
        results.error(case, child.system, found["error"])
        return
    results.add(case, child.system, "tokens_per_second", found["rates"])
    results.add(case, child.system, "gib", found["gib"])
    results.add(case, child.system, "gib held", found["held"])
    for name in ("planned gib", "planned tokens_per_second"):
        if name in found["setting"]:
            results.add(case, child.system, name, found["setting"][name])
    print(f"    {found['setting']}, losses {[round(x, 3) for x in found['losses']]}, {found.get('offload', '')}")
    for words in found.get("tried", ()):
        print(f"    did not stay within its memory: {words}")


def chosen_children(args: argparse.Namespace) -> Iterator[Child]:
    for child in CHILDREN:
        of_part = not args.parts or child.part in args.parts
        named = not args.only or any(part in child.name for part in args.only)
        if of_part and named and child.system in args.systems:
            yield child


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, help="append result lines here")
    parser.add_argument("--parts", nargs="*", choices=sorted({c.part for c in CHILDREN}))
    parser.add_argument(
        "--only", nargs="*", help="parts of the names of processes: " + ", ".join(c.name for c in CHILDREN)
    )
    parser.add_argument("--systems", nargs="*", choices=["rft", "unsloth", "liger"], default=["rft", "unsloth"])
    parser.add_argument("--host-gib", type=float, default=48.0, help="host memory that rft may pin")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU: does every line run")
    parser.add_argument("--seconds", type=float, default=3600, help="limit for all of it")
    parser.add_argument("--part-seconds", type=float, default=200, help="limit for one process")
    parser.add_argument("--verbose", action="store_true", help="show what the processes print")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child = next(c for c in CHILDREN if c.name == args.child)
        run_child(child, Told(args.answer), args.tiny, args.host_gib)
        return 0
    import torch  # so that the result lines name the GPU  # noqa: F401

    from results import Results
    from timing import versions_of

    results = Results(
        args.results, versions=versions_of("liger-kernel", "unsloth", "flash-attn-4", "bitsandbytes", "torchao")
    )
    end = time.monotonic() + args.seconds
    environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    if args.tiny:
        environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    children = list(chosen_children(args))
    pending = [line for line in LINES if any(any(p in c.name for p in line.children) for c in children)]
    runs: list[Run] = []
    with tempfile.TemporaryDirectory() as folder:
        answers = [Path(folder) / f"{child.name}.jsonl" for child in children]
        commands = [
            [sys.executable, "-P", __file__, "--child", c.name, "--answer", str(answer), "--host-gib", str(args.host_gib),
             *(["--tiny"] if args.tiny else [])]
            for c, answer in zip(children, answers, strict=True)
        ]  # fmt: skip
        ended = turn.in_turn(commands, args.part_seconds, end, environment)
        for number, (child, answer, (status, output)) in enumerate(zip(children, answers, ended, strict=True)):
            made = read_runs(child, answer, status, output, args.part_seconds, args.verbose)
            runs += made
            for run in made:
                write_own(results, run)
            to_come = children[number + 1 :]
            for line in list(pending):  # as soon as everything that counts for it is there
                if not any(any(p in c.name for p in line.children) for c in to_come):
                    write(results, line, runs, args.systems)
                    pending.remove(line)
    return int(any("error" in run.found for run in runs if run.child.system == "rft"))


if __name__ == "__main__":
    sys.exit(main())
