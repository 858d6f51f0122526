"""Linears over frozen weights with low-rank branches, and a whole gated MLP of them: y = x @ W.T + bias + sum of scale (x @ A.T) @ B.T.

T tokens, K inputs, N outputs, r rank. The large products are cuBLAS's. What is saved around them: linears that share an input
share one product with all their A's; a branch is written first and the large product adds itself to it (cuBLAS reads it in its
last step, where a branch added behind would be a pass over N columns of its own); backward reads each dy once for both of a
branch's gradients (lora.py); gradients of A and B leave in fp32; W gets none. The gated MLP keeps the large products of gate and
up; their branches are added, and activation(gate) * up is made again in the backward pass, in the kernels that read them anyway
(lora_swiglu.py).

A weight may be FP8 (fp8.py): then the large products alone are FP8, and the branches see the unquantised input.
Not registered as single ops: `torch.compile` traces through the autograd functions and stops at the registered ops inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rft.kernels import fp8
from rft.kernels.lora import lowrank_gradients
from rft.kernels.lora_swiglu import MAX_RANK, LowRank, lora_gated_activation, lora_gated_activation_backward
from rft.kernels.swiglu import Activation, gated_activation, gated_activation_backward, gated_activation_reference


class Branch(NamedTuple):
    """A low-rank branch. A: (r, K); B: (N, r)."""

    A: Tensor
    B: Tensor
    scale: float


@dataclass(frozen=True)
class FrozenLinear:
    """A linear whose weight gets no gradient. weight: (N, K) tensor, or FP8 in both layouts; bias: (N,), may be trained."""

    weight: Tensor | fp8.Weight
    bias: Tensor | None = None
    branches: tuple[Branch, ...] = ()

    @property
    def weight_dtype(self) -> torch.dtype | None:
        """The type that x has to have; None: any (FP8)."""
        return None if isinstance(self.weight, fp8.Weight) else self.weight.dtype


def lora_linears_reference(x: Tensor, linears: Sequence[FrozenLinear]) -> tuple[Tensor, ...]:
    """In plain torch and fp32, in the dtype of x."""
    outs = []
    for linear in linears:
        y = x.float() @ _plain(linear.weight).float().t()
        if linear.bias is not None:
            y = y + linear.bias.float()
        for branch in linear.branches:
            y = y + branch.scale * (x.float() @ branch.A.float().t()) @ branch.B.float().t()
        outs.append(y.to(x.dtype))
    return tuple(outs)


def lora_gated_mlp_reference(
    x: Tensor, gate: FrozenLinear, up: FrozenLinear, down: FrozenLinear, activation: Activation = "silu"
) -> Tensor:
    """down(activation(gate(x)) * up(x)) in plain torch and fp32, in the dtype of x."""
    g, u = lora_linears_reference(x.float(), (gate, up))
    return lora_linears_reference(gated_activation_reference(g, u, activation), (down,))[0].to(x.dtype)


def _plain(weight: Tensor | fp8.Weight) -> Tensor:
    return weight.dequantised() if isinstance(weight, fp8.Weight) else weight


# ---- linears as flat tensors: what an autograd function takes


class _Layout(NamedTuple):
    """Where a linear's tensors lie in the flat list: base (1 or 4), bias, then A and B of each branch."""

    is_fp8: bool
    scales: tuple[float, ...]

    @property
    def size(self) -> int:
        return (4 if self.is_fp8 else 1) + 1 + 2 * len(self.scales)


def _flatten(linears: Sequence[FrozenLinear]) -> tuple[tuple[_Layout, ...], list[Tensor | None]]:
    layouts: list[_Layout] = []
    flat: list[Tensor | None] = []
    for linear in linears:
        is_fp8 = isinstance(linear.weight, fp8.Weight)
        flat += [*linear.weight] if isinstance(linear.weight, fp8.Weight) else [linear.weight]
        flat.append(linear.bias)
        for branch in linear.branches:
            flat += [branch.A, branch.B]
        layouts.append(_Layout(is_fp8, tuple(b.scale for b in linear.branches)))
    return tuple(layouts), flat


