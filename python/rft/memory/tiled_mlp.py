"""MLPs computed a piece of the sequence at a time (ALST, arXiv 2506.13996): what is wide exists for one piece only.

Forward runs without a graph and keeps the input alone; backward runs each piece again, with a graph, and adds up the gradients of the
parameters in fp32. They are handed to autograd once, when the last piece is done, so that whatever waits for a parameter's gradient
(FSDP2, replicas, an optimizer step in backward) sees one. What the MLP is inside (plain, LoRA, fused, FP8) does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rft.models.mlp import FusedGatedMLP, GatedMLP, looks_like_gated_mlp

MULTIPLE = 16
"""Pieces are multiples of this many tokens, as FP8 products want them."""


def apply_tiled_mlp(layers: Sequence[nn.Module], tiles: int) -> tuple[int, dict[str, int]]:
    """Make the gated MLP of each decoder layer compute in `tiles` pieces, in place; 1: whole, as it was.
    (how many, why others were left -> how many layers)."""
    count = 0
    left: dict[str, int] = {}
    for layer in layers:
        found = [m for m in layer.modules() if isinstance(m, GatedMLP | FusedGatedMLP) or looks_like_gated_mlp(m)]
        if not found:
            why = f"{type(layer).__name__} has no gated MLP whose rows are independent"
            left[why] = left.get(why, 0) + 1
        for module in found:
            _set_tiles(module, tiles)
        count += bool(found)
    return count, left


def _set_tiles(module: nn.Module, tiles: int) -> None:
    now = module.__dict__.get("forward")
    if isinstance(now, _TiledForward):
        now.tiles = tiles
    elif tiles > 1:
        module.forward = _TiledForward(module, module.forward, tiles)  # type: ignore[method-assign]


def pieces_of(tokens: int, tiles: int) -> list[tuple[int, int]]:
    """(first, end) of each piece: nearly equal, in multiples of MULTIPLE; fewer than `tiles` where the sequence is short."""
    step = -(-tokens // tiles)
    step = -(-step // MULTIPLE) * MULTIPLE
    return [(start, min(start + step, tokens)) for start in range(0, tokens, step)]


class _TiledForward:
    """Stands in for a module's forward. An object, and no closure, so that it says what it is."""

    def __init__(self, module: nn.Module, whole: Callable[[Tensor], Tensor], tiles: int):
        self._module, self._whole, self.tiles = module, whole, tiles

    def __call__(self, x: Tensor) -> Tensor:
        pieces = pieces_of(x.numel() // x.shape[-1], self.tiles)
        if len(pieces) <= 1:
            return self._whole(x)
        parameters = list(self._module.parameters())
        return _Tiled.apply(x, self._whole, pieces, self._draws(), *parameters)  # type: ignore[no-any-return]

    def _draws(self) -> bool:
        return any(isinstance(m, nn.Dropout) and m.p > 0 and m.training for m in self._module.modules())


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable, pieces: list, draws: bool, *parameters: Tensor) -> Tensor:
        ctx.rng = _Rng(x.device) if draws else None
        ctx.save_for_backward(x, *parameters)
        ctx.run, ctx.pieces = run, pieces
        rows = x.reshape(-1, x.shape[-1])
        out: Tensor | None = None
        for start, end in pieces:
            part = run(rows[None, start:end])[0]
            if out is None:
                out = part.new_empty(rows.shape[0], part.shape[-1])
            out[start:end] = part
        assert out is not None
        return out.view(*x.shape[:-1], out.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, *parameters = ctx.saved_tensors
        rows, d_rows = x.detach().reshape(-1, x.shape[-1]), d_out.reshape(-1, d_out.shape[-1])
        trained = [p for p in parameters if p.requires_grad]
        sums: list[Tensor | None] = [None] * len(trained)
        d_x = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
        with torch.enable_grad(), ctx.rng or nullcontext():
            for start, end in ctx.pieces:
                part = rows[None, start:end].detach().requires_grad_(d_x is not None)
                wanted = [*([part] if d_x is not None else []), *trained]
                got = list(torch.autograd.grad(ctx.run(part)[0], wanted, d_rows[start:end], allow_unused=True))
                if d_x is not None:
                    d_x[start:end] = got.pop(0)[0]
                with torch.no_grad():
                    for number, gradient in enumerate(got):
                        sums[number] = _add(sums[number], gradient)
                del got  # of the next piece nothing is there yet that needs their room
        found = iter(sums)
        gradients = [next(found) if p.requires_grad else None for p in parameters]
        return (None if d_x is None else d_x.view(x.shape), None, None, None, *gradients)


def _add(total: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    """In fp32, in a tensor of our own."""
    if gradient is None:
        return total
    if total is None:
        return gradient.float() if gradient.dtype != torch.float32 else gradient
    return total.add_(gradient)


class _Rng:
    """Random state of a device and the CPU. Inside it, what was drawn since is drawn again; afterwards it is as it was before."""

    def __init__(self, device: torch.device):
        self._device = device
        self._states = self._read()

    def _read(self) -> tuple[Tensor, Tensor | None]:
        cuda = self._device.type == "cuda"
        return torch.get_rng_state(), torch.cuda.get_rng_state(self._device) if cuda else None

    def _write(self, states: tuple[Tensor, Tensor | None]) -> None:
        torch.set_rng_state(states[0])
        if states[1] is not None:
            torch.cuda.set_rng_state(states[1], self._device)

    def __enter__(self) -> None:
        self._now = self._read()
        self._write(self._states)

    def __exit__(self, *_: object) -> None:
        self._write(self._now)
