"""A frozen base in FP8: weights of the decoder layers quantised once, by row, in the layouts of both passes.

LoRA's own products stay in the compute type and see unquantised inputs. The first and the last decoder layer, embeddings, norms and head are
kept as they are: they lose the most. An adapter is merged into the original weights, never into these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rft.closeness import relative_error
from rft.errors import Refused
from rft.kernels import fp8
from rft.kernels.lora_linear import FrozenLinear, lora_linears

KEPT_AT_EACH_END = 1
"""Decoder layers at each end that are not quantised."""


class Fp8Linear(nn.Module):
    """Stands in for a frozen nn.Linear. Gradients reach its input and its bias."""

    by_row: Tensor
    row_scale: Tensor
    by_column: Tensor
    column_scale: Tensor

    def __init__(self, weight: fp8.Weight, bias: nn.Parameter | None):
        super().__init__()
        for name, tensor in weight._asdict().items():
            self.register_buffer(name, tensor, persistent=False)  # made again from the model's own weights, never saved
        self.bias = bias
        self.out_features, self.in_features = weight.shape

    def rft_held(self) -> fp8.Weight:
        """As the fused operations take it."""
        return fp8.Weight(*(self._buffers[name] for name in fp8.Weight._fields))  # type: ignore[arg-type]

    @property
    def weight(self) -> Tensor:
        """What the numbers stand for, fp32 [out, in], made anew: for whoever looks, never for training."""
        return self.rft_held().dequantised()

    def forward(self, x: Tensor) -> Tensor:
        return lora_linears(x, [FrozenLinear(self.rft_held(), self.bias)])[0]

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, e4m3"


@dataclass(frozen=True)
class Quantised:
    """What was done."""

    count: int
    of: int
    error: float
    """Largest norm of a weight's error over the norm of the weight."""
    left: dict[str, int]
    """Why linears were left as they are -> how many."""


def refuse_without_fp8(device: torch.device, *, emulate: bool = False) -> None:
    """Raise Refused where this device has no FP8 products. emulate: let a CPU multiply the same numbers in fp32 (tests)."""
    why = None
    if device.type == "cuda":
        why = fp8.why_not(torch.empty(16, 16), torch.cuda.get_device_capability(device))
    elif not emulate:
        why = f"FP8 products need a CUDA GPU of compute capability 8.9 (Ada, Hopper or newer), this is a {device.type}"
    if why:
        raise Refused('model.base_weights = "fp8"', why, do='set model.base_weights = "bf16"')


@torch.no_grad()
def quantise_base(
    layers: Sequence[nn.Module],
    *,
    keep_ends: int = KEPT_AT_EACH_END,
    readers: Callable[[nn.Module], Sequence[Sequence[nn.Module]]] = lambda layer: (),
) -> Quantised:
    """Replace every frozen linear of these decoder layers, in place, group by group, so that no second copy of all exists.

    readers: groups of a layer's linears (as they are, or wrapped by PEFT) that read one input; the gradient of that input is one product then.
    """
    count, total, worst = 0, 0, 0.0
    left: dict[str, int] = {}
    for index, layer in enumerate(layers):
        found: dict[nn.Linear, str] = {}
        for name, module in layer.named_modules():
            if type(module) is not nn.Linear or ".lora_" in f".{name}":
                continue
            total += 1
            why = fp8.why_not(module.weight, None)
            if index < keep_ends or index >= len(layers) - keep_ends:
                why = "in the first or last layer" if keep_ends == 1 else f"in the first or last {keep_ends} layers"
            elif module.weight.requires_grad:
                why = "trained"
            if why:
                left[why] = left.get(why, 0) + 1
            else:
                found[module] = name
        for group in _groups(found, readers(layer)):
            weights = [module.weight for module in group]
            made = fp8.quantise_weights(weights) if len(group) > 1 else [fp8.quantise_weight(weights[0])]
            for module, weight in zip(group, made, strict=True):
                ours = Fp8Linear(weight, module.bias)
                worst = max(worst, relative_error(ours.weight, module.weight))
                parent, _, attribute = found[module].rpartition(".")
                owner: Any = layer.get_submodule(parent) if parent else layer
                setattr(owner, attribute, ours.train(module.training))
                count += 1
    return Quantised(count, total, worst, left)


def _groups(found: Iterable[nn.Linear], readers: Sequence[Sequence[nn.Module]]) -> list[list[nn.Linear]]:
    """The linears, those of a group together where all of it was found."""
    rest = dict.fromkeys(found)
    groups: list[list[nn.Linear]] = []
    for group in readers:
        bases: list[Any] = [m.get_base_layer() if hasattr(m, "get_base_layer") else m for m in group]  # type: ignore[operator]
        if 2 <= len(bases) <= fp8.JOINED and all(b in rest for b in bases):
            groups.append(bases)
            for base in bases:
                del rest[base]
    return [*groups, *([module] for module in rest)]