def _unflatten(layouts: Sequence[_Layout], flat: Sequence[Tensor]) -> list[FrozenLinear]:
    linears, at = [], 0
    for layout in layouts:
        size = 4 if layout.is_fp8 else 1
        weight = fp8.Weight(*flat[at : at + size]) if layout.is_fp8 else flat[at]
        bias = flat[at + size]
        pairs = flat[at + size + 1 : at + layout.size]
        branches = tuple(Branch(pairs[2 * i], pairs[2 * i + 1], s) for i, s in enumerate(layout.scales))
        linears.append(FrozenLinear(weight, bias, branches))
        at += layout.size
    return linears


class _Input:
    """The rows that several linears read, quantised at most once."""

    def __init__(self, rows: Tensor):
        self.rows = rows
        self._fp8: tuple[Tensor, Tensor] | None = None

    def times(self, weight: Tensor | fp8.Weight, bias: Tensor | None, branch: LowRank | None = None) -> Tensor:
        """rows @ weight.T + bias + branch"""
        kind = self.rows.dtype
        if isinstance(weight, fp8.Weight):
            if self._fp8 is None:
                self._fp8 = fp8.quantise_rows(self.rows)
            y = fp8.product(*self._fp8, weight, bias, kind)
            return y if branch is None else y.addmm_(branch.left, branch.right.t())
        if branch is not None:
            left, right = branch.left, branch.right.t()
            y = left @ right if bias is None else torch.addmm(bias.to(kind), left, right)
            return y.addmm_(self.rows, weight.t())
        return self.rows @ weight.t() if bias is None else torch.addmm(bias.to(kind), self.rows, weight.t())


def _stacked_A(linears: Sequence[FrozenLinear], dtype: torch.dtype) -> Tensor | None:
    matrices = [b.A.to(dtype) for linear in linears for b in linear.branches]
    return None if not matrices else matrices[0] if len(matrices) == 1 else torch.cat(matrices)


def _low_rank(linears: Sequence[FrozenLinear], S: Tensor | None) -> list[LowRank | None]:
    """What each linear adds to its output: all its branches as one. S: (T, ranks of all)."""
    found: list[LowRank | None] = []
    at = 0
    for linear in linears:
        rank = sum(b.A.shape[0] for b in linear.branches)
        if not rank:
            found.append(None)
            continue
        assert S is not None
        right = torch.empty(linear.weight.shape[0], rank, dtype=S.dtype, device=S.device)
        column = 0
        for branch in linear.branches:  # scaled in fp32, rounded once
            r = branch.B.shape[1]
            torch.mul(branch.B.detach(), branch.scale, out=right[:, column : column + r])
            column += r
        found.append(LowRank(S[:, at : at + rank], right))
        at += rank
    return found


def _forward(
    rows: Tensor, linears: Sequence[FrozenLinear], *, add: bool = True
) -> tuple[list[Tensor], list[LowRank | None], Tensor | None]:
    """Outputs (T, N), without their branches unless `add`; the branches; S = rows @ A.T (T, sum of ranks) of all branches."""
    A = _stacked_A(linears, rows.dtype)
    S = None if A is None else rows @ A.t()
    shared, branches = _Input(rows), _low_rank(linears, S)
    outs = [shared.times(ln.weight, ln.bias, b if add else None) for ln, b in zip(linears, branches, strict=True)]
    return outs, branches, S


class _Gradients(NamedTuple):
    rows: Tensor | None
    flat: list[Tensor | None]
    """As `_flatten` orders them."""


