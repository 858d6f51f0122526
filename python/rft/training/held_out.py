"""Held-out loss of what was trained, outside a run: the same trainee, loader and loss as in training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rft.checkpoint.target import Target
from rft.config.adapter import LoraConfig
from rft.config.model import ModelConfig
from rft.config.root import Config
from rft.data.loader import Loader
from rft.errors import ConfigError
from rft.models.tokenizer import load_tokenizer
from rft.parallel.mesh import World, join_world
from rft.training.evaluate import Evaluation, HeldOut, evaluate
from rft.training.job import Job
from rft.training.machine import inspect_machine
from rft.training.setup import add_data, build_trainee, inspect_job

if TYPE_CHECKING:
    from collections.abc import Callable


def evaluate_target(
    target: Target,
    files: list[str],
    *,
    device: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Evaluation, dict[str, Any]]:
    """Loss over the files (default: the run's own held-out data) and what became of their rows.

    Raises ConfigError where there is no data to evaluate on.
    """
    world = join_world(device)
    config = eval_config(target, files, bf16=inspect_machine(world.device, world.world_size).bf16)
    job = inspect_job(config, world)
    if target.home is not None:  # what the weights were trained with, whatever the base's folder says today
        job.tokenizer = load_tokenizer(ModelConfig(path=str(target.home), unicode=config.model.unicode))
    add_data(job, None)
    held_out = _build(job, world, own_split=bool(config.data.eval_fraction))
    evaluation = evaluate(held_out, progress)
    held_out.eval_loader.close()
    assert job.prepared is not None
    return evaluation, job.prepared.report["eval" if config.data.eval_fraction else "train"]


def _build(job: Job, world: World, *, own_split: bool) -> HeldOut:
    assert job.prepared is not None
    data, micro_batch = job.config.data, job.config.train.micro_batch
    assert data.seq_len is not None
    assert isinstance(micro_batch, int)
    store = job.prepared.eval if own_split else job.prepared.train_store
    assert store is not None
    # few rows must not fill one long pack: all but attention costs as much for fill-up as for text
    rounded_up = -(-store.num_tokens // 64) * 64
    loader = Loader(
        store,
        seq_len=min(data.seq_len, rounded_up),
        packing=data.packing,
        overlong=data.overlong,
        seed=job.config.train.seed,
        pad_id=job.tokenizer.pad_id,
        micro_batch=micro_batch,
        device=world.device,
        shuffle=False,
        name="eval",
    )
    return HeldOut(build_trainee(job), loader, world.device, micro_batch, source=job.source)


def source_settings(target: Target) -> dict[str, Any]:
    """How the run reads its first source: format and names of fields and roles; empty where they are found out from the rows."""
    sources = target.config.get("data", {}).get("train") or [{}]
    given = {key: sources[0].get(key) for key in ("format", "fields", "roles")}
    return {key: value for key, value in given.items() if value and value != "auto"}


def eval_config(target: Target, files: list[str], *, bf16: bool) -> Config:
    """The run's config with its weights as they are in `final/`, every choice that depends on the machine made anew.

    files: read with the settings of the run's first source. bf16: whether this machine computes in bf16. Raises ConfigError where there is no data to evaluate on.
    """
    values = {key: dict(table) for key, table in target.config.items()}
    data = values.setdefault("data", {})
    if files:
        settings = source_settings(target)
        data |= {"train": [{**settings, "path": str(Path(file).absolute())} for file in files], "eval_fraction": 0.0}
    elif data.get("eval"):
        data["train"] = data["eval"]
    elif not data.get("eval_fraction"):
        raise ConfigError(str(target.path), "has no held-out data of its own", do="give a file with --data")
    data |= {"eval": [], "streaming": False, "shuffle": "full"}
    model = target.model.model_dump()
    adapter: dict[str, Any] = {"name": "none"}
    if target.adapter is not None:
        adapter = LoraConfig(path=str(target.adapter)).model_dump(exclude_unset=True)
    else:
        model["add_tokens"] = []
    values["model"] = {**model, "attention": "auto"}
    values["adapter"] = adapter
    values["parallel"] = {}
    train = values.setdefault("train", {})
    # an fp32 run gives the number that it logged; of a bf16 run its bf16 weights are what it computed with
    half = bf16 and train.get("precision") != "fp32"
    train |= {"precision": "bf16", "master": "bfloat16"} if half else {"precision": "fp32", "master": "float32"}
    train["deterministic"] = "auto"
    for key in ("accumulate", "tokens_per_step", "on_oom"):
        train.pop(key, None)
    # nothing is kept for a backward pass, and no optimizer is there
    values["memory"] = {k: v for k, v in values.get("memory", {}).items() if k in ("limit", "tiled_mlp")}
    values.get("optim", {}).pop("in_backward", None)
    values.pop("checkpoint", None)
    values["log"] = {}
    return Config.model_validate(values)
