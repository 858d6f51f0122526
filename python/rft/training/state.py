"""What a run is besides its tensors: counters, position in the data, random state; saved and brought back as one."""

from __future__ import annotations

import base64
import dataclasses
import importlib.metadata
import platform
import random
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from rft import __version__, log
from rft.checkpoint.load import Checkpoint, check_tensors, load_tensors, open_checkpoint
from rft.checkpoint.save import MODEL, OPTIMIZER, Mark, rotate, save_checkpoint
from rft.errors import CheckpointError, ConfigError
from rft.training.resume import SUMMARY
from rft.words import counted

if TYPE_CHECKING:
    from rft.training.run import Run


@dataclass
class TrainState:
    """Counters of the run, the same on every rank. The position in the data is {plan_hash, epoch, step_in_epoch}."""

    step: int = 0
    """Optimizer steps done."""
    epoch: int = 0
    step_in_epoch: int = 0
    """Steps of this epoch that are done."""
    plan_hash: str = ""
    """Of this epoch's plan: packs and their order."""
    packs_per_step: int = 0
    total_steps: int = 0
    """Steps that the run was to have when it was last set up."""
    tokens: int = 0
    label_tokens: int = 0
    seconds: float = 0.0
    """Time in steps alone."""
    first_eval: float | None = None
    last_eval: float | None = None
    last_eval_step: int | None = None
    """Step after which `last_eval` was measured."""
    best_eval: float | None = None
    best_step: int | None = None
    evals_without_better: int = 0
    eval_key: str = ""
    """Key of the held-out set."""
    stopped_early: bool = False
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Tells this run's checkpoints from another's: rotation removes no other."""

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> TrainState:
        """Raises CheckpointError where it is not what `to_json` gave."""
        names = {f.name for f in dataclasses.fields(cls)}
        if not isinstance(value, dict) or not isinstance(value.get("step"), int) or value.keys() - names:
            raise CheckpointError("state.json", "does not hold the state of a run", do="start over with --new")
        return cls(**value)


@dataclass(frozen=True)
class Rng:
    """Random state of every kind on this rank."""

    python: Any
    numpy: Any
    torch_cpu: Tensor
    torch_cuda: Tensor | None

    @classmethod
    def capture(cls) -> Rng:
        """As it is now. Reads no device memory: CUDA's generator keeps its seed and offset on the host."""
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda)

    def restore(self) -> None:
        """Make it what it was."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch_cpu)
        if self.torch_cuda is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(self.torch_cuda)

    def to_json(self) -> dict[str, Any]:
        kind, keys, position, has_gauss, gauss = self.numpy
        return {
            "python": [self.python[0], list(self.python[1]), self.python[2]],
            "numpy": [kind, [int(k) for k in keys], int(position), int(has_gauss), float(gauss)],
            "torch_cpu": _encode(self.torch_cpu),
            "torch_cuda": None if self.torch_cuda is None else _encode(self.torch_cuda),
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Rng:
        python, (kind, keys, *rest) = value["python"], value["numpy"]
        return cls(
            (python[0], tuple(python[1]), python[2]),
            (kind, np.array(keys, dtype=np.uint32), *rest),
            _decode(value["torch_cpu"]),
            None if value["torch_cuda"] is None else _decode(value["torch_cuda"]),
        )


@dataclass(frozen=True)
class StepStart:
    """What a forward changes besides gradients, as it was before a step: to be put back where the step is given up."""

    rng: Rng
    buffers: dict[Tensor, Tensor]
    """Live buffer -> its values."""

    @classmethod
    def capture(cls, trainee: nn.Module) -> StepStart:
        return cls(Rng.capture(), {buffer: buffer.clone() for buffer in trained_buffers(trainee).values()})

    @torch.no_grad()
    def restore(self) -> None:
        """Make it what it was."""
        self.rng.restore()
        for buffer, values in self.buffers.items():
            buffer.copy_(values)


def _encode(state: Tensor) -> str:
    return base64.b64encode(bytes(state.cpu().numpy())).decode()


def _decode(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def versions() -> dict[str, str]:
    """Of what decides the numbers of a run."""
    found = {"rft": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    return found | {name: importlib.metadata.version(name) for name in ("transformers", "peft", "numpy")}


def trained_tensors(run: Run) -> dict[str, Tensor]:
    """What training changes, by name in the trainee: the masters, and buffers that are saved with a trained module's own weights."""
    return {**run.optimizer.named_masters(), **trained_buffers(run.trainee)}


def trained_buffers(trainee: nn.Module) -> dict[str, Tensor]:
    """Persistent buffers beside a trained parameter (a router's bias, running statistics): a forward may have changed them."""
    found = {}
    for prefix, module in trainee.named_modules():
        if any(p.requires_grad for p in module.parameters(recurse=False)):
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def save_state(run: Run, reason: str) -> Path:
    """Save a checkpoint of the run as it is after `run.state.step` steps, and rotate; called by every rank.

    reason: why now ("every 100 steps", "new best", "SIGTERM", "last step"). Raises CheckpointError where it cannot be written.
    """
    state, root = run.state, run.run_dir / "checkpoints"
    documents = {
        "state.json": {**state.to_json(), "schedule": run.schedule.describe()},
        "config.json": config_document(run),
        "versions.json": versions(),
    }
    path = save_checkpoint(
        root,
        Mark(
            step=state.step,
            run_id=state.run_id,
            eval_loss=state.last_eval if state.last_eval_step == state.step else None,
            reason=reason,
        ),
        model=trained_tensors(run),
        optimizer=run.optimizer.named_state(),
        documents=documents,
        rank_document=Rng.capture().to_json(),
        group=run.data_group,
    )
    if run.rank == 0:
        keep = run.config.checkpoint
        rotate(root, state.run_id, keep_last=keep.keep_last, keep_best=keep.keep_best)
    return path


