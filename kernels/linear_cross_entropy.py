"""Cross entropy from hidden states: logits = hidden @ weight.T exist one chunk at a time. M rows, H hidden size, V vocabulary.

Gradients are made in the forward pass, where the logits are, and scaled in the backward pass, so that nothing is computed twice.
Two ways to make them, chosen by `plan_chunks`:
- one pass over the logits (weight frozen): exp(z - reference) is written over a chunk of them and its product with the weight
  summed in fp32; each row is divided by its total at the end, as attention does over its keys. The chunk may be a few columns
  wide ("least"), so that it lives in L2 and memory does not grow with V;
- two passes (weight trained, or label smoothing): whole rows of logits, then their gradient over them, then both products.
The products are cuBLAS's; sums over chunks are fp32 inside the product. Rows without a label are dropped before it.
The backward pass scales its own buffers in place and so runs once: a second one over the same graph raises.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rft.kernels import cross_entropy as rows
from rft.kernels import launch
from rft.kernels.linear_logprob import linear_logprob
from rft.kernels.logit_blocks import (
    RowState,
    add_product,
    compact_labels,
    labelled_rows,
    matching_dtypes,
    scale_,
    spread_rows,
    take_rows,
)

MIB = 1 << 20


def linear_cross_entropy_reference(hidden: Tensor, weight: Tensor, labels: Tensor, **options) -> Tensor:
    """Loss of each row in plain torch and fp32; options as in `cross_entropy_reference`."""
    return rows.cross_entropy_reference(hidden.float() @ weight.float().t(), labels, **options)


class Chunks(NamedTuple):
    rows: int
    columns: int
    """0: whole rows."""


FAST_ROWS, FAST_BYTES = 4096, 2200 * MIB


def fast_rows(V: int, itemsize: int, *, whole_rows: bool) -> int:
    """Rows of logits at a time that are as fast as more. whole_rows: the weight is trained, and its gradient summed chunk by chunk in fp32,
    which fewer chunks save."""
    return max(FAST_ROWS, FAST_BYTES // (V * itemsize)) if whole_rows else FAST_ROWS


def plan_chunks(
    chunk_rows: int | Literal["auto", "least"], M: int, H: int, V: int, itemsize: int, *, whole_rows: bool
) -> Chunks:
    """How many rows and columns of logits exist at a time. "least" keeps the workspace at 32 MiB where it can.

    Measured on an H200 at 8192 x 4096 x 128256 (bench/kernels/linear_cross_entropy.py).
    """
    if chunk_rows != "least" or whole_rows:
        if chunk_rows == "least":
            count = max(128, 64 * MIB // (V * itemsize))
        else:
            count = fast_rows(V, itemsize, whole_rows=whole_rows) if chunk_rows == "auto" else chunk_rows
        return Chunks(max(1, min(count, M)), 0 if whole_rows else V)
    count = 1024
    while count > 128 and count * H * 4 > 16 * MIB:
        count //= 2
    count = max(1, min(count, M))
    columns = (32 * MIB - count * H * 4) // (count * itemsize)
    return Chunks(count, min(V, max(1024, min(columns, 16384) // 256 * 256)))


def _in_one_pass(
    hidden, weight, labels, bias, token_weight, index, expected, options, chunks: Chunks, d_hidden: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(loss, lse) of each row; fills d_hidden (M', H) unless None. No label smoothing here: its sum has no common reference."""
    scale, softcap, ignore_index, _, z_loss = options
    M, (V, H) = labels.shape[0], weight.shape
    loss, lse = (hidden.new_empty(M, dtype=torch.float32) for _ in range(2))
    block_buffer = hidden.new_empty(chunks.rows, launch.cdiv(chunks.columns, 64) * 64)  # rows at multiples of 128 bytes
    totals = None if d_hidden is None else hidden.new_empty(chunks.rows, H, dtype=torch.float32)
    state = RowState(hidden, chunks.rows)
    for start in range(0, M, chunks.rows):
        stop = min(start + chunks.rows, M)
        x = take_rows(hidden, index, start, stop)
        accumulator = None if totals is None else totals[: stop - start]
        for column in range(0, V, chunks.columns):
            head = weight[column : column + chunks.columns]
            block = block_buffer[: stop - start, : head.shape[0]]
            torch.mm(x, head.t(), out=block)
            state.add_block(
                block, labels[start:stop], bias, accumulator, first_column=column, scale=scale, softcap=softcap,
                ignore_index=ignore_index,
            )  # fmt: skip
            if accumulator is not None:
                add_product(accumulator, block, head, first=column == 0)
        gradient = None if d_hidden is None else d_hidden[start:stop]
        with launch.on_device_of(hidden):
            rows._finish_kernel[(stop - start,)](
                accumulator, H, weight, weight.stride(0), gradient, H,
                labels[start:stop], None if token_weight is None else token_weight[start:stop], expected,
                state.reference, state.total, state.target, loss[start:stop], lse[start:stop],
                V, H, scale, softcap, ignore_index, z_loss,
                HAS_SCALE=scale != 1.0, HAS_SOFTCAP=softcap != 0.0, HAS_WEIGHT=token_weight is not None, HAS_UPSTREAM=expected is not None,
                WANT_GRADIENT=gradient is not None, BLOCK_H=launch.power_of_two(H, most=4096),
            )  # fmt: skip
    return loss, lse


