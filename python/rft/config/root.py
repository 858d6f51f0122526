"""All tables together."""

from __future__ import annotations

from rft.config.adapter import AdapterConfig, LoraConfig
from rft.config.checkpoint import CheckpointConfig
from rft.config.data import DataConfig
from rft.config.log import LogConfig
from rft.config.loss import LossConfig
from rft.config.memory import MemoryConfig
from rft.config.model import ModelConfig
from rft.config.optim import AdamWConfig, OptimConfig
from rft.config.parallel import ParallelConfig
from rft.config.table import Table
from rft.config.train import TrainConfig


class Config(Table):
    """One training run. Only `model.path` and one data path are required."""

    model: ModelConfig
    adapter: AdapterConfig = LoraConfig()
    data: DataConfig
    loss: LossConfig = LossConfig()
    optim: OptimConfig = AdamWConfig()
    memory: MemoryConfig = MemoryConfig()
    parallel: ParallelConfig = ParallelConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
