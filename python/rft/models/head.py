"""The loss head: hidden states and labels -> loss sums, with the logits of a few rows at a time and none for rows without a label.

Legend: T tokens, N labelled tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from rft.closeness import relative_error
from rft.errors import Refused

# Bytes of fp32 logits that exist at one time under `chunk_rows = "auto"`: below 512 rows the matmuls of a large
# vocabulary lose speed on a GPU; a CPU's caches do not care.
_CHUNK_BYTES = {"cuda": 1 << 29, "cpu": 1 << 26}


def auto_chunk_rows(
    device_type: str, vocabulary: int, *, kernels: bool = False, head_trained: bool = False, itemsize: int = 2
) -> int:
    """Rows of logits at a time under `chunk_rows = "auto"`."""
    if kernels:
        from rft.kernels.linear_cross_entropy import fast_rows

        return fast_rows(vocabulary, itemsize, whole_rows=head_trained)
    return max(64, _CHUNK_BYTES.get(device_type, _CHUNK_BYTES["cpu"]) // (4 * vocabulary))


@dataclass(frozen=True)
class LogitTransform:
    """What the causal LM does to its head's output: cap * tanh(scale * z / cap), without the cap where it is None."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def describe(self) -> str:
        parts = [f"scale {self.scale:g}"] if self.scale != 1.0 else []
        parts += [f"soft-cap {self.softcap:g}"] if self.softcap is not None else []
        return ", ".join(parts) or "none"


