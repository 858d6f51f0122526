"""Linears over frozen weights with low-rank branches, and a whole gated MLP of them: y = x @ W.T + bias + sum of scale (x @ A.T) @ B.T.

T tokens, K inputs, N outputs, r rank. The large products are cuBLAS's. What is saved around them: linears that share an input
share one product with all their A's; a branch is written first and the large product adds itself to it (cuBLAS reads it in its
last step, where a branch added behind would be a pass over N columns of its own; FP8 products cannot, so there it is that pass);
backward reads each dy once for both of a branch's gradients (lora.py); gradients of A and B leave in fp32; W gets none. The gated
MLP keeps the large products of gate and up; their branches are added, and activation(gate) * up is made again in the backward pass,
in the kernels that read them anyway (lora_swiglu.py).

A weight may be FP8 (fp8.py): then the large products alone are FP8, and the branches see the unquantised input. Quantised rows come from
the norm before, or are made here: made by the activation's kernels they took longer, since a row is read twice there (forward 0.31 ms
against 0.16 + 0.10, backward 0.57 against 0.33 + 0.19, 8192 x 14336, H200). Dropout of a branch's input
is drawn where it is needed, in both passes, and never stored (dropout.py). NF4 and int8 weights (nf4.py, int8.py) are dequantised into one
shared buffer just before each product.
Not registered as single ops: `torch.compile` traces through the autograd functions and stops at the registered ops inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rft.kernels import fp8, int8, nf4
from rft.kernels.dropout import add_dropped, draw_seeds, dropped
from rft.kernels.lora import Pair, lowrank_gradients
from rft.kernels.lora_swiglu import MAX_RANK, LowRank, lora_gated_activation, lora_gated_activation_backward
from rft.kernels.swiglu import Activation, gated_activation, gated_activation_backward, gated_activation_reference

Packed = fp8.Weight | nf4.Weight | int8.Weight
"""A weight in fewer bits: a named tuple of tensors with a `shape` and `dequantised()`."""


class Branch(NamedTuple):
    """A low-rank branch. A: (r, K); B: (N, r). dropout: probability with which the branch does not see an element of its input."""

    A: Tensor
    B: Tensor
    scale: float
    dropout: float = 0.0


@dataclass(frozen=True)
class FrozenLinear:
    """A linear whose weight gets no gradient. weight: (N, K) tensor, or in fewer bits; bias: (N,), may be trained."""

    weight: Tensor | Packed
    bias: Tensor | None = None
    branches: tuple[Branch, ...] = ()

    @property
    def weight_dtype(self) -> torch.dtype | None:
        """The type that x has to have; None: any (weights in fewer bits)."""
        return self.weight.dtype if isinstance(self.weight, Tensor) else None


def lora_linears_reference(x: Tensor, linears: Sequence[FrozenLinear]) -> tuple[Tensor, ...]:
    """In plain torch and fp32, in the dtype of x; without dropout."""
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


def _plain(weight: Tensor | Packed) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.dequantised()


def _readable(weight: Tensor | nf4.Weight | int8.Weight, dtype: torch.dtype) -> Tensor:
    """As a product reads it. What was packed is good until the next one is read: it lies in a shared buffer."""
    return weight if isinstance(weight, Tensor) else weight.plain(dtype)


# ---- linears as flat tensors: what an autograd function takes


class _Layout(NamedTuple):
    """Where a linear's tensors lie in the flat list: base (one, or the fields of its class), bias, then A and B of each branch."""

    packed: type[Packed] | None
    branches: tuple[tuple[float, float], ...]
    """(scale, dropout) of each."""
    base: int
    """Tensors of the weight."""
    size: int
    """Of all."""


def _flatten(linears: Sequence[FrozenLinear]) -> tuple[tuple[_Layout, ...], list[Tensor | None]]:
    layouts: list[_Layout] = []
    flat: list[Tensor | None] = []
    for linear in linears:
        flat += [linear.weight] if isinstance(linear.weight, Tensor) else [*linear.weight]
        flat.append(linear.bias)
        for branch in linear.branches:
            flat += [branch.A, branch.B]
        packed = None if isinstance(linear.weight, Tensor) else type(linear.weight)
        base = 1 if packed is None else len(packed._fields)
        factors = tuple((b.scale, b.dropout) for b in linear.branches)
        layouts.append(_Layout(packed, factors, base, base + 1 + 2 * len(factors)))
    return tuple(layouts), flat


