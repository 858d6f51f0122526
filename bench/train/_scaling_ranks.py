"""What each rank of bench/train/scaling.py does: rft's run and the competitor's, their steps, checkpoints and bandwidth."""

from __future__ import annotations

import dataclasses
import itertools
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WARM_UP, STEPS = 3, 8


@dataclass(frozen=True)
class Setting:
    """What is trained, and how the ranks share it."""

    shape: str
    adapter: str
    """lora or none."""
    data: str
    """parallel.data of rft."""
    peer_recompute: bool = False
    """Whether the competitor computes its layers again: where the bar of the project's targets was measured so."""
    least_ranks: int = 1
    """With fewer the optimizer's states alone do not fit."""


SETTINGS = {
    "llama-8b/lora-bf16": Setting("llama-8b", "lora", "replicate"),
    "llama-8b/lora-bf16-sharded": Setting("llama-8b", "lora", "shard"),
    "llama-8b/full-bf16": Setting("llama-8b", "none", "shard", peer_recompute=True, least_ranks=2),
    "llama-1b/full-bf16": Setting("llama-1b", "none", "auto"),
    "llama-1b/full-bf16-sharded": Setting("llama-1b", "none", "shard"),
}
PARITY = {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 64, "vocab_size": 2048, "tie_word_embeddings": False,
}  # fmt: skip
TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 320,
}  # fmt: skip


@dataclass(frozen=True)
class Task:
    """What a set of processes is told."""

    part: str
    system: str
    setting: str
    tokens: int
    documents: str
    ranks: int
    model: str
    """Folder of the shape's config.json."""
    run_dir: str
    tiny: bool
    save: bool = False
    resume: bool = False
    recompute: str = "none"
    precision: str = "bf16"
    data: str = ""
    """parallel.data, where it is not the setting's."""
    packs: int = 0
    """Packs of a step over all ranks; 0 = one a rank."""
    steps: int = STEPS
    warm_up: int = WARM_UP
    lr: float = 1e-5

    @property
    def device(self) -> str:
        return "cpu" if self.tiny else "cuda"


class DrawnWeights:
    """In the place of a checkpoint's reader: each tensor drawn on the device by its name, so that every rank cuts its part of the same numbers."""

    def __init__(self, reader: Any, device: Any):
        self.reader, self.device = reader, device

    def names(self) -> list[str]:
        return self.reader.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.reader.shape(name)

    def read(self, name: str, part: Any = None) -> Any:
        import torch

        shape = self.shape(name)
        if len(shape) == 1:
            whole = torch.ones(shape, dtype=torch.bfloat16, device=self.device)
        else:
            generator = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))
            whole = torch.empty(shape, dtype=torch.bfloat16, device=self.device).normal_(std=0.02, generator=generator)
        return whole[part] if part else whole


# ---- rft


def make_batch(task: Task, number: int, vocabulary: int) -> Any:
    """Pack `number` of a step: the same whichever rank computes it."""
    import numpy as np
    from step import packed

    lengths = [task.tokens]
    if task.documents == "packed":
        rng = np.random.default_rng(number)
        lengths = []
        while (left := task.tokens - sum(lengths)) > 0:
            lengths.append(min(left, int(min(2048, max(2, rng.lognormal(np.log(400) - 0.32, 0.8))))))
    batch = packed(lengths, 1, vocabulary)
    import torch

    ids = torch.randint(3, vocabulary, (task.tokens,), generator=torch.Generator().manual_seed(number))
    shifted = torch.where(batch.labels[0] == -100, batch.labels[0], ids.roll(-1))
    return dataclasses.replace(batch, input_ids=ids[None], labels=shifted[None])


class Packs:
    """What save and resume ask a loader for."""

    def __init__(self, packs_per_step: int, steps: int = 1000):
        self.packs_per_step, self.steps_of_epoch = packs_per_step, steps

    def plan_hash(self, epoch: int) -> str:
        return f"packs drawn by number, {self.packs_per_step} a step"

    def share_done(self, epoch: int, steps: int, packs_per_step: int) -> float:
        return steps / self.steps_of_epoch

    def steps_in_epoch(self, epoch: int, packs_per_step: int) -> int:
        return self.steps_of_epoch

    def cursor(self, packs: int) -> None:
        """None: the number of packs says it all."""

    def close(self) -> None:
        pass


