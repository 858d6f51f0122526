"""What is known of a run before a weight is read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from rft.config.root import Config
from rft.data.prepare import Prepared
from rft.memory.planner import Planned
from rft.models.facts import Facts
from rft.models.probe import Probed
from rft.models.receipts import Receipts
from rft.models.source import ModelSource
from rft.models.tokenizer import TokenizerFiles
from rft.parallel.mesh import World
from rft.training.decision import Decision
from rft.training.known import Known
from rft.training.machine import Machine

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class Job:
    """All that is known of a run before a weight is read: the model is on meta, every `auto` is decided."""

    config: Config
    world: World
    machine: Machine
    source: ModelSource
    tokenizer: TokenizerFiles
    model: Any
    """On meta: adapters are injected, nothing is swapped yet."""
    wide: frozenset[str]
    """Trained parameters that this architecture computes with in fp32 in any case."""
    facts: Facts
    probed: Probed
    known: Known
    given: Config
    """As it was before `known` decided what was left to it."""
    receipts: Receipts = field(default_factory=Receipts)
    decisions: list[Decision] = field(default_factory=list)
    prepared: Prepared | None = None
    kernels: bool = False
    """Whether the Triton kernels are swapped in."""
    planned: Planned | None = None
    """What the planner expects of a step; None on a CPU, which is not planned for."""

    @property
    def compute_dtype(self) -> torch.dtype:
        return DTYPES[self.config.train.precision]

    @property
    def master_dtype(self) -> torch.dtype:
        """Type in which trained weights are kept."""
        return torch.float32 if self.compute_dtype == torch.float32 else DTYPES[self.config.train.master]

    @property
    def mode(self) -> str:
        """How ranks share the work: none, replicate or shard."""
        return self.config.parallel.data if self.world.world_size > 1 else "none"