def _unflatten(layouts: Sequence[_Layout], flat: Sequence[Tensor]) -> list[FrozenLinear]:
    linears, at = [], 0
    for layout in layouts:
        size = layout.base
        weight = flat[at] if layout.packed is None else layout.packed(*flat[at : at + size])
        bias = flat[at + size]
        pairs = flat[at + size + 1 : at + layout.size]
        branches = tuple(Branch(pairs[2 * i], pairs[2 * i + 1], *given) for i, given in enumerate(layout.branches))
        linears.append(FrozenLinear(weight, bias, branches))
        at += layout.size
    return linears


def _branches(linears: Sequence[FrozenLinear]) -> list[Branch]:
    return [branch for linear in linears for branch in linear.branches]


def _seeds_for(linears: Sequence[FrozenLinear], device: torch.device) -> Tensor | None:
    """A seed a branch, drawn only where one drops."""
    branches = _branches(linears)
    return draw_seeds(len(branches), device) if any(b.dropout for b in branches) else None


class _Input:
    """The rows that several linears read, quantised at most once."""

    def __init__(self, rows: Tensor, quantised: fp8.Rows | None):
        self.rows = rows
        self._fp8 = quantised

    def times(self, weight: Tensor | Packed, bias: Tensor | None, added: tuple[LowRank, float] | None = None) -> Tensor:
        """rows @ weight.T + bias + a branch times a factor"""
        kind = self.rows.dtype
        if isinstance(weight, fp8.Weight):
            if self._fp8 is None:
                self._fp8 = fp8.quantise_rows(self.rows)
            y = fp8.product(*self._fp8, weight, bias, kind)
            return y if added is None else y.addmm_(added[0].left, added[0].right.t(), alpha=added[1])
        weight = _readable(weight, kind)
        if added is not None:
            (left, right), factor = added
            if bias is None:  # beta = 0: what lies in y is not read
                y = left.new_empty(left.shape[0], right.shape[0]).addmm_(left, right.t(), beta=0, alpha=factor)
            else:
                y = torch.addmm(bias.to(kind), left, right.t(), alpha=factor)
            return y.addmm_(self.rows, weight.t())
        return self.rows @ weight.t() if bias is None else torch.addmm(bias.to(kind), self.rows, weight.t())


def _stacked_A(branches: Sequence[Branch], dtype: torch.dtype) -> Tensor:
    matrices = [b.A.to(dtype) for b in branches]
    return matrices[0] if len(matrices) == 1 else torch.cat(matrices)