def build_rft(task: Task, world: Any) -> tuple[Any, list[Any]]:
    """(Run, this rank's micro-batches of a step), by the functions that `rft train` calls, in their order."""
    from rft.config.root import Config
    from rft.optim import Schedule
    from rft.training.run import Run
    from rft.training.setup import build_optimizer, build_trainee, inspect_job, seed_everything
    from rft.training.state import TrainState

    setting = SETTINGS.get(task.setting, Setting("parity", "none", "shard"))
    packs = task.packs or world.world_size
    recompute: Any = int(task.recompute) if task.recompute.isdigit() else task.recompute
    values = {
        "model": {"path": task.model},
        "adapter": {"name": "lora", "r": 16} if setting.adapter == "lora" else {"name": "none"},
        "data": {"train": [{"path": "none.jsonl"}], "seq_len": task.tokens},
        "optim": {"lr": task.lr, "schedule": {"name": "constant", "warmup_steps": 0}},
        "parallel": {"data": task.data or setting.data},
        "memory": {"recompute": recompute},
        "train": {
            "precision": task.precision, "micro_batch": 1, "accumulate": packs // world.world_size, "out": task.run_dir,
            "deterministic": False,
        },
    }  # fmt: skip
    seed_everything(0)
    job = inspect_job(Config.model_validate(values), world)
    job.source = dataclasses.replace(job.source, reader=DrawnWeights(job.source.reader, world.device))
    trainee = build_trainee(job)
    optimizer = build_optimizer(job, trainee)
    run = Run(
        config=job.config, decisions=job.decisions, run_dir=Path(task.run_dir), device=world.device, model=trainee.model, trainee=trainee,
        losses=trainee.losses, optimizer=optimizer, schedule=Schedule(job.config.optim.schedule, 1000, optimizer.param_groups),
        loader=Packs(packs), packs_per_step=packs, total_steps=1000, state=TrainState(packs_per_step=packs, total_steps=1000),
        rank=world.rank, world_size=world.world_size, local_rank=world.local_rank, data_group=world.group, source=job.source,
        tokenizer=job.tokenizer, receipts=job.receipts.to_json(),
    )  # type: ignore[arg-type]  # fmt: skip
    run.state.plan_hash = run.loader.plan_hash(0)
    vocabulary = job.facts.vocab_size
    own = [make_batch(task, i, vocabulary).to(world.device) for i in range(world.rank, packs, world.world_size)]
    return run, own


def rft_facts(run: Any) -> dict[str, Any]:
    return {
        "mode": run.config.parallel.data,
        "recompute": run.config.memory.recompute,
        "attention": run.config.model.attention,
    }


# ---- the competitor


