"""Log-probability of each label, log-sum-exp and entropy from hidden states; the logits never exist whole.

M rows, H hidden size, V vocabulary. The forward pass keeps a few numbers per row; the backward pass makes each block of logits
again (8 M H V operations in all against the 6 of linear_cross_entropy.py), and so takes any upstream gradient per row: the op
under preference losses, distillation and per-token losses. With the weight trained its gradient comes block by block, complete
and without a second buffer, which makes this also the way to train a head in the least memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rft.kernels import cross_entropy as rows
from rft.kernels import launch
from rft.kernels.logit_blocks import RowState, add_product, compact_labels, labelled_rows, matching_dtypes

FORWARD_ROWS = 2048
FORWARD_COLUMNS = 8192
BLOCK_BYTES = 128 << 20
"""Logits of one block of columns over all rows, backward."""


def linear_logprob_reference(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, scale: float = 1.0, softcap: float = 0.0,
    ignore_index: int = -100,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(log-probability of the label, log-sum-exp, entropy) of each row in plain torch and fp32; 0 where there is no label."""
    z = (hidden.float() @ weight.float().t() + (0.0 if bias is None else bias.float())) * scale
    if softcap:
        z = softcap * torch.tanh(z / softcap)
    logp = torch.log_softmax(z, -1)
    labelled = labels != ignore_index
    target = logp.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    parts = (target, torch.logsumexp(z, -1), -(logp.exp() * logp).sum(-1))
    return tuple(torch.where(labelled, part, 0.0) for part in parts)  # type: ignore[return-value]


