"""Cross entropy from logits, a row per program; and the same over column blocks, for logits that never exist whole.

M rows, V columns (vocabulary), H hidden size. With z = softcap * tanh((logits + bias) * scale / softcap):

    loss = w * (lse - (1 - label_smoothing) * z[label] - label_smoothing * mean(z) + z_loss * lse^2),  lse = log(sum(exp(z)))

w is the row's weight; a row whose label is `ignore_index` has loss and gradient 0; a label outside [0, V) makes the loss NaN
instead of reading out of bounds or waiting for the device. Sums in fp32; offsets are int64, since M * V passes 2^31.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rft.kernels import launch

ROW_BLOCK = 4096
ROW_WARPS = 8
ROW_STAGES = 3
"""4096 rows of 128,256 in 0.76 ms, of 20 combinations tried the fastest (bench/kernels/tune.py, H200)."""
INTERPRETED = tl.constexpr(launch.INTERPRETED)
RESCALE_ABOVE = tl.constexpr(40.0)
"""A row's running sum is rescaled when a logit exceeds its reference by this much: e^40 is far inside fp32's and bf16's range."""


def cross_entropy_reference(
    logits: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    token_weight: Tensor | None = None,
    scale: float = 1.0,
    softcap: float = 0.0,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Loss of each row in plain torch and fp32. logits: (M, V); labels: (M,)."""
    z = (logits.float() + (0.0 if bias is None else bias.float())) * scale
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    labelled = labels != ignore_index
    lse = torch.logsumexp(z, -1)
    target = z.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    loss = lse - (1.0 - label_smoothing) * target + z_loss * lse.square()
    if label_smoothing:  # not where it is 0: a logit of minus infinity is a mean of minus infinity
        loss = loss - label_smoothing * z.mean(-1)
    if token_weight is not None:
        loss = loss * token_weight.float()
    return torch.where(labelled, loss, 0.0)


@triton.jit
def _exp(x):
    """e^x of a block by the hardware's 2^x, results below 2^-126 flushed to 0: 2 instructions where tl.exp takes 5."""
    if INTERPRETED:
        return tl.exp(x)
    else:
        x *= 1.4426950408889634
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _transform(
    z, bias_ptr, cols, mask, scale, softcap, HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr
):
    """Logits as the loss sees them, from the raw product; minus infinity, which stands past the last column, stays."""
    if HAS_BIAS:
        z += tl.load(bias_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    if HAS_SCALE:
        z *= scale
    if HAS_SOFTCAP:
        z = softcap * (1.0 - 2.0 / (tl.exp(2.0 * z / softcap) + 1.0))  # tanh; exact at both ends, where exp is 0 or inf
        z = tl.where(mask, z, float("-inf"))
    return z


@triton.jit
def _through_transform(gradient, z, scale, softcap, HAS_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    """Gradient of the raw product from the gradient of z, the result of `_transform`."""
    if HAS_SOFTCAP:
        capped = z / softcap
        gradient *= 1.0 - capped * capped
    if HAS_SCALE:
        gradient *= scale
    return gradient


@triton.jit
def _rows_kernel(
    logits_ptr, logits_stride, gradient_ptr, gradient_stride,
    labels_ptr, bias_ptr, weight_ptr, upstream_ptr, upstream_stride, loss_ptr, lse_ptr,
    V, scale, softcap, ignore_index, label_smoothing, z_loss,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr, HAS_UPSTREAM: tl.constexpr, WANT_LOSS: tl.constexpr, WANT_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One whole row: its loss and log-sum-exp, then its gradient, which may be written over the logits.

    The second pass finds the end of the row in L2: 132 rows of 128,256 in bf16 are 34 MB, and several share a multiprocessor.
    """
    row = (tl.num_programs(0) - 1 - tl.program_id(0)).to(
        tl.int64
    )  # the product wrote the last rows last: they are in L2
    logits_ptr += row * logits_stride
    gradient_ptr += row * gradient_stride
    label = tl.load(labels_ptr + row)
    cols = tl.arange(0, BLOCK)
    if label == ignore_index:
        if WANT_LOSS:
            tl.store(loss_ptr + row, 0.0)
            tl.store(lse_ptr + row, 0.0)
        if WANT_GRADIENT:
            zeros = tl.zeros((BLOCK,), tl.float32)
            for start in range(0, V, BLOCK):
                tl.store(gradient_ptr + start + cols, zeros, mask=start + cols < V)
        return

    row_weight = 1.0
    if HAS_WEIGHT:
        row_weight = tl.load(weight_ptr + row).to(tl.float32)
    in_range = (label >= 0) & (label < V)
    safe_label = tl.where(in_range, label, 0)
    # Read before the first barrier, which keeps any warp from writing the gradient over it.
    target = tl.load(logits_ptr + safe_label).to(tl.float32)
    target = _transform(target, bias_ptr, safe_label, True, scale, softcap, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP)

    if WANT_LOSS:
        reference = -1e30
        total = tl.zeros((BLOCK,), tl.float32)
        z_sum = tl.zeros((BLOCK,), tl.float32)
        for start in tl.range(0, V, BLOCK, num_stages=STAGES):
            mask = start + cols < V
            z = tl.load(logits_ptr + start + cols, mask=mask, other=float("-inf")).to(tl.float32)
            z = _transform(z, bias_ptr, start + cols, mask, scale, softcap, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP)
            if HAS_SMOOTHING:
                z_sum += tl.where(mask, z, 0.0)
            maximum = tl.max(z, axis=0)
            kept = tl.where(maximum > reference + RESCALE_ABOVE, maximum, reference)
            total = total * tl.exp(reference - kept) + _exp(z - kept)  # one of a block, one of a row
            reference = kept
        lse = reference + tl.log(tl.sum(total, axis=0))
        loss = lse - (1.0 - label_smoothing) * target + z_loss * lse * lse
        if HAS_SMOOTHING:
            loss -= label_smoothing / V * tl.sum(z_sum, axis=0)
        tl.store(loss_ptr + row, tl.where(in_range, row_weight * loss, float("nan")))
        tl.store(lse_ptr + row, lse)
    else:
        lse = tl.load(lse_ptr + row)

    if WANT_GRADIENT:
        if HAS_UPSTREAM:
            row_weight *= tl.load(upstream_ptr + row * upstream_stride).to(tl.float32)
        probability_weight = row_weight * (1.0 + 2.0 * z_loss * lse)
        spread = row_weight * label_smoothing / V
        last = (tl.cdiv(V, BLOCK) - 1) * BLOCK
        for back in tl.range(0, V, BLOCK, num_stages=STAGES):  # from the end, which was read last and is still in L2
            start = last - back
            mask = start + cols < V
            z = tl.load(logits_ptr + start + cols, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            z = _transform(z, bias_ptr, start + cols, mask, scale, softcap, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP)
            gradient = probability_weight * _exp(z - lse)
            if HAS_SMOOTHING:
                gradient -= spread
            gradient = _through_transform(gradient, z, scale, softcap, HAS_SCALE, HAS_SOFTCAP)
            tl.store(gradient_ptr + start + cols, gradient, mask=mask)
        on_label = probability_weight * tl.exp(target - lse) - spread - row_weight * (1.0 - label_smoothing)
        on_label = _through_transform(on_label, target, scale, softcap, HAS_SCALE, HAS_SOFTCAP)
        tl.debug_barrier()  # after the loop has written there
        tl.store(gradient_ptr + safe_label, on_label, mask=in_range)


@triton.jit
def _accumulate_kernel(
    block_ptr, block_stride, labels_ptr, bias_ptr, reference_ptr, total_ptr, target_ptr, z_total_ptr,
    accumulator_ptr, accumulator_stride, first_column, V_BLOCK, H, scale, softcap, ignore_index,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, FIRST: tl.constexpr,
    WANT_GRADIENT: tl.constexpr, WANT_ENTROPY: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One row of one block of columns: adds to the row's sum of exp(z - reference); writes the terms over the logits.

    The reference is the maximum of the row's first tile. It is kept, so that the product of the terms with the weight can be
    summed over blocks as it is; only when a later logit passes it by RESCALE_ABOVE is everything so far rescaled. The label's own
    term is left out: `_finish_kernel` adds it in fp32, since 1 - p of a confident row would drown in a term rounded to bf16.
    """
    row = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    block_ptr += row * block_stride
    tile = tl.arange(0, BLOCK)
    label = tl.load(labels_ptr + row)
    if label == ignore_index:  # a padding row: its terms must be finite, they enter no sum that is used
        if WANT_GRADIENT:
            zeros = tl.zeros((BLOCK,), tl.float32)
            for start in range(0, V_BLOCK, BLOCK):
                tl.store(block_ptr + start + tile, zeros, mask=start + tile < V_BLOCK)
        return
    local_label = label - first_column
    label_is_here = (local_label >= 0) & (local_label < V_BLOCK)
    if label_is_here:
        # Read before the first reduction, whose barrier keeps any warp from writing a term over it.
        target = tl.load(block_ptr + local_label).to(tl.float32)
        target = _transform(target, bias_ptr, label, True, scale, softcap, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP)
        tl.store(target_ptr + row, target)
    elif FIRST:
        tl.store(target_ptr + row, float("nan"))  # until the label's block comes; for a label outside [0, V) none does
    before = -1e30
    if not FIRST:
        before = tl.load(reference_ptr + row)
    reference = before
    total = tl.zeros((BLOCK,), tl.float32)
    z_total = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, V_BLOCK, BLOCK, num_stages=STAGES):
        cols = start + tile
        mask = cols < V_BLOCK
        z = tl.load(block_ptr + cols, mask=mask, other=float("-inf")).to(tl.float32)
        z = _transform(z, bias_ptr, first_column + cols, mask, scale, softcap, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP)
        maximum = tl.max(z, axis=0)
        kept = tl.where(maximum > reference + RESCALE_ABOVE, maximum, reference)
        if kept > reference:
            ratio = tl.exp(reference - kept)
            total *= ratio
            z_total *= ratio
            if WANT_GRADIENT:
                for done in range(0, start, BLOCK):
                    term = tl.load(block_ptr + done + tile).to(tl.float32)
                    tl.store(block_ptr + done + tile, term * ratio)
        reference = kept
        term = _exp(z - reference)
        total += term
        if WANT_ENTROPY:
            z_total += tl.where(term > 0.0, term * z, 0.0)  # also where z is minus infinity
        if WANT_GRADIENT:
            tl.store(block_ptr + cols, _through_transform(term, z, scale, softcap, HAS_SCALE, HAS_SOFTCAP), mask=mask)

    row_total = tl.sum(total, axis=0)
    row_z_total = tl.sum(z_total, axis=0)
    if not FIRST:
        ratio = tl.exp(before - reference)
        row_total += ratio * tl.load(total_ptr + row)
        if WANT_ENTROPY:
            row_z_total += ratio * tl.load(z_total_ptr + row)
        if WANT_GRADIENT:  # noqa: SIM102 - decided when compiled; the next line is decided on the device
            if reference > before:
                accumulator_ptr += row * accumulator_stride
                for start in range(0, H, BLOCK_H):
                    h = start + tl.arange(0, BLOCK_H)
                    value = tl.load(accumulator_ptr + h, mask=h < H, other=0.0)
                    tl.store(accumulator_ptr + h, value * ratio, mask=h < H)
    tl.store(reference_ptr + row, reference)
    tl.store(total_ptr + row, row_total)
    if WANT_ENTROPY:
        tl.store(z_total_ptr + row, row_z_total)
    if WANT_GRADIENT:
        tl.debug_barrier()  # after the loop has written there
        tl.store(block_ptr + local_label, 0.0, mask=label_is_here)


@triton.jit
def _finish_kernel(
    accumulator_ptr, accumulator_stride, head_ptr, head_stride, gradient_ptr, gradient_stride,
    labels_ptr, weight_ptr, upstream_ptr, reference_ptr, total_ptr, target_ptr, loss_ptr, lse_ptr,
    V, H, scale, softcap, ignore_index, z_loss,
    HAS_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_UPSTREAM: tl.constexpr,
    WANT_GRADIENT: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """After the last block: a row's loss, and its gradient = what was accumulated, and the label's row of the head."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_ptr + row)
    if WANT_GRADIENT:
        gradient_ptr += row * gradient_stride
    if label == ignore_index:
        tl.store(loss_ptr + row, 0.0)
        tl.store(lse_ptr + row, 0.0)
        if WANT_GRADIENT:
            for start in range(0, H, BLOCK_H):
                h = start + tl.arange(0, BLOCK_H)
                tl.store(gradient_ptr + h, tl.zeros((BLOCK_H,), tl.float32), mask=h < H)
        return
    row_weight = 1.0
    if HAS_WEIGHT:
        row_weight = tl.load(weight_ptr + row).to(tl.float32)
    reference = tl.load(reference_ptr + row)
    total = tl.load(total_ptr + row)
    target = tl.load(target_ptr + row)
    lse = reference + tl.log(total)
    tl.store(loss_ptr + row, row_weight * (lse - target + z_loss * lse * lse))
    tl.store(lse_ptr + row, lse)
    if WANT_GRADIENT:
        if HAS_UPSTREAM:
            row_weight *= tl.load(upstream_ptr).to(tl.float32)
        probability_weight = row_weight * (1.0 + 2.0 * z_loss * lse) / total
        on_label = probability_weight * tl.exp(target - reference) - row_weight
        on_label = _through_transform(on_label, target, scale, softcap, HAS_SCALE, HAS_SOFTCAP)
        safe_label = tl.where((label >= 0) & (label < V), label, 0).to(tl.int64)
        accumulator_ptr += row * accumulator_stride
        head_ptr += safe_label * head_stride
        for start in range(0, H, BLOCK_H):
            h = start + tl.arange(0, BLOCK_H)
            others = tl.load(accumulator_ptr + h, mask=h < H, other=0.0)
            wanted = tl.load(head_ptr + h, mask=h < H, other=0.0).to(tl.float32)
            tl.store(gradient_ptr + h, probability_weight * others + on_label * wanted, mask=h < H)


@triton.jit
def _block_gradient_kernel(
    block_ptr, block_stride, labels_ptr, bias_ptr, lse_ptr, entropy_ptr, up_logp_ptr, up_lse_ptr, up_entropy_ptr,
    first_column, V_BLOCK, scale, softcap, ignore_index,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, WANT_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One row of one block of columns, log-sum-exp known: gradient of log-probability, lse and entropy over the logits."""
    row = tl.program_id(0).to(tl.int64)
    block_ptr += row * block_stride
    cols = tl.arange(0, BLOCK)
    mask = cols < V_BLOCK
    label = tl.load(labels_ptr + row)
    if label == ignore_index:
        tl.store(block_ptr + cols, tl.zeros((BLOCK,), tl.float32), mask=mask)
        return
    up_logp = tl.load(up_logp_ptr + row)
    up_lse = tl.load(up_lse_ptr + row)
    z = tl.load(block_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    z = _transform(z, bias_ptr, first_column + cols, mask, scale, softcap, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP)
    logp = z - tl.load(lse_ptr + row)
    probability = _exp(logp)
    gradient = probability * (up_lse - up_logp)
    if WANT_ENTROPY:
        entropy = tl.load(entropy_ptr + row)
        spread = tl.where(probability > 0.0, probability * (logp + entropy), 0.0)
        gradient -= tl.load(up_entropy_ptr + row) * spread
    gradient = tl.where(first_column + cols == label, gradient + up_logp, gradient)
    tl.store(block_ptr + cols, _through_transform(gradient, z, scale, softcap, HAS_SCALE, HAS_SOFTCAP), mask=mask)


def rows_loss(
    logits: Tensor, labels: Tensor, *, bias: Tensor | None, token_weight: Tensor | None, scale: float, softcap: float,
    ignore_index: int, label_smoothing: float, z_loss: float, gradient: Tensor | None = None,
    upstream: Tensor | None = None, lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch `_rows_kernel`: (loss, lse) of each row; `gradient` (M, V), which may be `logits` itself, is filled if given.

    With `lse` the loss is not computed again; with `upstream` (M,) row i of the gradient is multiplied by its element i.
    """
    num_rows, V = logits.shape
    want_loss = lse is None
    loss = logits.new_empty(num_rows if want_loss else 0, dtype=torch.float32)
    if lse is None:
        lse = torch.empty_like(loss)
    if num_rows == 0:
        return loss, lse
    target = logits if gradient is None else gradient
    with launch.on_device_of(logits):
        _rows_kernel[(num_rows,)](
            logits, logits.stride(0), target, target.stride(0),
            labels, bias, token_weight, upstream, 0 if upstream is None else upstream.stride(0), loss, lse,
            V, scale, softcap, ignore_index, label_smoothing, z_loss,
            HAS_BIAS=bias is not None, HAS_SCALE=scale != 1.0, HAS_SOFTCAP=softcap != 0.0, HAS_WEIGHT=token_weight is not None,
            HAS_SMOOTHING=label_smoothing != 0.0, HAS_UPSTREAM=upstream is not None, WANT_LOSS=want_loss, WANT_GRADIENT=gradient is not None,
            BLOCK=launch.power_of_two(V, most=ROW_BLOCK), STAGES=ROW_STAGES, num_warps=ROW_WARPS,
        )  # fmt: skip
    return loss, lse


@torch.library.custom_op("rft::cross_entropy", mutates_args=())
def _cross_entropy(
    logits: Tensor, labels: Tensor, token_weight: Tensor | None, scale: float, softcap: float, ignore_index: int,
    label_smoothing: float, z_loss: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return rows_loss(
        logits, labels, bias=None, token_weight=token_weight, scale=scale, softcap=softcap, ignore_index=ignore_index,
        label_smoothing=label_smoothing, z_loss=z_loss,
    )  # fmt: skip


@_cross_entropy.register_fake
def _(logits, labels, token_weight, scale, softcap, ignore_index, label_smoothing, z_loss):
    rows = logits.new_empty(logits.shape[0], dtype=torch.float32)
    return rows, torch.empty_like(rows)


@torch.library.custom_op("rft::cross_entropy_backward", mutates_args=())
def _cross_entropy_backward(
    upstream: Tensor, logits: Tensor, labels: Tensor, token_weight: Tensor | None, lse: Tensor, scale: float,
    softcap: float, ignore_index: int, label_smoothing: float, z_loss: float,
) -> Tensor:  # fmt: skip
    gradient = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    rows_loss(
        logits, labels, bias=None, token_weight=token_weight, scale=scale, softcap=softcap, ignore_index=ignore_index,
        label_smoothing=label_smoothing, z_loss=z_loss, gradient=gradient, upstream=upstream, lse=lse,
    )  # fmt: skip
    return gradient


@_cross_entropy_backward.register_fake
def _(upstream, logits, labels, token_weight, lse, scale, softcap, ignore_index, label_smoothing, z_loss):
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def _save(ctx, inputs, output):
    logits, labels, token_weight, *ctx.options = inputs
    ctx.save_for_backward(logits, labels, token_weight, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_loss, _grad_lse):
    if grad_loss is None:
        return (None,) * 8
    logits, labels, token_weight, lse = ctx.saved_tensors
    gradient = _cross_entropy_backward(grad_loss, logits, labels, token_weight, lse, *ctx.options)
    return (gradient, *(None,) * 7)


_cross_entropy.register_autograd(_backward, setup_context=_save)


def check_scale(op: str, scale: float) -> None:
    """A column past the last is minus infinity, which has to stay so."""
    if not scale > 0:
        raise ValueError(f"{op}: scale {scale} is not positive")


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    token_weight: Tensor | None = None,
    scale: float = 1.0,
    softcap: float = 0.0,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Loss of each row, fp32 (...,). logits: (..., V), any float dtype and row stride; labels, token_weight: (...,).

    Reads the logits once forward and once backward and keeps nothing but them and a number per row. Sum or average the rows
    outside: a row may have its own upstream gradient. `softcap = 0` is none.
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"cross_entropy: logits {tuple(logits.shape)} need labels {tuple(logits.shape[:-1])}, got {tuple(labels.shape)}"
        )
    check_scale("cross_entropy", scale)
    if token_weight is not None and token_weight.shape != labels.shape:
        raise ValueError(
            f"cross_entropy: token_weight {tuple(token_weight.shape)} is not shaped as labels {tuple(labels.shape)}"
        )
    weight = None if token_weight is None else token_weight.detach().reshape(-1).contiguous()
    loss, _ = _cross_entropy(
        launch.as_rows(logits), labels.reshape(-1).contiguous(), weight, scale, softcap, ignore_index, label_smoothing, z_loss,
    )  # fmt: skip
    return loss.view(labels.shape)