def _in_two_passes(
    hidden, weight, labels, bias, token_weight, index, expected, options, chunk_rows: int,
    d_hidden: Tensor | None, d_weight: Tensor | None, d_bias: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(loss, lse) of each row; fills the gradients that are not None, in their own dtypes."""
    scale, softcap, ignore_index, label_smoothing, z_loss = options
    M, V = labels.shape[0], weight.shape[0]
    loss, lse = (hidden.new_empty(M, dtype=torch.float32) for _ in range(2))
    # Rows at multiples of 128 bytes: an odd vocabulary would make every product misaligned and slow.
    logits_buffer = hidden.new_empty(chunk_rows, launch.cdiv(V, 64) * 64)
    several = chunk_rows < M
    weight_total = torch.empty_like(d_weight, dtype=torch.float32) if several and d_weight is not None else d_weight
    bias_total = None if d_bias is None else torch.zeros_like(d_bias, dtype=torch.float32)
    for start in range(0, M, chunk_rows):
        stop = min(start + chunk_rows, M)
        x = take_rows(hidden, index, start, stop)
        logits = logits_buffer[: stop - start, :V]
        torch.mm(x, weight.t(), out=logits)
        loss[start:stop], lse[start:stop] = rows.rows_loss(
            logits, labels[start:stop], bias=bias, token_weight=None if token_weight is None else token_weight[start:stop],
            scale=scale, softcap=softcap, ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss,
            gradient=None if d_hidden is None and d_weight is None and d_bias is None else logits,
            upstream=None if expected is None else expected.expand(stop - start),
        )  # fmt: skip
        if d_hidden is not None:
            torch.mm(logits, weight, out=d_hidden[start:stop])
        if weight_total is not None and several:
            add_product(weight_total, logits.t(), x, first=start == 0)
        elif d_weight is not None:
            torch.mm(logits.t(), x, out=d_weight)
        if bias_total is not None:
            bias_total += logits.sum(0, dtype=torch.float32)
    if several and d_weight is not None and weight_total is not None:
        d_weight.copy_(weight_total)
    if d_bias is not None and bias_total is not None:
        d_bias.copy_(bias_total)
    return loss, lse


@torch.library.custom_op("rft::linear_cross_entropy", mutates_args=())
def _linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, token_weight: Tensor | None,
    index: Tensor | None, slots: Tensor | None, expected: Tensor | None, scale: float, softcap: float, ignore_index: int, label_smoothing: float,
    z_loss: float, chunk_rows: int, chunk_columns: int, need_hidden: bool, need_weight: bool, need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Sum of the losses, log-sum-exp (M',), and the sum's gradients times `expected`: (M', H), (V, H), (V,), or empty."""
    M, (V, H) = labels.shape[0], weight.shape
    d_hidden = hidden.new_empty(M if need_hidden else 0, H)
    d_weight = weight.new_empty(V if need_weight else 0, H)
    d_bias = weight.new_empty(V if need_bias else 0)
    if M == 0:
        return (
            hidden.new_zeros((), dtype=torch.float32),
            hidden.new_empty(0, dtype=torch.float32),
            d_hidden,
            d_weight.zero_(),
            d_bias.zero_(),
        )
    options = (scale, softcap, ignore_index, label_smoothing, z_loss)
    if chunk_columns:
        wanted = d_hidden if need_hidden else None
        chunks = Chunks(chunk_rows, chunk_columns)
        loss, lse = _in_one_pass(hidden, weight, labels, bias, token_weight, index, expected, options, chunks, wanted)
    else:
        loss, lse = _in_two_passes(
            hidden, weight, labels, bias, token_weight, index, expected, options, chunk_rows,
            d_hidden if need_hidden else None, d_weight if need_weight else None, d_bias if need_bias else None,
        )  # fmt: skip
    return loss.sum(), lse, d_hidden, d_weight, d_bias


@_linear_cross_entropy.register_fake
def _(hidden, weight, labels, bias, token_weight, index, slots, expected, *options):
    *_, need_hidden, need_weight, need_bias = options
    M, (V, H) = labels.shape[0], weight.shape
    return (
        hidden.new_empty((), dtype=torch.float32),
        hidden.new_empty(M, dtype=torch.float32),
        hidden.new_empty(M if need_hidden else 0, H),
        weight.new_empty(V if need_weight else 0, H),
        weight.new_empty(V if need_bias else 0),
    )


def _save(ctx, inputs, output):
    _, lse, d_hidden, d_weight, d_bias = output
    ctx.save_for_backward(*inputs[6:8], d_hidden, d_weight, d_bias)
    ctx.needs = inputs[-3:]
    ctx.spent = False
    ctx.num_inputs = len(inputs)
    ctx.mark_non_differentiable(lse, d_hidden, d_weight, d_bias)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_loss, *_):
    if grad_loss is None:
        return (None,) * ctx.num_inputs
    if ctx.spent:
        raise RuntimeError(
            "linear_cross_entropy: its backward pass scales the gradients in place and has run already; "
            "call the forward again, or sum the losses first"
        )
    ctx.spent = True
    slots, expected, d_hidden, d_weight, d_bias = ctx.saved_tensors
    need_hidden, need_weight, need_bias = ctx.needs
    if slots is None:
        scale_(d_hidden, grad_loss, expected)
    elif need_hidden:
        d_hidden = spread_rows(d_hidden, slots, grad_loss, expected)
    scale_(d_weight, grad_loss, expected)
    scale_(d_bias, grad_loss, expected)
    grads = [None] * ctx.num_inputs
    grads[0] = d_hidden if need_hidden else None
    grads[1] = d_weight if need_weight else None
    grads[3] = d_bias if need_bias else None
    return tuple(grads)