@torch.library.custom_op("rft::linear_logprob", mutates_args=())
def _linear_logprob(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, scale: float, softcap: float, ignore_index: int,
    want_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    M, V = hidden.shape[0], weight.shape[0]
    logp = hidden.new_zeros(M, dtype=torch.float32)  # separate storage: outputs of an op may not share any
    lse = torch.zeros_like(logp)
    entropy = hidden.new_zeros(M if want_entropy else 0, dtype=torch.float32)
    chunk, columns = min(FORWARD_ROWS, max(M, 1)), min(FORWARD_COLUMNS, V)
    buffer = hidden.new_empty(chunk, columns)
    state = RowState(hidden, chunk, want_entropy)
    for start in range(0, M, chunk):
        stop = min(start + chunk, M)
        n = stop - start
        for column in range(0, V, columns):
            head = weight[column : column + columns]
            block = buffer[:n, : head.shape[0]]
            torch.mm(hidden[start:stop], head.t(), out=block)
            state.add_block(
                block,
                labels[start:stop],
                bias,
                None,
                first_column=column,
                scale=scale,
                softcap=softcap,
                ignore_index=ignore_index,
            )
        labelled = labels[start:stop] != ignore_index
        row_lse = state.reference[:n] + state.total[:n].log()
        lse[start:stop] = torch.where(labelled, row_lse, 0.0)
        logp[start:stop] = torch.where(labelled, state.target[:n] - row_lse, 0.0)
        if state.z_total is not None:
            entropy[start:stop] = torch.where(labelled, row_lse - state.z_total[:n] / state.total[:n], 0.0)
    return logp, lse, entropy


@_linear_logprob.register_fake
def _(hidden, weight, labels, bias, scale, softcap, ignore_index, want_entropy):
    M = hidden.shape[0]
    logp = hidden.new_empty(M, dtype=torch.float32)
    return logp, torch.empty_like(logp), hidden.new_empty(M if want_entropy else 0, dtype=torch.float32)


@torch.library.custom_op("rft::linear_logprob_backward", mutates_args=())
def _linear_logprob_backward(
    up_logp: Tensor, up_lse: Tensor, up_entropy: Tensor | None, hidden: Tensor, weight: Tensor, labels: Tensor,
    bias: Tensor | None, lse: Tensor, entropy: Tensor, scale: float, softcap: float, ignore_index: int,
    need_hidden: bool, need_weight: bool, need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    M, (V, H) = hidden.shape[0], weight.shape
    d_hidden = hidden.new_empty(M if need_hidden else 0, H)
    d_weight = weight.new_zeros(V, H) if need_weight and not M else weight.new_empty(V if need_weight else 0, H)
    d_bias = weight.new_zeros(V if need_bias else 0)
    # A frozen head lets chunks of rows be outermost, so that the fp32 sum of d_hidden is one chunk's.
    chunk = max(M, 1) if need_weight or need_bias else min(FORWARD_ROWS, max(M, 1))
    columns = min(V, max(1024, min(FORWARD_COLUMNS, BLOCK_BYTES // (chunk * hidden.element_size())) // 256 * 256))
    buffer = hidden.new_empty(chunk, columns)
    total = hidden.new_empty(chunk if need_hidden else 0, H, dtype=torch.float32)
    BLOCK = launch.power_of_two(columns, most=1 << 17)
    for start in range(0, M, chunk):
        stop = min(start + chunk, M)
        x = hidden[start:stop]
        for column in range(0, V, columns):
            head = weight[column : column + columns]
            block = buffer[: stop - start, : head.shape[0]]
            torch.mm(x, head.t(), out=block)
            with launch.on_device_of(hidden):
                rows._block_gradient_kernel[(stop - start,)](
                    block, block.stride(0), labels[start:stop], bias, lse[start:stop], entropy[start:stop],
                    up_logp[start:stop], up_lse[start:stop], None if up_entropy is None else up_entropy[start:stop],
                    column, block.shape[1], scale, softcap, ignore_index,
                    HAS_BIAS=bias is not None, HAS_SCALE=scale != 1.0, HAS_SOFTCAP=softcap != 0.0, WANT_ENTROPY=up_entropy is not None,
                    BLOCK=BLOCK, num_warps=max(4, min(16, BLOCK // 1024)),
                )  # fmt: skip
            if need_hidden:
                add_product(total[: stop - start], block, head, first=column == 0)
            if need_weight:
                torch.mm(block.t(), x, out=d_weight[column : column + columns])
            if need_bias:
                d_bias[column : column + columns] = block.sum(0, dtype=torch.float32)
        if need_hidden:
            d_hidden[start:stop] = total[: stop - start]
    return d_hidden, d_weight, d_bias


@_linear_logprob_backward.register_fake
def _(up_logp, up_lse, up_entropy, hidden, weight, labels, bias, lse, entropy, scale, softcap, ignore_index, *needs):
    need_hidden, need_weight, need_bias = needs
    M, (V, H) = hidden.shape[0], weight.shape
    return (
        hidden.new_empty(M if need_hidden else 0, H),
        weight.new_empty(V if need_weight else 0, H),
        weight.new_empty(V if need_bias else 0),
    )


def _save(ctx, inputs, output):
    hidden, weight, labels, bias, *ctx.options, ctx.want_entropy = inputs
    _, lse, entropy = output
    ctx.save_for_backward(hidden, weight, labels, bias, lse, entropy)
    ctx.set_materialize_grads(False)


def _backward(ctx, up_logp, up_lse, up_entropy):
    hidden, weight, labels, bias, lse, entropy = ctx.saved_tensors
    zeros = torch.zeros_like(lse) if up_logp is None or up_lse is None else None
    needs = ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[3]
    grads = _linear_logprob_backward(
        zeros if up_logp is None else up_logp.contiguous(), zeros if up_lse is None else up_lse.contiguous(),
        up_entropy.contiguous() if ctx.want_entropy and up_entropy is not None else None,
        hidden, weight, labels, bias, lse, entropy, *ctx.options, *needs,
    )  # fmt: skip
    d_hidden, d_weight, d_bias = (grad if need else None for grad, need in zip(grads, needs, strict=True))
    return d_hidden, d_weight, None, d_bias, None, None, None, None


_linear_logprob.register_autograd(_backward, setup_context=_save)


def _put_back(part: Tensor, slots: Tensor, overflow: Tensor) -> Tensor:
    """Row i is element slots[i] of part, 0 where that is -1; all NaN on overflow."""
    padded = torch.cat([part, part.new_zeros(1)])
    return torch.where(overflow, float("nan"), padded[slots])


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float = 0.0,
    ignore_index: int = -100,
    num_labels: int | None = None,
    want_entropy: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(log-probability of the label, log-sum-exp, entropy or None) of each row, fp32, shaped as labels; each differentiable.

    hidden: (..., H); weight: (V, H); labels: (...,), `ignore_index` = none (all three are 0 there); bias: (V,).
    num_labels: how many labels are not `ignore_index`, if the caller knows; then rows without one cost nothing, and more labels
    than it says make everything NaN. A label outside [0, V) gives NaN. `softcap = 0` is none.
    """
    rows.check_scale("linear_logprob", scale)
    hidden, weight, bias = matching_dtypes("linear_logprob", hidden, weight, labels, bias)
    size = labelled_rows(labels.numel(), num_labels)
    if size < labels.numel():
        flat = labels.reshape(-1)
        index, slots, overflow = compact_labels(flat, ignore_index, size)
        kept = torch.where((index >= 0)[:, None], hidden.reshape(-1, hidden.shape[-1])[index.clamp(min=0)], 0)
        parts = linear_logprob(
            kept, weight, torch.where(index < 0, ignore_index, flat[index.clamp(min=0)]), bias=bias, scale=scale,
            softcap=softcap, ignore_index=ignore_index, want_entropy=want_entropy,
        )  # fmt: skip
        logp, lse, entropy = (
            None if part is None else _put_back(part, slots, overflow).view(labels.shape) for part in parts
        )
        assert logp is not None
        assert lse is not None
        return logp, lse, entropy
    logp, lse, entropy = _linear_logprob(
        launch.as_rows(hidden), launch.with_unit_columns(weight), labels.reshape(-1).contiguous(), bias, scale, softcap,
        ignore_index, want_entropy,
    )  # fmt: skip
    return logp.view(labels.shape), lse.view(labels.shape), entropy.view(labels.shape) if want_entropy else None