def _backward(
    dys: Sequence[Tensor | None], rows: Tensor, S: Tensor | None, linears: Sequence[FrozenLinear], need_rows: bool
) -> _Gradients:
    """Gradients of the rows and of every branch. A dy that is None is zero."""
    dS, dBs = _branch_gradients(dys, S, linears)
    d_biases: list[Tensor | None] = []
    A = _stacked_A(linears, rows.dtype)
    d_rows = dS @ A if need_rows and dS is not None and A is not None else None
    for dy, linear in zip(dys, linears, strict=True):
        wanted = linear.bias is not None and linear.bias.requires_grad and dy is not None
        d_biases.append(dy.sum(0, dtype=torch.float32) if wanted else None)  # type: ignore[union-attr]
        if need_rows and dy is not None:
            d_rows = _add_back(d_rows, dy, linear.weight)
    dA = None if dS is None else _product_fp32(dS, rows)
    if need_rows and d_rows is None:
        d_rows = torch.zeros_like(rows)
    flat: list[Tensor | None] = []
    at, branches = 0, iter(dBs)
    for linear, d_bias in zip(linears, d_biases, strict=True):
        flat += [None] * (4 if isinstance(linear.weight, fp8.Weight) else 1)
        flat.append(d_bias)
        for branch in linear.branches:
            r = branch.A.shape[0]
            assert dA is not None
            flat += [dA[at : at + r], next(branches)]
            at += r
    return _Gradients(d_rows, flat)


def _branch_gradients(
    dys: Sequence[Tensor | None], S: Tensor | None, linears: Sequence[FrozenLinear]
) -> tuple[Tensor | None, list[Tensor | None]]:
    """(dS of all branches, dB of each), from one reading of each dy. A dy that is None is zero."""
    dS = None if S is None else torch.zeros_like(S) if any(dy is None for dy in dys) else torch.empty_like(S)
    dBs: list[Tensor | None] = []
    at = 0
    for dy, linear in zip(dys, linears, strict=True):
        for branch in linear.branches:
            r = branch.A.shape[0]
            if dy is None:
                dBs.append(None)
            else:
                assert S is not None
                assert dS is not None
                ds, dB = lowrank_gradients(dy, S[:, at : at + r], branch.B)
                torch.mul(ds, branch.scale, out=dS[:, at : at + r])
                dBs.append(dB.mul_(branch.scale))
            at += r
    return dS, dBs


def _product_fp32(left: Tensor, rows: Tensor) -> Tensor:
    """left.T @ rows, in fp32."""
    return left.t() @ rows if rows.dtype == torch.float32 else torch.mm(left.t(), rows, out_dtype=torch.float32)


def _add_back(total: Tensor | None, dy: Tensor, weight: Tensor | fp8.Weight) -> Tensor:
    """total + dy @ weight; `total` is ours and is added to where it lies."""
    if isinstance(weight, fp8.Weight):
        back = fp8.product_back(*fp8.quantise_rows(dy), weight, dy.dtype)
        return back if total is None else total.add_(back)
    return dy @ weight if total is None else total.addmm_(dy, weight)


