"""Frozen linears of the decoder layers in NF4 or int8, quantised as each weight arrives: no second copy of the model ever exists.

Containers stand where the linears stood before the weights are read (`place`), and `models/load.py` gives each its weight, or the codes that
the checkpoint holds already. Products dequantise into one shared buffer (kernels/nf4.py). Embeddings, norms, head, routers and whatever is
trained stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rft.kernels import int8, nf4
from rft.kernels.lora_linear import FrozenLinear, lora_linears

Kind = Literal["nf4", "int8"]


class PackedLinear(nn.Module):
    """Stands in for a frozen nn.Linear. Gradients reach its input and its bias. Buffers are on meta until `fill`."""

    def __init__(self, shape: tuple[int, int], bias: nn.Parameter | None, kind: Kind):
        super().__init__()
        self.out_features, self.in_features = shape
        self.kind = kind
        for name, (size, dtype) in _fields(shape, kind).items():
            # never saved: a model's own weights, or its checkpoint's codes, are what is kept
            self.register_buffer(name, torch.empty(size, dtype=dtype, device="meta"), persistent=False)
        self.bias = bias

    @torch.no_grad()
    def fill(self, weight: Tensor | nf4.Weight | int8.Weight) -> float:
        """Take a weight: its codes as they are, or quantised on this module's device. Returns the norm of the error over that of the weight."""
        device = self.get_buffer("codes").device
        if isinstance(weight, Tensor):
            on_device = weight.to(device)
            made: Any = (nf4 if self.kind == "nf4" else int8).quantise(on_device)
            exact = on_device.float()
            error = float((made.dequantised() - exact).norm() / exact.norm().clamp_min(1e-12))
        else:
            made, error = weight, 0.0
        for name, tensor in made._asdict().items():
            buffer = self.get_buffer(name)
            buffer.copy_(tensor.to(device).view(buffer.shape))
        return error

    def rft_held(self) -> nf4.Weight | int8.Weight:
        """As the fused operations take it."""
        kind: Any = nf4.Weight if self.kind == "nf4" else int8.Weight
        return kind(*(self._buffers[name] for name in kind._fields))  # type: ignore[no-any-return]

    @property
    def weight(self) -> Tensor:
        """What the codes stand for, fp32 [out, in], made anew: for whoever looks, never for training."""
        return self.rft_held().dequantised()

    def forward(self, x: Tensor) -> Tensor:
        return lora_linears(x, [FrozenLinear(self.rft_held(), self.bias)])[0]

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.kind}"


def _fields(shape: tuple[int, int], kind: Kind) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    N, K = shape
    if kind == "int8":
        return {"codes": ((N, K), torch.int8), "largest": ((N,), torch.float32)}
    blocks = -(-N * K // nf4.BLOCK)
    return {
        "codes": ((N, K // 2), torch.uint8),
        "scales": ((blocks,), torch.uint8),
        "nested": ((-(-blocks // nf4.NESTED),), torch.float32),
        "offset": ((), torch.float32),
    }


@dataclass
class Packed:
    """What was placed, and what became of it."""

    kind: Kind
    linears: dict[str, PackedLinear] = field(default_factory=dict)
    """By name in the model."""
    of: int = 0
    left: dict[str, int] = field(default_factory=dict)
    """Why linears, or other weights of the layers, were left as they are -> how many."""
    numbers: int = 0
    """Weights that are held in fewer bits."""
    left_numbers: int = 0
    """Weights of the decoder layers' matrices that are not."""

    def bytes(self) -> int:
        """Of codes and scales."""
        return sum(b.nbytes for m in self.linears.values() for b in m.buffers(recurse=False))


def place(model: nn.Module, layers: Sequence[nn.Module], kind: Kind) -> Packed:
    """Put containers where the frozen linears of these decoder layers are, in place. The model is on meta."""
    done = Packed(kind)
    names = {id(module): name for name, module in model.named_modules()}
    for layer in layers:
        for name, module in list(layer.named_modules()):
            if ".lora_" in f".{name}":
                continue
            if type(module) is not nn.Linear:
                stacked = [
                    p for p in module.parameters(recurse=False) if p.dim() == 3 and not isinstance(module, nn.Conv1d)
                ]
                if stacked:  # experts in one tensor
                    _leave(done, "experts in one tensor stay in 16 bits", sum(p.numel() for p in stacked))
                continue
            done.of += 1
            why = "trained" if module.weight.requires_grad else None
            if why is None and _is_router(name):
                why = "a router decides by small differences"
            if why is None and kind == "nf4":
                why = nf4.why_not(module.weight.shape)
            if why:
                _leave(done, why, module.weight.numel())
                continue
            made = PackedLinear((module.out_features, module.in_features), module.bias, kind)
            parent, _, attribute = name.rpartition(".")
            owner: Any = layer.get_submodule(parent) if parent else layer
            setattr(owner, attribute, made.train(module.training))
            done.linears[names[id(module)]] = made
            done.numbers += module.weight.numel()
    return done


def _leave(done: Packed, why: str, numbers: int) -> None:
    done.left[why] = done.left.get(why, 0) + 1
    done.left_numbers += numbers


def _is_router(name: str) -> bool:
    return name.removesuffix(".base_layer").rpartition(".")[2] in ("router", "gate")
