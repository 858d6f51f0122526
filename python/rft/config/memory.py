"""[memory]: what is kept for the backward pass."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rft.config.table import Count, Table

MOST_GIB = 1_000_000
Gib = Annotated[float, Field(gt=0, le=MOST_GIB)]


class MemoryConfig(Table):
    """What is kept for the backward pass, and how much memory there is."""

    recompute: Literal["auto", "none", "selective", "full"] | Count = "auto"
    """Decoder layers that are computed again in the backward pass: `none`, `full` (all), a number n (every n-th), or `selective` (all, but the output of their attention is kept). `auto`: the fewest with which the run fits."""
    recompute_layers: Literal["auto", "all"] | Count = "auto"
    """Of the layers that `recompute` names, how many: spread evenly. `auto`: as few as fit where `recompute` is `auto`, else all."""
    offload: Literal["auto", "none", "cpu", "disk"] = "none"
    """Where what layers keep for the backward pass lies until then: on the GPU, in host memory, or there and, beyond `offload_host`, in a file in `offload_dir`. Of a layer that is computed again that is its input (and with `selective` its attention's output), of another every saved tensor from 1 MiB on. `auto`: wherever the run fits soonest."""
    offload_layers: Literal["auto", "all"] | Count = "auto"
    """Of how many decoder layers, spread evenly, those first that are not computed again: copies of a few run beside the work of the others. `auto`: as few as fit where `offload` is `auto`, else all."""
    offload_host: Gib | None = None
    """GiB of host memory that `offload` may use on each rank. Default: 0.8 of what is free at the start, over the ranks of this machine."""
    offload_keep: float = Field(0.0, ge=0, le=MOST_GIB)
    """GiB of what `offload` would move that stays on the GPU: the last layers', which the backward pass needs first."""
    tiled_mlp: Literal["auto"] | Count = "auto"
    """Pieces of the sequence in which every gated MLP is computed, forward once more in the backward pass; 1 = whole. `auto`: whole, unless that does not fit."""
    offload_states: Literal["none", "cpu", "disk"] = "none"
    """Where optimizer states, and fp32 masters of weights that are computed with in bf16, lie between steps: on the GPU, in host memory, or in files of `offload_dir`. Not sharded."""
    offload_weights: Literal["none", "cpu"] = "none"
    """Where the weights of the decoder layers lie: on the GPU, or in host memory, from where each layer's are fetched while the one before it is worked on. Every layer is computed again then; in full fine-tuning each weight is updated in the backward pass. One process."""
    offload_dir: str | None = None
    """Folder for what goes to disk; its files have no name while they are used, so a crash leaves none. Default: `offload` in the run directory."""
    limit: Gib | None = None
    """GiB that a rank's tensors may take, the allocator's slack among them; the CUDA context (about 0.6 GiB) is beside them. Default: what its GPU has."""
