"""Everything that one run holds, put together by setup.py and read by the loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from rft.config.root import Config
from rft.losses import SftLoss
from rft.memory.planner import Planned
from rft.optim import Optimizer, Schedule
from rft.training.cuda_graph import MicroBatchGraphs
from rft.training.decision import Decision
from rft.training.flops import FlopCounter
from rft.training.trainee import Trainee

if TYPE_CHECKING:
    from rft.data.loader import Loader
    from rft.data.prepare import Prepared
    from rft.data.streaming import StreamLoader
    from rft.models.source import ModelSource
    from rft.models.tokenizer import TokenizerFiles
    from rft.training.replan import Replanner
    from rft.training.signals import Signals
    from rft.training.state import TrainState


@dataclass
class Run:
    """One run. `config` is resolved: it holds no "auto"."""

    config: Config
    decisions: list[Decision]
    run_dir: Path
    device: torch.device
    model: nn.Module
    """What transformers and PEFT built: the whole CausalLM."""
    trainee: Trainee
    losses: SftLoss
    optimizer: Optimizer
    schedule: Schedule
    loader: Loader | StreamLoader
    """Training data."""
    packs_per_step: int
    """Packs of one optimizer step over all ranks, filler packs of a short last step counted."""
    total_steps: int
    state: TrainState
    eval_loader: Loader | None = None
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    data_group: dist.ProcessGroup | None = None
    """Serves CPU and device tensors; None for one process."""
    signals: Signals | None = None
    source: ModelSource | None = None
    tokenizer: TokenizerFiles | None = None
    prepared: Prepared | None = None
    flops: FlopCounter | None = None
    device_name: str = ""
    receipts: dict[str, Any] = field(default_factory=dict)
    planned: Planned | None = None
    """What the planner expects of a step; None on a CPU."""
    graphs: MicroBatchGraphs | None = None
    """Forward and backward of a micro-batch as CUDA graphs, where `train.cuda_graph` asks for it."""
    replanner: Replanner | None = None
    """What a step that runs out of memory does next."""
    saved_step: int | None = None
    """Step of the newest checkpoint, if it holds all there is to know of that step."""
    saved_path: Path | None = None

    @property
    def is_main(self) -> bool:
        """The rank that writes the run directory."""
        return self.rank == 0

    @property
    def name(self) -> str:
        return self.config.log.name or self.run_dir.name

    @property
    def micro_batch(self) -> int:
        """Packs that a rank computes at one time."""
        assert isinstance(self.config.train.micro_batch, int), "resolve() decides train.micro_batch"
        return self.config.train.micro_batch

    @property
    def epochs_done(self) -> float:
        """Passes over the data so far, the started one in part."""
        return self.state.epoch + self.loader.share_done(
            self.state.epoch, self.state.step_in_epoch, self.packs_per_step
        )