def build_peer(task: Task, world: Any) -> tuple[Callable[[], Any], dict[str, Any]]:
    """One step of transformers' model under torch's FSDP2 (or DDP where rft replicates): bf16 from fp32 masters, fused AdamW."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import AutoConfig, AutoModelForCausalLM

    setting, lora = SETTINGS[task.setting], SETTINGS[task.setting].adapter == "lora"
    config = AutoConfig.from_pretrained(task.model)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation="sdpa", dtype=torch.bfloat16 if lora else torch.float32
        )
    model.config.use_cache = False
    if lora:
        from peft import LoraConfig, get_peft_model

        names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        with torch.device("meta"):
            model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=names, task_type="CAUSAL_LM"))
    if setting.peer_recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    causal = model.get_base_model() if lora else model
    sharded = task.system.endswith("fsdp2")
    mesh = init_device_mesh(task.device, (world.world_size,)) if sharded else None
    if sharded:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for layer in causal.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    fill(model, causal, world)
    if not sharded:
        model = torch.nn.parallel.DistributedDataParallel(
            model, device_ids=None if task.tiny else [world.local_rank], gradient_as_bucket_view=True
        )
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=not task.tiny)
    ids = make_batch(task, world.rank, config.vocab_size).input_ids.to(world.device)

    def step() -> Any:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, {"recompute": "full" if setting.peer_recompute else "none"}


def fill(model: Any, causal: Any, world: Any) -> None:
    """Random weights where they stay (sharded: each rank's own part), ties kept, rotary tables made again."""
    import torch

    from rft.models.load import _shared_parameters, _tie_again
    from rft.parallel.fsdp import local_part

    shared = _shared_parameters(model)
    model.to_empty(device=world.device)
    _tie_again(shared)
    rotary = causal.model.rotary_emb
    causal.model.rotary_emb = type(rotary)(config=rotary.config).to(world.device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local = local_part(parameter)[0]
            if "lora_B" in name:
                local.zero_()
            elif parameter.dim() == 1:
                local.fill_(1.0)
            else:
                local.normal_(std=0.02)


# ---- what a rank does


def child(task: Task) -> dict[str, Any]:
    """Runs in every rank; the first one's answer counts."""
    from rft.parallel.mesh import join_world, leave_world

    world = join_world(task.device)
    if task.tiny:
        import torch

        torch.set_num_threads(1)
    found = {"nccl": bandwidth, "speed": speed, "parity": parity, "load": load}[task.part](task, world)
    leave_world()
    return found


def speed(task: Task, world: Any) -> dict[str, Any]:
    """tokens/s a GPU of each step, peak GiB, milliseconds of waiting; then, with `save`, a checkpoint and the losses of two more steps."""
    import torch

    run = None
    if task.system == "rft":
        from rft.training.step import train_step

        run, own = build_rft(task, world)
        facts = rft_facts(run)

        def step() -> Any:
            return train_step(run, own).terms["next_token"]
    else:
        step, facts = build_peer(task, world)
    losses = [float(step()) for _ in range(task.warm_up)]
    cuda = task.device == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = step_seconds(step, task.steps, cuda)
    found: dict[str, Any] = {
        "rates": [task.tokens / s for s in seconds], "facts": facts, "losses": losses,
        "gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0,
    }  # fmt: skip
    found |= waiting(step, cuda)
    if task.save and run is not None:
        found["checkpoint"] = save(run, own)
    return found


def step_seconds(step: Callable[[], Any], count: int, cuda: bool) -> list[float]:
    """Of each step; on a GPU between events on its stream, the host running ahead as it does in a run."""
    import torch

    if not cuda:
        seconds = []
        for _ in range(count):
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
        return seconds
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events)]


def waiting(step: Callable[[], Any], cuda: bool, steps: int = 2) -> dict[str, float]:
    """Milliseconds a step in which communication runs, and in which nothing else does, from a trace of two steps."""
    import torch
    from torch.profiler import ProfilerActivity

    kind = ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU
    with torch.profiler.profile(activities=[kind]) as traced:
        for _ in range(steps):
            step()
        if cuda:
            torch.cuda.synchronize()
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in traced.events():
        kind_of = communicates(event.name, cuda)
        on_device = event.device_type == torch.autograd.DeviceType.CUDA
        if kind_of is None or on_device != cuda or (cuda and getattr(event, "is_user_annotation", False)):
            continue
        spans[kind_of].append((event.time_range.start, event.time_range.end))
    talking, both = covered(spans[True]), covered(spans[True] + spans[False])
    return {"communication_ms": talking / steps / 1e3, "wait_ms": (both - covered(spans[False])) / steps / 1e3}


def communicates(name: str, cuda: bool) -> bool | None:
    """Whether an event is communication; None for one that is no work of its own.

    On a GPU what FSDP, NCCL and optimizers call their parts (`FSDP::all_gather`, `nccl:all_reduce`, `Optimizer.step#...`) lies over the kernels.
    """
    low = name.lower()
    if cuda:
        if low.startswith(("fsdp::", "nccl:", "optimizer.", "profilerstep", "## ", "torch-compiled")):
            return None
        return low.startswith("nccl")
    if low.startswith("gloo"):
        return True
    return False if low.startswith("aten::") else None


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of spans."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        if stop > end:
            total += stop - max(start, end)
            end = stop
    return total


