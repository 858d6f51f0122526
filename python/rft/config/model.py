"""[model]: which model, and how its weights are held."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rft.config.table import Table


class RopeConfig(Table):
    """Rotary positions beyond what the model was trained for. Left out: `data.seq_len` may not be longer than that."""

    target_length: int | None = Field(None, ge=1, le=2**24)
    """Positions that the trained model shall reach. Default, where a method is given: data.seq_len."""
    method: Literal["auto", "linear", "dynamic", "yarn", "llama3", "longrope", "none"] = "auto"
    """How frequencies are scaled. `auto`: the kind that the model was trained with, else `yarn`. `none`: not at all, with a warning. Written into the result's config."""


class ModelConfig(Table):
    """Which model is trained."""

    path: str
    """A local directory, a GGUF file, or a hub id. A directory beats a hub id of the same spelling."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    attention: Literal["auto", "fa4", "cudnn", "varlen", "flex", "sdpa", "math"] = "auto"
    """How documents are kept apart: `fa4` (flash_attn.cute), `cudnn` (long documents dense, the others varlen), `varlen` (one call), `flex` (soft-cap, sinks), `sdpa` (a call a document), `math` (plain). `auto` takes the first that serves this model here."""
    base_weights: Literal["bf16", "fp8", "nf4", "int8"] = "bf16"
    """How frozen weights of the decoder layers are held: `bf16` (as computed with), or `fp8` for LoRA (e4m3 by row, Hopper, Ada and newer; the first and last layer stay), `nf4` (QLoRA: 4.1 bits a number, in bitsandbytes' format) or `int8` (8 bits, a scale a row), quantised while they are read."""
    keep_ends: int | None = Field(None, ge=0, le=1000)
    """Decoder layers at each end that `base_weights = "fp8"` leaves in bf16, where rounding costs the most. Default 1."""
    cache_gb: float = Field(50.0, ge=0, le=1e6)
    """Disk that quantised bases (`nf4`, `int8`) may take in `$XDG_CACHE_HOME/rft/bases`, in GB: the next run over the same checkpoint reads its codes from there. Those used longest ago are removed for new ones; 0 keeps none."""
    rope: RopeConfig = RopeConfig()
    """Longer texts than the model was trained for."""
    unicode: int = Field(16, ge=16, le=17)
    """Unicode tables of the tokenizer's split pattern, as in the `tokenizers` library: 16 up to 0.23, 17 from 1.0 on. They differ in 4,804 characters: those new in 17, and U+0295."""
    add_tokens: list[str] = []
    """New tokens. Their embedding rows are trained and saved so that PEFT loads them."""
    trust_remote_code: bool = False
    """Whether code that comes with the model may run."""
