"""Planned against measured: peak memory and speed of a step at 16 settings, as `plan/worst-of-12` lines and one pair of lines a setting.

    python bench/train/plan.py --results FILE          on a GPU: every setting in a process of its own
    python bench/train/plan.py --only lora-8k qlora    some of them, by parts of their names
    python bench/train/plan.py --tiny                  the same path with tiny shapes on a CPU (no figures worth keeping)

Llama shapes of 8B and 1B with random weights; one document a pack, every token labelled, AdamW. Errors are |planned - measured| in percent of what was
measured: peak of torch's allocator over the measured steps, and real tokens a second. The worst of all settings are the two lines that
the project's targets hold. `--calibrated` measures the GPU's rates first (as `rft doctor --calibrate` does), else the table's are used.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
import turn
from step import SHAPES, TINY, answered, fill_on_device, packed

NEEDS = "a CUDA GPU of 140 GB"
WARM_UP, STEPS = 2, 4
LONG = 32768
"""Tokens from which on a step takes seconds, so that half as many do."""


@dataclass(frozen=True)
class Setting:
    """One line of the table."""

    name: str
    shape: str
    seq_len: int
    lora: bool = True
    base: str = "bf16"
    recompute: Any = "none"
    offload: str = "none"
    tiles: int = 1
    packs: int = 1


SETTINGS = (
    Setting("8b-lora-8k", "llama-8b", 8192),
    Setting("8b-lora-2k-x4", "llama-8b", 2048, packs=4),
    Setting("8b-lora-8k-full", "llama-8b", 8192, recompute="full"),
    Setting("8b-lora-8k-every-2", "llama-8b", 8192, recompute=2),
    Setting("8b-lora-32k-selective", "llama-8b", 32768, recompute="selective"),
    Setting("8b-lora-32k-full-cpu", "llama-8b", 32768, recompute="full", offload="cpu"),
    Setting("8b-lora-32k-full-tiles-4", "llama-8b", 32768, recompute="full", tiles=4),
    Setting("8b-lora-8k-all-to-cpu", "llama-8b", 8192, offload="cpu"),
    Setting("8b-fp8-8k", "llama-8b", 8192, base="fp8"),
    Setting("8b-fp8-32k-selective", "llama-8b", 32768, base="fp8", recompute="selective"),
    Setting("8b-qlora-8k-full", "llama-8b", 8192, base="nf4", recompute="full"),
    Setting("8b-qlora-2k", "llama-8b", 2048, base="nf4"),
    Setting("1b-full-2k-x4", "llama-1b", 2048, lora=False, packs=4),
    Setting("1b-full-8k", "llama-1b", 8192, lora=False),
    Setting("1b-full-8k-full", "llama-1b", 8192, lora=False, recompute="full"),
    Setting("1b-full-32k-selective", "llama-1b", 32768, lora=False, recompute="selective"),
)
ALL = {s.name: s for s in SETTINGS}


def measure(setting: Setting, tiny: bool) -> dict[str, Any]:
    """Build the setting of the library's own parts, run it, and plan it. Bytes, seconds, tokens."""
    import torch
    import transformers

    from rft.adapters.lora import inject, train_everything
    from rft.config.adapter import LoraConfig
    from rft.config.optim import AdamWConfig
    from rft.losses import SftLoss
    from rft.memory.devices import find_gpu, rates_of
    from rft.memory.plan import MemoryPlan
    from rft.memory.sizes import Problem, sizes
    from rft.memory.speed import Machinery, seconds
    from rft.models.attention import Needs, choose_backend, install_attention, register
    from rft.models.backbone import Backbone, decoder_layers
    from rft.models.decoder_layer import readers_of_one_input
    from rft.models.describe import describe
    from rft.models.head import Head, auto_chunk_rows
    from rft.models.receipts import Receipts
    from rft.models.surgery import apply_swaps
    from rft.optim import BUILDERS, clip_factor, grad_norm
    from rft.quant.fp8 import quantise_base
    from rft.quant.packed import place
    from rft.training.trainee import Trainee

    device = torch.device("cpu" if tiny else "cuda")
    dtype = torch.float32 if tiny else torch.bfloat16
    seq_len = setting.seq_len // 512 if tiny else setting.seq_len
    register()
    config = transformers.LlamaConfig(
        **{**SHAPES[setting.shape], **(TINY if tiny else {})}, max_position_embeddings=131072, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="rft", dtype=dtype)
    if setting.lora:
        model = inject(model, LoraConfig(r=16), dtype=torch.float32)
    else:
        train_everything(model, dtype=torch.float32)
    facts = describe(model)
    turn.take()
    kernels = not tiny
    apply_swaps(model, Receipts(), device=device, kernels=kernels)
    size = config.head_dim
    backend, _ = choose_backend("auto", device, dtype, Needs(head_size=size, value_size=size))
    state = install_attention(model, backend)
    layers = list(decoder_layers(model))
    rows = auto_chunk_rows(device.type, facts.vocab_size, kernels=kernels, head_trained=not setting.lora)
    save_memory(setting, layers, device)
    head = Head(model, chunk_rows=rows, kernels=kernels)
    trainee = Trainee(model, Backbone(model, state), head, SftLoss())
    boxes = place(model, layers, "nf4") if setting.base == "nf4" else None
    fill_on_device(model, device)
    if boxes is not None:
        for box in boxes.linears.values():
            box.codes.random_(0, 256)
            box.scales.random_(0, 256)
            box.nested.fill_(0.01)
            box.offset.fill_(0.05)
    if setting.base == "fp8" and not tiny:
        quantise_base(layers, readers=readers_of_one_input)
    named = [(n, p) for n, p in trainee.named_parameters() if p.requires_grad]
    uses = Counter(id(p) for _, p in trainee.named_parameters(remove_duplicate=False))
    optimizer = BUILDERS[AdamWConfig](
        named, AdamWConfig(name="adamw", lr=1e-5), compute_dtype=dtype if not tiny else None, kernels=kernels,
        narrow_gradients=frozenset(n for n, p in named if uses[id(p)] == 1 and not setting.lora and not tiny),
    )  # fmt: skip
    batch = packed([seq_len], setting.packs, config.vocab_size).to(device)
    trainee.train()

    def step() -> None:
        loss = trainee(batch)["next_token"] / batch.label_weight
        loss.backward()
        optimizer.step(clip_factor(grad_norm(optimizer.parameters), 1.0))
        optimizer.zero_grad()

    warm_up, steps = (WARM_UP // 2, STEPS // 2) if seq_len >= LONG else (WARM_UP, STEPS)
    for _ in range(warm_up):
        step()
    seconds_a_step = statistics.median(step_seconds(step, steps, device))
    plan = MemoryPlan(
        recompute=setting.recompute,
        offload=setting.offload,
        tiled_mlp=setting.tiles,
        chunk_rows=rows,
        micro_batch=setting.packs,
    )
    problem = Problem(
        facts, seq_len=seq_len, packs=setting.packs, memory_bytes=1 << 40, kernels=kernels, trained_in_full=not setting.lora,
        itemsize=dtype.itemsize, base=setting.base, attention=backend,
    )  # fmt: skip
    name = "H200" if tiny else torch.cuda.get_device_name()
    gpu = find_gpu(name)
    rates = rates_of(name)
    modelled = sizes(problem, plan)
    timed = seconds(problem, plan, Machinery(rates, **({"within": gpu.within} if gpu else {})))
    tokens = seq_len * setting.packs
    return {
        "peak": None if tiny else torch.cuda.max_memory_allocated(), "planned_peak": modelled.peak,
        "speed": tokens / seconds_a_step, "planned_speed": tokens / timed.step, "categories": modelled.allocated, "moment": modelled.moment,
        "parts": timed.parts, "attention": backend, "rates": rates.source,
    }  # fmt: skip


def step_seconds(step: Any, count: int, device: Any) -> list[float]:
    """Seconds of each of `count` steps that follow one another as in training: the host waits at the end only. Resets the peak before."""
    import torch

    if device.type != "cuda":
        times = []
        for _ in range(count):
            began = time.perf_counter()
            step()
            times.append(time.perf_counter() - began)
        return times
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    clocks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    clocks[0].record()
    for clock in clocks[1:]:
        step()
        clock.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(clocks)]