def whole_loss(run: Any, result: Any) -> float:
    """The step's loss over all ranks."""
    import torch.distributed as dist

    loss = result.terms["next_token"].clone()
    if run.data_group is not None:
        dist.all_reduce(loss, group=run.data_group)
    return float(loss)


def some_steps(run: Any, own: list[Any], count: int) -> list[float]:
    from rft.training.step import train_step

    made = []
    for _ in range(count):
        made.append(whole_loss(run, train_step(run, own)))
        run.state.step += 1
        run.state.step_in_epoch += 1
    return made


def save(run: Any, own: list[Any]) -> dict[str, Any]:
    """Seconds and bytes of a checkpoint, where it is, and the losses of the two steps after it."""
    from rft.errors import RftError
    from rft.training.state import save_state

    run.state.step = run.state.step_in_epoch = 1
    start = time.perf_counter()
    try:
        path = save_state(run, "bench")
    except RftError as error:
        return {"error": str(error).splitlines()[0]}
    seconds = time.perf_counter() - start
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return {"seconds": seconds, "bytes": size, "losses": some_steps(run, own, 2), "ranks": run.world_size}


def load(task: Task, world: Any) -> dict[str, Any]:
    """Seconds to load the run directory's checkpoint into a run on this number of ranks, and the losses of `steps` more steps."""
    from rft.checkpoint.load import find_latest, open_checkpoint
    from rft.training.state import resume_state

    run, own = build_rft(task, world)
    start = time.perf_counter()
    if world.rank == 0:  # it alone checks every byte, as in a run
        checkpoint = find_latest(run.run_dir)
        assert checkpoint is not None, f"no checkpoint in {run.run_dir}"
    else:
        (path,) = (run.run_dir / "checkpoints").glob("step-*")
        checkpoint = open_checkpoint(path, checked=True)
    checked = time.perf_counter()
    resume_state(run, checkpoint)
    seconds = time.perf_counter() - checked
    return {"seconds": seconds, "check_seconds": checked - start, "losses": some_steps(run, own, task.steps)}


def parity(task: Task, world: Any) -> dict[str, Any]:
    """Losses of `steps` steps of the same packs, replicated and sharded; with `save` a checkpoint half-way, with `resume` from such a one on."""
    from rft.training.state import save_state

    found: dict[str, Any] = {}
    half = task.steps // 2
    for data in ("replicate", "shard"):
        one = dataclasses.replace(task, data=data, run_dir=f"{task.run_dir}/{data}")
        run, own = build_rft(one, world)
        losses = some_steps(run, own, half)
        if task.save:
            save_state(run, "bench")
        found[data] = {"losses": losses + some_steps(run, own, task.steps - half)}
        if task.resume:
            found[data]["resumed"] = load(dataclasses.replace(one, steps=task.steps - half), world)["losses"]
    return found


def bandwidth(task: Task, world: Any) -> dict[str, Any]:
    """GB/s that a rank receives, of the three collectives that training uses, 256 MiB a rank."""
    import torch
    import torch.distributed as dist

    cuda = task.device == "cuda"
    numbers = 1 << (12 if task.tiny else 27)
    ranks = world.world_size
    part = torch.ones(numbers, dtype=torch.bfloat16, device=world.device)
    whole = torch.ones(numbers * ranks, dtype=torch.bfloat16, device=world.device)
    calls = {
        "all-gather": lambda: dist.all_gather_into_tensor(whole, part, group=world.group),
        "reduce-scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=world.group),
        "all-reduce": lambda: dist.all_reduce(whole, group=world.group),
    }
    moved = part.nbytes * (ranks - 1)
    found = {}
    for name, call in calls.items():
        for _ in range(2):
            call()
        seconds = step_seconds(call, 10, cuda)
        found[name] = [(2 if name == "all-reduce" else 1) * moved / s / 1e9 for s in seconds]
    return found