_linear_cross_entropy.register_autograd(_backward, setup_context=_save)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    token_weight: Tensor | None = None,
    scale: float = 1.0,
    softcap: float = 0.0,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Literal["mean", "sum", "none"] = "mean",
    num_items: Tensor | float | None = None,
    num_labels: int | None = None,
    expected_upstream: Tensor | float | None = None,
    chunk_rows: int | Literal["auto", "least"] = "auto",
) -> Tensor:
    """Cross entropy of softcap * tanh((hidden @ weight.T + bias) * scale / softcap) with labels; `softcap = 0` is none.

    hidden: (..., H), any strides; weight: (V, H); labels: (...,), `ignore_index` = none; token_weight: (...,), no gradient.
    reduction: "sum", fp32 (); "mean" = sum / num_items, by default the sum of the weights of labelled rows (no label: loss 0);
    "none", fp32 as labels, which makes the logits twice (linear_logprob.py).
    num_labels: how many labels are not `ignore_index`, if the caller knows; then rows without one cost nothing. More labels than
    it says make the loss NaN.
    expected_upstream: what the sum will be multiplied by before backward, such as 1 / denominator of the step, as a number or ()
    fp32: gradients are then made with it in one rounding. Any other upstream gradient is right too, in a second rounding and
    a second pass. "mean" knows its own.
    chunk_rows: "auto" is the fastest; "least" keeps 32 MiB of logits and sums; or a number.
    Raises `ValueError` for shapes that do not fit and for `label_smoothing` with reduction "none".
    """
    rows.check_scale("linear_cross_entropy", scale)
    hidden, weight, bias = matching_dtypes("linear_cross_entropy", hidden, weight, labels, bias)
    if token_weight is not None:
        if token_weight.shape != labels.shape:
            raise ValueError(
                f"linear_cross_entropy: token_weight {tuple(token_weight.shape)} is not shaped as labels {tuple(labels.shape)}"
            )
        token_weight = token_weight.detach().float()
    training = torch.is_grad_enabled()
    needs = (
        training and hidden.requires_grad,
        training and weight.requires_grad,
        training and bias is not None and bias.requires_grad,
    )
    divisor = _divisor(labels, token_weight, num_items, ignore_index) if reduction == "mean" else None
    if divisor is not None:
        expected_upstream = 1.0 / divisor if expected_upstream is None else expected_upstream / divisor
    if isinstance(expected_upstream, float | int):
        expected_upstream = torch.full((), expected_upstream, dtype=torch.float32, device=hidden.device)
    if reduction == "none" or (chunk_rows == "least" and needs[1] and not label_smoothing):
        if label_smoothing:
            raise ValueError('linear_cross_entropy: label_smoothing needs reduction "sum" or "mean"')
        logp, lse, _ = linear_logprob(
            hidden, weight, labels, bias=bias, scale=scale, softcap=softcap, ignore_index=ignore_index, num_labels=num_labels
        )  # fmt: skip
        losses = z_loss * lse.square() - logp
        losses = losses if token_weight is None else losses * token_weight
        if reduction == "none":
            return losses
        total = losses.sum()
    else:
        total = _sum_of_losses(
            hidden, weight, labels.reshape(-1), bias, None if token_weight is None else token_weight.reshape(-1),
            expected_upstream, (scale, softcap, ignore_index, label_smoothing, z_loss), num_labels, chunk_rows, needs,
        )  # fmt: skip
    return total if divisor is None else total / divisor