def config_document(run: Run) -> dict[str, Any]:
    """The resolved config, which of its keys were decided here rather than given, and the number of ranks."""
    return {
        "config": run.config.model_dump(mode="json"),
        "decided": sorted({decision.key for decision in run.decisions}),
        "world_size": run.world_size,
    }


def resume_state(run: Run, checkpoint: Checkpoint) -> None:
    """Make the run what it was when the checkpoint was saved: position, tensors, optimizer, random state, schedule.

    Raises ConfigError where the data or the packs of a step are not the same, CheckpointError where the tensors are not;
    both before anything is changed.
    """
    saved = dict(checkpoint.state)
    described = saved.pop("schedule", None)
    state = TrainState.from_json(saved)
    _check_data(run, state, checkpoint)
    document = checkpoint.rank_document(run.rank)
    rng = Rng.from_json(document) if document is not None else None
    moments: dict[str, Tensor] = {}
    if state.step > 0:
        run.optimizer.allocate_state()
        moments = run.optimizer.named_state()
    check_tensors(checkpoint, OPTIMIZER, moments)
    _load_masters(run, checkpoint)
    load_tensors(checkpoint, OPTIMIZER, moments)
    run.optimizer.state_was_loaded()
    if rng is not None:
        rng.restore()
    if run.rank == 0:
        # A finished run that was given more steps is unfinished from here on, also if it is killed before its next checkpoint.
        (run.run_dir / SUMMARY).unlink(missing_ok=True)
    planned, state.total_steps = state.total_steps, run.total_steps
    run.state = state
    run.schedule.set_step(state.step)
    _tell(run, checkpoint, planned, described)


def _check_data(run: Run, state: TrainState, checkpoint: Checkpoint) -> None:
    if state.packs_per_step and state.packs_per_step != run.packs_per_step:
        raise ConfigError(
            str(run.run_dir),
            f"a step has {run.packs_per_step} packs now, and had {state.packs_per_step} when the run started",
            wanted="the same packs in every step of a run",
            do="put train.tokens_per_step, train.accumulate and train.micro_batch back, or start a new run with --new",
        )
    check_same_plan(run.run_dir, run.loader, checkpoint)
    own = run.state.eval_key
    if own and state.eval_key and own != state.eval_key:
        raise ConfigError(
            str(run.run_dir),
            "the held-out data changed since the run started: its losses could not be compared",
            do="bring the old data back, or start a new run with --new",
        )


def check_same_plan(run_dir: Path, loader: Any, checkpoint: Checkpoint) -> None:
    """Raises ConfigError where the packs of the checkpoint's epoch are no longer those that the run was trained on."""
    saved = checkpoint.state.get("plan_hash")
    if saved and loader.plan(int(checkpoint.state["epoch"])).hash != saved:
        raise ConfigError(
            str(run_dir),
            f"the training data, its template or tokenizer changed since {checkpoint.path.name} was saved",
            wanted="the same packs in the same order",
            do="bring the old data back, or start a new run with --new",
        )


def _tell(run: Run, checkpoint: Checkpoint, planned: int, described: Any) -> None:
    state = run.state
    for reason in checkpoint.skipped:
        log.warn(f"passed over {reason}")
    log.say("resume", f"from {checkpoint.path.name} of {run.run_dir}: step {state.step} of {run.total_steps}")
    if planned and planned != run.total_steps:
        log.say(
            "resume",
            f"the run was to have {planned} steps; from here on the schedule counts {run.total_steps} ({described})",
        )
    if checkpoint.world_size != run.world_size:
        log.say(
            "resume",
            f"saved by {counted(checkpoint.world_size, 'process')}, now {run.world_size}: equal up to rounding, not bit for bit",
        )
    now = versions()
    changed = [f"{name} {old} -> {now[name]}" for name, old in checkpoint.versions.items() if now.get(name, old) != old]
    if changed:
        log.say("resume", f"other versions than before, so not bit for bit: {', '.join(changed)}")


def load_weights(run: Run, step: int) -> None:
    """Only the trained tensors of checkpoints/step-N, into the optimizer's masters and the model; for `final = "best"`."""
    _load_masters(run, open_checkpoint(run.run_dir / "checkpoints" / f"step-{step}"))


def _load_masters(run: Run, checkpoint: Checkpoint) -> None:
    tensors = trained_tensors(run)
    load_tensors(checkpoint, MODEL, tensors)
    run.optimizer.load_masters({name: tensors[name] for name in run.optimizer.named_masters()})