class Head:
    """Loss sums from hidden states, through the model's own output embeddings.

    Not an nn.Module: it looks at the model's head without owning it, so that parameter names do not change. Call it
    inside the trainee's forward only, where sharded parameters are whole.
    """

    def __init__(
        self,
        model: Any,
        transform: LogitTransform | None = None,
        *,
        chunk_rows: int | Literal["auto", "least"] = "auto",
        kernels: bool = False,
    ):
        """kernels: through linear_cross_entropy where the head is one plain weight; `why_not_kernel` says where it is not."""
        self.module: nn.Module = model.get_output_embeddings()
        if self.module is None:
            raise Refused(type(model).__name__, "it has no output head", wanted="a causal language model")
        self.transform = transform or LogitTransform()
        self._chunk_rows = chunk_rows
        self._kernels = kernels
        self._row_index: Tensor | None = None

    def loss_sums(
        self, hidden_TD: Tensor, labels: Tensor, weights: Tensor | None = None, *, num_label_tokens: int | None = None
    ) -> dict[str, Tensor]:
        """{"next_token": sum over labelled tokens of weight * cross entropy}, fp32 scalar.

        labels: i64 of T elements, already shifted, -100 = none. weights: f32 of T elements or None (1 each).
        num_label_tokens: number of labels that are not -100; without it the host waits for the device to count them.
        """
        labels = labels.reshape(-1)
        plain = self._plain_weight()
        if self._kernels and plain is not None and plain[1] is None:
            return {"next_token": self._through_kernel(hidden_TD, plain[0], labels, weights, num_label_tokens)}
        index = labelled_rows(labels, num_label_tokens)
        hidden_ND, targets = hidden_TD.index_select(0, index), labels.index_select(0, index)
        chosen = None if weights is None else weights.reshape(-1).index_select(0, index)
        if plain is None:
            return {"next_token": self._through_module(hidden_ND, targets, chosen)}
        weight, rows, row_index = plain
        chunk = self._rows_at_a_time(hidden_ND, weight.shape[0])
        total = _ChunkedCrossEntropy.apply(
            hidden_ND, weight, rows, row_index, targets, chosen, self.transform, chunk, torch.is_grad_enabled()
        )
        return {"next_token": total}

    def _through_kernel(
        self, hidden_TD: Tensor, weight: Tensor, labels: Tensor, weights: Tensor | None, count: int | None
    ) -> Tensor:
        from rft.kernels.linear_cross_entropy import linear_cross_entropy

        return linear_cross_entropy(
            hidden_TD, weight, labels, token_weight=None if weights is None else weights.reshape(-1), reduction="sum",
            scale=self.transform.scale, softcap=self.transform.softcap or 0.0, num_labels=count, chunk_rows=self._chunk_rows,
        )  # fmt: skip

    def why_not_kernel(self) -> str | None:
        """Why the kernel cannot serve this head, or None."""
        plain = self._plain_weight()
        if plain is None:
            return "the head is more than one plain weight"
        if plain[1] is not None:
            return "some of the head's rows are trained and the others frozen"
        return None if self.transform.scale > 0 else f"its logits are scaled by {self.transform.scale:g}"

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits [..., V] of hidden states [..., D]: for a few rows, when the logits themselves are wanted."""
        return self.transform(self.module(hidden).float())

    def set_chunk_rows(self, rows: int | Literal["least"]) -> None:
        """Rows of logits at a time from now on."""
        self._chunk_rows = rows

    def _rows_at_a_time(self, hidden: Tensor, vocabulary: int) -> int:
        if self._chunk_rows == "least":
            return 64
        if self._chunk_rows != "auto":
            return self._chunk_rows
        return auto_chunk_rows(hidden.device.type, vocabulary)

    def _plain_weight(self) -> tuple[Tensor, Tensor | None, Tensor | None] | None:
        """(weight, rows that stand in for some of its rows, their indices), or None where only the module itself knows."""
        module: Any = self.module
        rows = index = None
        active: Any = getattr(module, "active_adapters", None)
        disabled = getattr(module, "disable_adapters", False)
        if hasattr(module, "token_adapter"):  # PEFT: trained rows of a frozen head
            layer = module.token_adapter
            if layer.merged or len(active or ()) != 1:
                return None
            base = layer.base_layer
            if not disabled:
                rows = layer.trainable_tokens_delta[active[0]]
                index = self._indices(layer.token_indices[active[0]], base.weight.device)
            module = base
        elif hasattr(module, "modules_to_save"):  # PEFT: a trained copy of the head
            if len(active or ()) != 1:
                return None
            module = module.original_module if disabled else module.modules_to_save[active[0]]
        if type(module) is not nn.Linear or module.bias is not None:
            return None
        return module.weight, rows, index

    def _indices(self, rows: list[int], device: torch.device) -> Tensor:
        """The trained rows' numbers on the device, copied there once."""
        if self._row_index is None or self._row_index.device != device:
            self._row_index = torch.tensor(rows, device=device)
        return self._row_index

    def _through_module(self, hidden_ND: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        """Any head (LoRA on it, a bias): chunks whose logits are computed again in the backward."""
        vocabulary = getattr(self.module, "out_features", None) or 1 << 17
        chunk = self._rows_at_a_time(hidden_ND, vocabulary)
        # an empty chunk still runs, so that a filler batch gives every trained tensor a (zero) gradient
        starts = range(0, max(hidden_ND.shape[0], 1), chunk)

        def sum_of(start: int) -> Tensor:
            rows = slice(start, start + chunk)
            each = F.cross_entropy(self.logits(hidden_ND[rows]), targets[rows], reduction="none")
            return (each if weights is None else each * weights[rows]).sum()

        sums = [checkpoint(sum_of, start, use_reentrant=False) for start in starts]
        return torch.stack(sums).sum()


def labelled_rows(labels: Tensor, count: int | None) -> Tensor:
    """Indices of the labels that are not -100, in order. With `count` known the host does not wait for the device."""
    kept = labels != -100
    if count is None:
        return kept.nonzero().squeeze(1)
    # each kept row writes its own number at its rank; the others write to a slot that is cut off
    place = torch.where(kept, kept.cumsum(0) - 1, count)
    rows = torch.arange(labels.numel(), device=labels.device)
    return torch.zeros(count + 1, dtype=torch.int64, device=labels.device).scatter_(0, place, rows)[:count]


def compare_kernel(transform: LogitTransform, device: torch.device) -> dict[str, float]:
    """Largest relative errors of the kernel against plain torch on this device, with the model's own transform, in fp32: the loss and
    the gradients of a frozen and of a trained head of 1,031 tokens, some rows without a label."""
    from rft.kernels.linear_cross_entropy import linear_cross_entropy

    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 64, generator=generator).to(device) for n in (45, 1031))
    labels = torch.randint(0, 1031, (45,), generator=generator).to(device)
    labels[::3] = -100
    kept = labels != -100

    def run(kernel: bool, trained: bool) -> list[Tensor]:
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_(trained)
        if kernel:
            total = linear_cross_entropy(
                h, w, labels, scale=transform.scale, softcap=transform.softcap or 0.0, reduction="sum", num_labels=30
            )
        else:
            total = F.cross_entropy(transform((h @ w.T).float())[kept], labels[kept], reduction="sum")
        total.backward()
        return [total.detach(), *(t.grad for t in (h, w) if t.grad is not None)]

    found: dict[str, float] = {}
    with torch.enable_grad():
        for trained in (False, True):
            names = [
                f"fp32 {'trained' if trained else 'frozen'} {n}" for n in ("loss", "hidden gradient", "weight gradient")
            ]
            for name, own, plain in zip(names, run(True, trained), run(False, trained), strict=False):
                found[name] = relative_error(own, plain)
    return found