def _divisor(
    labels: Tensor, token_weight: Tensor | None, num_items: Tensor | float | None, ignore_index: int
) -> Tensor | float:
    """What "mean" divides by; 1 in place of 0, so that no label at all gives a loss of 0."""
    if num_items is None:
        labelled = labels != ignore_index
        num_items = (labelled if token_weight is None else torch.where(labelled, token_weight, 0.0)).sum()
    if isinstance(num_items, Tensor):
        return torch.where(num_items == 0, 1, num_items).to(torch.float32)
    return float(num_items) or 1.0


def _sum_of_losses(
    hidden, weight, labels, bias, token_weight, expected, options, num_labels, chunk_rows, needs
) -> Tensor:
    ignore_index, label_smoothing = options[2], options[3]
    M, (V, H) = labels.shape[0], weight.shape
    size = labelled_rows(M, num_labels)
    index = slots = overflow = None
    if size < M:
        index, slots, overflow = compact_labels(labels, ignore_index, size)
        labels = torch.where(index < 0, ignore_index, labels[index.clamp(min=0)])
        token_weight = None if token_weight is None else token_weight[index.clamp(min=0)]
    whole_rows = needs[1] or needs[2] or label_smoothing != 0.0
    chunks = plan_chunks(chunk_rows, size, H, V, hidden.element_size(), whole_rows=whole_rows)
    total, *_ = _linear_cross_entropy(
        launch.as_rows(hidden), launch.with_unit_columns(weight), labels.contiguous(), bias,
        None if token_weight is None else token_weight.contiguous(), index, slots,
        None if expected is None else expected.detach(), *options, *chunks, *needs,
    )  # fmt: skip
    return total if overflow is None else torch.where(overflow, float("nan"), total)