def _inner(
    rows: Tensor, branches: Sequence[Branch], seeds: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """(S = rows @ A.T of every branch side by side (T, sum of ranks), all A's as one). With dropout each product is one of its own."""
    if not branches:
        return None, None
    if seeds is None:
        A = _stacked_A(branches, rows.dtype)
        return rows @ A.t(), A
    each = [
        (dropped(rows, seeds, i, b.dropout) if b.dropout else rows) @ b.A.to(rows.dtype).t()
        for i, b in enumerate(branches)
    ]
    return torch.cat(each, dim=1), None


def _low_rank(linears: Sequence[FrozenLinear], S: Tensor | None, *, scaled: bool) -> list[tuple[LowRank, float] | None]:
    """What each linear adds to its output: all its branches as one, and a factor. S: `_inner` of all. scaled: the factor is to be 1, at the
    price of a copy of B, which several branches cost in any case."""
    found: list[tuple[LowRank, float] | None] = []
    at = 0
    for linear in linears:
        ranks = [b.A.shape[0] for b in linear.branches]
        if not ranks:
            found.append(None)
            continue
        assert S is not None
        left = S[:, at : at + sum(ranks)]
        at += sum(ranks)
        if len(ranks) == 1 and not scaled:
            (branch,) = linear.branches
            found.append((LowRank(left, branch.B.detach().to(S.dtype)), branch.scale))
            continue
        right = torch.empty(linear.weight.shape[0], sum(ranks), dtype=S.dtype, device=S.device)
        for branch, part in zip(linear.branches, right.split_with_sizes(ranks, 1), strict=True):
            torch.mul(branch.B.detach(), branch.scale, out=part)  # scaled in its own type, rounded once
        found.append((LowRank(left, right), 1.0))
    return found


def _forward(
    rows: Tensor,
    linears: Sequence[FrozenLinear],
    seeds: Tensor | None,
    quantised: fp8.Rows | None = None,
    *,
    add: bool = True,
) -> tuple[list[Tensor], list[LowRank | None], Tensor | None, Tensor | None]:
    """Outputs (T, N), without their branches unless `add`; the branches, for whoever adds them then; S and A of `_inner` of all."""
    S, A = _inner(rows, _branches(linears), seeds)
    shared, branches = _Input(rows, quantised), _low_rank(linears, S, scaled=not add)
    outs = [shared.times(ln.weight, ln.bias, b if add else None) for ln, b in zip(linears, branches, strict=True)]
    return outs, [None if b is None else b[0] for b in branches], S, A


# ---- backward


def _gradients_of_B(
    dys: Sequence[Tensor | None], S: Tensor | None, linears: Sequence[FrozenLinear]
) -> tuple[Tensor | None, list[Tensor | None]]:
    """(dS of all branches side by side, gradient of each B), each dy read once. A dy that is None is zero."""
    if S is None:
        return None, []
    ranks = [b.A.shape[0] for b in _branches(linears)]
    found = [(dy, branch) for dy, linear in zip(dys, linears, strict=True) for branch in linear.branches]
    given = [
        Pair(dy, s, branch.B, branch.scale)
        for (dy, branch), s in zip(found, S.split_with_sizes(ranks, 1), strict=True)
        if dy is not None
    ]
    if len(given) == len(found):
        return lowrank_gradients(given)  # type: ignore[return-value]  # a list of tensors is one of optional ones
    some, dBs = lowrank_gradients(given) if given else (S[:, :0], [])
    parts, made = iter(some.split_with_sizes([p.s.shape[1] for p in given], 1)), iter(dBs)
    columns = [
        S.new_zeros(S.shape[0], r) if dy is None else next(parts) for (dy, _), r in zip(found, ranks, strict=True)
    ]
    return torch.cat(columns, dim=1), [None if dy is None else next(made) for dy, _ in found]


def _gradients_of_A(
    dS: Tensor | None, rows: Tensor, branches: Sequence[Branch], seeds: Tensor | None
) -> list[Tensor | None]:
    """Of each branch, fp32."""

    def product(ds: Tensor, x: Tensor) -> Tensor:
        return ds.t() @ x if x.dtype == torch.float32 else torch.mm(ds.t(), x, out_dtype=torch.float32)

    if dS is None:
        return []
    ranks = [b.A.shape[0] for b in branches]
    if seeds is None:
        return list(product(dS, rows).split_with_sizes(ranks))
    return [
        product(ds, dropped(rows, seeds, i, b.dropout) if b.dropout else rows)
        for i, (ds, b) in enumerate(zip(dS.split_with_sizes(ranks, 1), branches, strict=True))
    ]


def _add_low_rank(
    total: Tensor | None, dS: Tensor | None, A: Tensor | None, branches: Sequence[Branch], seeds: Tensor | None
) -> Tensor | None:
    """total + dS @ A, with each branch's own mask; `total` is ours and is added to where it lies. A: of `_inner`."""
    if dS is None:
        return total
    if A is not None:
        return dS @ A if total is None else total.addmm_(dS, A)
    assert seeds is not None
    for i, (ds, b) in enumerate(zip(dS.split_with_sizes([b.A.shape[0] for b in branches], 1), branches, strict=True)):
        A = b.A.to(dS.dtype)
        if not b.dropout:
            total = ds @ A if total is None else total.addmm_(ds, A)
        elif total is None:
            total = dropped(ds @ A, seeds, i, b.dropout)
        else:
            add_dropped(total, ds @ A, seeds, i, b.dropout)
    return total


def _add_back(total: Tensor | None, dy: Tensor, weight: Tensor | Packed) -> Tensor:
    """total + dy @ weight; `total` is ours and is added to where it lies."""
    if isinstance(weight, fp8.Weight):
        back = fp8.product_back(*fp8.quantise_rows(dy), weight.by_column, weight.column_scale, dy.dtype)
        return back if total is None else total.add_(back)
    weight = _readable(weight, dy.dtype)
    return dy @ weight if total is None else total.addmm_(dy, weight)


def _joined_back(dys: Sequence[Tensor | None], linears: Sequence[FrozenLinear], dtype: torch.dtype) -> Tensor | None:
    """Sum of dy @ weight over FP8 weights as one product over all their outputs, where they were quantised for that; else None."""
    weights = [linear.weight for linear in linears if isinstance(linear.weight, fp8.Weight)]
    given = [dy for dy in dys if dy is not None]
    if not 2 <= len(weights) == len(given) == len(linears) <= fp8.JOINED:
        return None
    columns = fp8.joined_columns(weights)
    if columns is None:
        return None
    return fp8.product_back(*fp8.quantise_joined(given), columns, weights[0].column_scale, dtype)


def _flat_gradients(
    dys: Sequence[Tensor | None],
    linears: Sequence[FrozenLinear],
    dAs: Sequence[Tensor | None],
    dBs: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """As `_flatten` orders them."""
    flat: list[Tensor | None] = []
    pairs = iter(zip(dAs, dBs, strict=True))
    for dy, linear in zip(dys, linears, strict=True):
        flat += [None] * (1 if isinstance(linear.weight, Tensor) else len(linear.weight))
        wanted = linear.bias is not None and linear.bias.requires_grad and dy is not None
        flat.append(dy.sum(0, dtype=torch.float32) if wanted else None)  # type: ignore[union-attr]
        for _ in linear.branches:
            flat += next(pairs)
    return flat


def _backward(
    dys: Sequence[Tensor | None],
    rows: Tensor,
    S: Tensor | None,
    A: Tensor | None,
    linears: Sequence[FrozenLinear],
    seeds: Tensor | None,
    need_rows: bool,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """(gradient of the rows, those of every tensor as `_flatten` orders them). S, A: of `_inner`."""
    branches = _branches(linears)
    dS, dBs = _gradients_of_B(dys, S, linears)
    d_rows: Tensor | None = None
    if need_rows:
        late = any(isinstance(linear.weight, fp8.Weight) for linear in linears)  # its product adds to nothing
        d_rows = None if late else _add_low_rank(None, dS, A, branches, seeds)
        together = _joined_back(dys, linears, rows.dtype)
        for dy, linear in zip(dys, linears, strict=True) if together is None else ():
            if dy is not None:
                d_rows = _add_back(d_rows, dy, linear.weight)
        d_rows = d_rows if together is None else together
        d_rows = _add_low_rank(d_rows, dS, A, branches, seeds) if late else d_rows
        d_rows = torch.zeros_like(rows) if d_rows is None else d_rows
    return d_rows, _flat_gradients(dys, linears, _gradients_of_A(dS, rows, branches, seeds), dBs)


def _rows(x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


class _LoraLinears(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, q, q_scale, layouts, *flat):
        rows, linears = _rows(x), _unflatten(layouts, flat)
        seeds = _seeds_for(linears, x.device)
        outs, _, S, A = _forward(rows, linears, seeds, None if q is None else fp8.Rows(q, q_scale))
        ctx.save_for_backward(rows, S, A, seeds, *flat)
        ctx.layouts, ctx.shape = layouts, x.shape
        ctx.set_materialize_grads(False)
        return tuple(y.view(*x.shape[:-1], y.shape[-1]) for y in outs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *dys):
        rows, S, A, seeds, *flat = ctx.saved_tensors
        linears = _unflatten(ctx.layouts, flat)
        rows_of_dys = [None if dy is None else _rows(dy) for dy in dys]
        d_rows, gradients = _backward(rows_of_dys, rows, S, A, linears, seeds, ctx.needs_input_grad[0])
        return None if d_rows is None else d_rows.view(ctx.shape), None, None, None, *gradients


class _LoraGatedMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, q, q_scale, layouts, activation, *flat):
        rows = _rows(x)
        gate, up, down = _unflatten(layouts, flat)
        seeds, seeds_down = (_seeds_for(linears, x.device) for linears in ((gate, up), (down,)))
        ctx.fused = _fused_ranks((gate, up), down)
        (g, u), inner, S, A = _forward(
            rows, (gate, up), seeds, None if q is None else fp8.Rows(q, q_scale), add=not ctx.fused
        )
        if ctx.fused:
            h = lora_gated_activation(g, u, inner[0], inner[1], activation)
        else:
            h = gated_activation(g, u, activation)
        (y,), _, S_down, A_down = _forward(h, (down,), seeds_down)
        rights = [None if b is None or not ctx.fused else b.right for b in inner]
        ctx.save_for_backward(rows, S, A, g, u, *rights, S_down, A_down, seeds, seeds_down, *flat)
        ctx.layouts, ctx.shape, ctx.activation = layouts, x.shape, activation
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        rows, S, A, g, u, gate_right, up_right, S_down, A_down, seeds, seeds_down, *flat = ctx.saved_tensors
        gate, up, down = _unflatten(ctx.layouts, flat)
        dy = _rows(dy)
        # dh first, without what needs h: then one kernel reads gate and up and gives both of their gradients and what h was wanted for
        dS_down, dBs = _gradients_of_B((dy,), S_down, (down,))
        h = product = None
        if ctx.fused:
            dh, d_branch = _add_back(None, dy, down.weight), None
            if dS_down is not None and A_down is not None:
                d_branch = LowRank(dS_down, A_down.t())
            else:  # a mask of its own lies over it
                _add_low_rank(dh, dS_down, A_down, down.branches, seeds_down)
            rank = 0 if gate_right is None else gate_right.shape[1]
            gate_branch = None if gate_right is None else LowRank(S[:, :rank], gate_right)
            up_branch = None if up_right is None else LowRank(S[:, rank:], up_right)
            dg, du, h, product = lora_gated_activation_backward(
                dh, g, u, d_branch, gate_branch, up_branch, ctx.activation,
                want_output=dS_down is not None and d_branch is None, want_product=d_branch is not None,
            )  # fmt: skip
        else:
            late = isinstance(down.weight, fp8.Weight)  # its product adds to nothing
            begun = None if late else _add_low_rank(None, dS_down, A_down, down.branches, seeds_down)
            dh = _add_back(begun, dy, down.weight)
            if late:
                _add_low_rank(dh, dS_down, A_down, down.branches, seeds_down)
            h, dg, du = gated_activation_backward(dh, g, u, ctx.activation, want_output=dS_down is not None)
        del dh
        if product is not None:
            dAs: list[Tensor | None] = [*product.split_with_sizes([b.A.shape[0] for b in down.branches])]
        else:
            dAs = [] if h is None else _gradients_of_A(dS_down, h, down.branches, seeds_down)
        flat_down = _flat_gradients((dy,), (down,), dAs, dBs)
        del h
        d_rows, flat = _backward((dg, du), rows, S, A, (gate, up), seeds, ctx.needs_input_grad[0])
        d_x = None if d_rows is None else d_rows.view(ctx.shape)
        return d_x, None, None, None, None, *flat, *flat_down


def _fused_ranks(inner: Sequence[FrozenLinear], down: FrozenLinear) -> bool:
    """Whether the activation kernels take the branches: there are some, of ranks that they are made for."""
    ranks = [sum(b.A.shape[0] for b in linear.branches) for linear in (*inner, down)]
    return any(ranks) and max(ranks) <= MAX_RANK


def _check(op: str, x: Tensor, linears: Sequence[FrozenLinear], width: int) -> None:
    for linear in linears:
        shape = linear.weight.shape
        if shape[1] != width:
            raise ValueError(f"{op}: x has {width} columns, a weight has shape {tuple(shape)}")
        if isinstance(linear.weight, Tensor) and linear.weight.dtype != x.dtype:
            raise ValueError(f"{op}: x is {x.dtype}, a weight is {linear.weight.dtype}")
        for branch in linear.branches:
            r = branch.A.shape[0]
            if branch.A.shape != (r, shape[1]) or branch.B.shape != (shape[0], r):
                raise ValueError(
                    f"{op}: A {tuple(branch.A.shape)} and B {tuple(branch.B.shape)} are no branch of a weight {tuple(shape)}"
                )


def lora_linears(x: Tensor, linears: Sequence[FrozenLinear], quantised: fp8.Rows | None = None) -> tuple[Tensor, ...]:
    """Each linear of x: (..., K) -> (..., N). Weights get no gradient; x, biases, A and B do, A and B in fp32.

    quantised: `fp8.quantise_rows` of x as (T, K), where whoever made x gave it; FP8 weights alone read it.
    """
    _check("lora_linears", x, linears, x.shape[-1])
    layouts, flat = _flatten(linears)
    return _LoraLinears.apply(x, *(quantised or (None, None)), layouts, *flat)  # type: ignore[no-any-return]


def lora_gated_mlp(
    x: Tensor,
    gate: FrozenLinear,
    up: FrozenLinear,
    down: FrozenLinear,
    activation: Activation = "silu",
    quantised: fp8.Rows | None = None,
) -> Tensor:
    """down(activation(gate(x)) * up(x)): (..., K) -> (..., N). Keeps x, gate and up; gradients and `quantised` as in `lora_linears`."""
    _check("lora_gated_mlp", x, (gate, up), x.shape[-1])
    _check("lora_gated_mlp", x, (down,), gate.weight.shape[0])
    layouts, flat = _flatten((gate, up, down))
    return _LoraGatedMlp.apply(x, *(quantised or (None, None)), layouts, activation, *flat)  # type: ignore[no-any-return]
