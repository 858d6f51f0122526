"""[train]: how long, how much a step, in which precision."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rft.config.table import Count, Table


class EarlyStopConfig(Table):
    """Stop when the held-out loss stops falling."""

    patience: Count = 3
    """Evaluations without a better loss after which the run ends."""
    min_delta: float = Field(0.0, ge=0, le=1e6)
    """How much lower a loss must be to count as better."""


class TrainConfig(Table):
    """The run."""

    epochs: float = Field(1.0, gt=0, le=10_000)
    """Passes over the data. Fractions are allowed."""
    max_steps: Count | None = None
    """Optimizer steps after which the run ends, whatever epochs says."""
    tokens_per_step: int | None = Field(None, ge=1, le=10**12)
    """Tokens of one optimizer step over all ranks. Default 32768, at least a pack a rank. Not together with accumulate."""
    accumulate: int | None = Field(None, ge=1, le=10**9)
    """Micro-batches of one optimizer step on each rank. Not together with tokens_per_step."""
    micro_batch: Annotated[int, Field(ge=1, le=10**6)] | Literal["auto"] = "auto"
    """Packs that a rank computes at one time. `auto`: as many as fill the GPU, and divide the step; it changes no gradient."""
    master: Literal["float32", "bfloat16"] = "float32"
    """Type in which trained weights are kept."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Type of the computation. auto: bf16, or fp32 on CPUs without bf16 arithmetic."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of everything random."""
    max_grad_norm: Annotated[float, Field(gt=0, le=1e9)] | Literal["none"] = 1.0
    """Gradients are scaled down to this norm."""
    eval_every_steps: Count | None = None
    """Held-out loss every so many steps, and always before the first and after the last."""
    deterministic: bool | Literal["auto"] = "auto"
    """Bit-equal repeats on CUDA. auto: on for short packed documents, where it costs under 2 %. A CPU is always deterministic."""
    cuda_graph: bool = False
    """Launch forward and backward of a micro-batch as one CUDA graph: for models, or packs, so small that the host's launches take the time."""
    compile: bool = False
    """Compile each decoder layer with `torch.compile`, as one graph around attention and kernels. Costs up to a minute at the start, and pays where layers hold much that no kernel of ours serves."""
    early_stop: EarlyStopConfig | None = None
    """Stop when the held-out loss stops falling."""
    on_oom: Literal["fail", "replan"] = "fail"
    """A step that runs out of memory ends the run, or is made again under the next cheaper memory plan, of keys that are left to rft. One process."""
    out: str | None = None
    """Run directory. Default `runs/<config name>`."""