KERNEL_ALLOWED = 1e-5


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of weighted cross entropies. Gradients are made with the logits at hand, in the forward: nothing is computed twice."""

    @staticmethod
    def forward(ctx, hidden, weight, rows, row_index, targets, token_weights, transform, chunk, with_grad):
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        needs = [with_grad and n for n in ctx.needs_input_grad[:3]]
        with torch.autocast(device, enabled=False):
            grads = _Gradients(hidden, weight, rows, needs)
            total = _sum_chunks(
                hidden,
                weight.to(dtype),
                None if rows is None else rows.to(dtype),
                row_index,
                targets,
                token_weights,
                transform,
                chunk,
                grads,
            )
        ctx.grads = grads
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        g = ctx.grads
        hidden, weight, rows = (
            None if t is None else (t * grad).to(d) for t, d in zip(g.tensors(), g.dtypes, strict=True)
        )
        return hidden, weight, rows, None, None, None, None, None, None


class _Gradients:
    """Buffers of the gradients that are wanted; those of weights add up in fp32."""

    def __init__(self, hidden: Tensor, weight: Tensor, rows: Tensor | None, needs: list[bool]):
        self.hidden = torch.empty_like(hidden) if needs[0] else None
        self.weight = torch.zeros_like(weight, dtype=torch.float32) if needs[1] else None
        self.rows = torch.zeros_like(rows, dtype=torch.float32) if rows is not None and needs[2] else None
        self.dtypes = (hidden.dtype, weight.dtype, hidden.dtype if rows is None else rows.dtype)

    def tensors(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return self.hidden, self.weight, self.rows

    @property
    def any(self) -> bool:
        return any(t is not None for t in self.tensors())


def _sum_chunks(hidden, weight, rows, row_index, targets, token_weights, transform, chunk, grads) -> Tensor:
    """weight, rows: in the type of the computation."""
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    for start in range(0, hidden.shape[0], chunk):
        stop = min(start + chunk, hidden.shape[0])
        h, target = hidden[start:stop].to(weight.dtype), targets[start:stop, None]
        logits = (h @ weight.T).float()
        if rows is not None:
            logits.index_copy_(1, row_index, (h @ rows.T).float())
        if transform.scale != 1.0:
            logits.mul_(transform.scale)
        capped = None
        if transform.softcap is not None:
            capped = torch.tanh_(logits.div_(transform.softcap))
            logits = capped * transform.softcap
        norm = torch.logsumexp(logits, dim=1, keepdim=True)
        losses = norm - logits.gather(1, target)
        each = None if token_weights is None else token_weights[start:stop, None]
        total += (losses if each is None else losses * each).sum()
        if grads.any:
            slope = logits.sub_(norm).exp_()
            slope.scatter_add_(1, target, torch.full_like(losses, -1.0))
            if each is not None:
                slope.mul_(each)
            if capped is not None:
                slope.mul_(1 - capped.square_())
            if transform.scale != 1.0:
                slope.mul_(transform.scale)
            _add_gradients(grads, slice(start, stop), h, slope.to(weight.dtype), weight, rows, row_index)
    return total


def _add_gradients(
    grads: _Gradients,
    part: slice,
    h: Tensor,
    slope: Tensor,
    weight: Tensor,
    rows: Tensor | None,
    row_index: Any,
) -> None:
    """slope: d loss / d logits before the transform, [chunk, V] in the type of the computation."""
    if rows is not None:
        own = slope.index_select(1, row_index)
        if grads.rows is not None:
            grads.rows += own.T @ h
        slope = slope.index_fill(1, row_index, 0)  # the frozen rows behind them get nothing
    if grads.hidden is not None:
        back = slope @ weight
        grads.hidden[part] = back if rows is None else back + own @ rows
    if grads.weight is not None:
        grads.weight += slope.T @ h
