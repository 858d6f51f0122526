"""Where metrics go besides metrics.jsonl: TensorBoard, Weights & Biases, MLflow, trackio. Nothing is sent unless asked for."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rft.config.log import LogConfig
from rft.errors import ConfigError

EXTRAS = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}
"""Tracker -> the module that it needs, which is also the name of the extra."""
NUMBERS = (
    "epoch",
    "loss",
    "router_aux_loss",
    "grad_norm",
    "lr",
    "tokens",
    "label_tokens",
    "tokens_per_second",
    "mfu",
    "memory_peak_bytes",
)
"""Numbers of a line of metrics.jsonl, where it has them: what trackers are sent."""


class Tracker(Protocol):
    """One place that metrics are sent to."""

    def log(self, values: dict[str, float], step: int) -> None: ...
    def close(self) -> None: ...


def check_trackers(config: LogConfig) -> None:
    """Raises ConfigError for a tracker that is not installed: before anything is loaded."""
    for name in config.trackers:
        if importlib.util.find_spec(EXTRAS[name]) is None:
            raise ConfigError(
                "log.trackers",
                f"{name!r} is not installed",
                do=f'pip install "rft-llm[{name}]", or leave it out',
            )


def open_trackers(config: LogConfig, run_dir: Path, run_id: str, settings: dict[str, Any]) -> list[Tracker]:
    """Start what `log.trackers` names.

    run_id: stays the same when the run is resumed. settings: the resolved config, flat; it holds no secret, since these come
    from the environment alone, which is sent nowhere.
    """
    about = _About(config, config.name or run_dir.name, run_dir, run_id, settings)
    return [BUILDERS[tracker](about) for tracker in config.trackers]


@dataclass(frozen=True)
class _About:
    """What a tracker is told of the run."""

    config: LogConfig
    name: str
    run_dir: Path
    run_id: str
    settings: dict[str, Any]


def values_of(line: dict[str, Any]) -> dict[str, float]:
    """Numbers of a metrics line, named "train/loss" and so on."""
    return {f"{line['kind']}/{key}": line[key] for key in NUMBERS if line.get(key) is not None}


class _TensorBoard:
    def __init__(self, about: _About):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(about.run_dir / "tensorboard"))
        rows = "\n".join(f"    {key} = {value}" for key, value in about.settings.items())
        self._writer.add_text("config", f"{about.name} {' '.join(about.config.tags)}\n\n{rows}")

    def log(self, values: dict[str, float], step: int) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, about: _About):
        import wandb

        self._run = wandb.init(
            project=about.config.project,
            name=about.name,
            tags=about.config.tags,
            config=about.settings,
            dir=str(about.run_dir),
            id=about.run_id,
            resume="allow",  # a resumed run goes on in the same place
        )

    def log(self, values: dict[str, float], step: int) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()


class _Mlflow:
    def __init__(self, about: _About):
        import mlflow

        self._mlflow = mlflow
        mlflow.set_experiment(about.config.project)
        mlflow.start_run(run_name=about.name, tags=dict.fromkeys(about.config.tags, "true"))
        mlflow.log_params({key: str(value)[:500] for key, value in about.settings.items()})

    def log(self, values: dict[str, float], step: int) -> None:
        self._mlflow.log_metrics(values, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


class _Trackio:
    def __init__(self, about: _About):
        import trackio

        self._run = trackio.init(project=about.config.project, name=about.name, config=about.settings, resume="allow")

    def log(self, values: dict[str, float], step: int) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()


BUILDERS: dict[str, Callable[[_About], Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
    "mlflow": _Mlflow,
    "trackio": _Trackio,
}