def _rows(x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


class _LoraLinears(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layouts, *flat):
        rows = _rows(x)
        outs, _, S = _forward(rows, _unflatten(layouts, flat))
        ctx.save_for_backward(rows, S, *flat)
        ctx.layouts, ctx.shape = layouts, x.shape
        ctx.set_materialize_grads(False)
        return tuple(y.view(*x.shape[:-1], y.shape[-1]) for y in outs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *dys):
        rows, S, *flat = ctx.saved_tensors
        linears = _unflatten(ctx.layouts, flat)
        got = _backward([None if dy is None else _rows(dy) for dy in dys], rows, S, linears, ctx.needs_input_grad[0])
        d_x = None if got.rows is None else got.rows.view(ctx.shape)
        return d_x, None, *got.flat


class _LoraGatedMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layouts, activation, *flat):
        rows = _rows(x)
        gate, up, down = _unflatten(layouts, flat)
        ctx.fused = _fused_ranks((gate, up), down)
        (g, u), branches, S = _forward(rows, (gate, up), add=not ctx.fused)
        h = lora_gated_activation(g, u, *branches, activation) if ctx.fused else gated_activation(g, u, activation)
        (y,), _, S_down = _forward(h, (down,))
        ctx.save_for_backward(rows, S, g, u, S_down, *flat)
        ctx.layouts, ctx.shape, ctx.activation = layouts, x.shape, activation
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        rows, S, g, u, S_down, *flat = ctx.saved_tensors
        gate, up, down = _unflatten(ctx.layouts, flat)
        dy = _rows(dy)
        # dh first, without what needs h: then one kernel reads gate and up and gives h and both of their gradients
        dS_down, dBs = _branch_gradients((dy,), S_down, (down,))
        A_down = _stacked_A((down,), dy.dtype)
        if ctx.fused:
            d_branch = None if dS_down is None or A_down is None else LowRank(dS_down, A_down.t())
            h, dg, du = lora_gated_activation_backward(
                _add_back(None, dy, down.weight), g, u, d_branch, *_low_rank((gate, up), S), ctx.activation,
                want_output=dS_down is not None,
            )  # fmt: skip
        else:
            dh = _add_back(None if dS_down is None or A_down is None else dS_down @ A_down, dy, down.weight)
            h, dg, du = gated_activation_backward(dh, g, u, ctx.activation, want_output=dS_down is not None)
            del dh
        flat_down: list[Tensor | None] = [None] * (4 if isinstance(down.weight, fp8.Weight) else 1)
        trained_bias = down.bias is not None and down.bias.requires_grad
        flat_down.append(dy.sum(0, dtype=torch.float32) if trained_bias else None)
        if dS_down is not None:
            assert h is not None
            dA = _product_fp32(dS_down, h)
            at = 0
            for branch, dB in zip(down.branches, dBs, strict=True):
                flat_down += [dA[at : at + branch.A.shape[0]], dB]
                at += branch.A.shape[0]
        del h
        got = _backward((dg, du), rows, S, (gate, up), ctx.needs_input_grad[0])
        d_x = None if got.rows is None else got.rows.view(ctx.shape)
        return d_x, None, None, *got.flat, *flat_down


def _fused_ranks(inner: Sequence[FrozenLinear], down: FrozenLinear) -> bool:
    """Whether the activation kernels take the branches: there are some, of ranks that they are made for."""
    ranks = [sum(b.A.shape[0] for b in linear.branches) for linear in (*inner, down)]
    return any(ranks) and max(ranks) <= MAX_RANK


def _check(op: str, x: Tensor, linears: Sequence[FrozenLinear], width: int) -> None:
    for linear in linears:
        shape = linear.weight.shape
        if shape[1] != width:
            raise ValueError(f"{op}: x has {width} columns, a weight has shape {tuple(shape)}")
        if not isinstance(linear.weight, fp8.Weight) and linear.weight.dtype != x.dtype:
            raise ValueError(f"{op}: x is {x.dtype}, a weight is {linear.weight.dtype}")
        for branch in linear.branches:
            r = branch.A.shape[0]
            if branch.A.shape != (r, shape[1]) or branch.B.shape != (shape[0], r):
                raise ValueError(
                    f"{op}: A {tuple(branch.A.shape)} and B {tuple(branch.B.shape)} are no branch of a weight {tuple(shape)}"
                )


def lora_linears(x: Tensor, linears: Sequence[FrozenLinear]) -> tuple[Tensor, ...]:
    """Each linear of x: (..., K) -> (..., N). Weights get no gradient; x, biases, A and B do, A and B in fp32."""
    _check("lora_linears", x, linears, x.shape[-1])
    layouts, flat = _flatten(linears)
    return _LoraLinears.apply(x, layouts, *flat)  # type: ignore[no-any-return]


def lora_gated_mlp(
    x: Tensor, gate: FrozenLinear, up: FrozenLinear, down: FrozenLinear, activation: Activation = "silu"
) -> Tensor:
    """down(activation(gate(x)) * up(x)): (..., K) -> (..., N). Keeps x, gate and up; gradients as in `lora_linears`."""
    _check("lora_gated_mlp", x, (gate, up), x.shape[-1])
    _check("lora_gated_mlp", x, (down,), gate.weight.shape[0])
    layouts, flat = _flatten((gate, up, down))
    return _LoraGatedMlp.apply(x, layouts, activation, *flat)  # type: ignore[no-any-return]