def save_memory(setting: Setting, layers: list[Any], device: Any) -> None:
    """Recompute, offload and tiles, as training/setup.py does."""
    from rft.memory.host_pool import HostPool
    from rft.memory.offload import Offloader
    from rft.memory.recompute import apply_recompute
    from rft.memory.tiled_mlp import apply_tiled_mlp

    if setting.tiles > 1:
        apply_tiled_mlp(layers, setting.tiles)
    offloader = None
    if setting.offload != "none":
        pool = HostPool(64 << 30, pinned=device.type == "cuda", disk=None)
        offloader = Offloader(setting.offload, device, pool, len(layers), device_bytes=0)
    apply_recompute(layers, setting.recompute, offloader)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, help="append result lines here")
    parser.add_argument("--only", nargs="*", help="parts of names")
    parser.add_argument("--calibrated", action="store_true", help="measure this GPU's rates first")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU: does every line run")
    parser.add_argument("--seconds", type=float, default=3600, help="limit for all of it")
    parser.add_argument("--part-seconds", type=float, default=120, help="limit for one setting")
    parser.add_argument("--verbose", action="store_true", help="show what the processes print")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        args.answer.write_text(json.dumps(measure(ALL[args.child], args.tiny)))
        return 0
    import torch  # so that the result lines name the GPU

    from results import Results
    from timing import versions_of

    if args.calibrated and torch.cuda.is_available():
        subprocess.run([sys.executable, "-m", "rft", "doctor", "--calibrate"], check=True)
    results = Results(args.results, versions=versions_of("flash-attn-4"))
    end = time.monotonic() + args.seconds
    errors: dict[str, list[float]] = {"memory_error_percent": [], "speed_error_percent": []}
    failed = 0
    print(f"{'setting':28}{'planned':>9}{'measured':>9} GiB{'planned':>10}{'measured':>10} tok/s")
    chosen = [s for s in SETTINGS if not args.only or any(part in s.name for part in args.only)]
    with tempfile.TemporaryDirectory() as folder:
        answers = [Path(folder) / f"{s.name}.json" for s in chosen]
        commands = [
            [sys.executable, "-P", __file__, "--child", s.name, "--answer", str(answer), *(["--tiny"] if args.tiny else [])]
            for s, answer in zip(chosen, answers, strict=True)
        ]  # fmt: skip
        ended = turn.in_turn(commands, args.part_seconds, end)
        for setting, answer, (status, output) in zip(chosen, answers, ended, strict=True):
            got = answered(status, output, answer, args.verbose, args.part_seconds)
            case = f"plan/{setting.name}"
            if got is None or "error" in got:
                failed += 1
                if got is not None:
                    results.error(case, "rft", got["error"])
                continue
            memory, planned_memory, speed, planned = (
                got[k] for k in ("peak", "planned_peak", "speed", "planned_speed")
            )
            shown = "-" if memory is None else f"{memory / 2**30:.2f}"
            print(
                f"{setting.name:28}{planned_memory / 2**30:>9.2f}{shown:>9}    {planned:>10,.0f}{speed:>10,.0f}",
                flush=True,
            )
            print(
                "   ",
                got["moment"],
                {k: round(v / 2**30, 2) for k, v in got["categories"].items()},
                got["attention"],
                flush=True,
            )
            print("   ", {k: f"{1e3 * v:.1f} ms" for k, v in got["parts"].items()}, flush=True)
            wrong = {"speed_error_percent": 100 * abs(planned - speed) / speed}
            if memory is not None:
                wrong["memory_error_percent"] = 100 * abs(planned_memory - memory) / memory
            for metric, value in wrong.items():
                results.add(case, "rft", metric, value)
                errors[metric].append(value)
            results.add(case, "rft", "tokens_per_second", speed)
            results.add(case, "rft", "tokens_per_second planned", planned)
            if memory is not None:
                results.add(case, "rft", "gib", memory / 2**30)
                results.add(case, "rft", "gib planned", planned_memory / 2**30)
    if len(errors["speed_error_percent"]) >= (1 if args.tiny else 12):
        for metric, values in errors.items():
            if values:  # a CPU has no peak of an allocator
                results.add("plan/worst-of-12", "rft", metric, max(values))
    else:
        print("fewer than 12 settings were measured: no plan/worst-of-12 lines")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
