"""Forward and backward of a micro-batch as a CUDA graph: captured once for each shape, replayed for every batch of that shape.

A micro-batch of a small model, or of few tokens, takes as long as the host takes to launch its kernels; a graph is launched at once. Packs
have one length already. What else a batch has is filled up, so that few shapes occur: empty documents behind the last one, a bound for the
longest, a bound for the labelled rows (those beyond are ignored). T tokens.

A shape's first batch runs filled up but launched one by one, so that every kernel is compiled; with its second the graph is captured.
The first graph is compared with both of those batches as they came, neither filled up nor captured: loss, and every gradient. The yardstick
for a gradient is what rounding alone does to it, found by computing it twice. What cannot be captured, or differs, goes on without, and says so.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rft.closeness import relative_error
from rft.data.batch import Batch

DOCUMENTS = 32
"""Documents are filled up to a multiple of this: an empty one costs attention one look at its borders."""
LABEL_PARTS = 8
"""Labelled rows are filled up to a multiple of T over this: at most an eighth of the loss is computed for nothing."""
MOST_SHAPES = 12
"""Graphs of one run. They share their memory; each costs the time of its capture, and some MiB of launches."""
BY_BORDERS = ("fa4", "varlen")
"""Backends of attention that read the documents' borders on the device, and nothing but a bound of their lengths on the host."""
ALLOWED = 1e-2
"""Relative error of the loss, and of each gradient beyond what rounding does to it."""
NOISE_FACTOR = 3.0
"""So many times what rounding alone does to a gradient is allowed besides. A gradient that is wrong is off by about 1."""
OTHER_SCALE = 1.25
"""The loss times this, and the gradients divided by it: nothing changes but every rounding of the backward pass. No power of two."""


class Shape(NamedTuple):
    """What a graph is fixed to."""

    tokens: int
    documents: int
    longest: int
    labels: int
    weighted: bool


def shape_of(batch: Batch) -> Shape:
    """Of the filled-up batch."""
    T = batch.input_ids.shape[1]
    part = -(-T // LABEL_PARTS)
    return Shape(
        tokens=T,
        documents=-(-len(batch.lengths) // DOCUMENTS) * DOCUMENTS,
        longest=min(1 << (batch.max_length - 1).bit_length(), T),
        labels=min(T, max(1, -(-batch.num_label_tokens // part)) * part),
        weighted=batch.weights is not None,
    )


class _Inputs:
    """Tensors that stay where they are: a graph reads them, every batch is copied into them."""

    def __init__(self, shape: Shape, terms: tuple[str, ...], device: torch.device):
        T = shape.tokens
        self.shape = shape
        self.ids, self.labels, self.positions = (torch.zeros(1, T, dtype=torch.int64, device=device) for _ in range(3))
        self.ends = torch.zeros(shape.documents + 1, dtype=torch.int32, device=device)
        self.weights = torch.zeros(1, T, device=device) if shape.weighted else None
        self.shares = {term: torch.zeros((), device=device) for term in terms}

    def fill(self, batch: Batch, counts: Mapping[str, float]) -> None:
        self.ids.copy_(batch.input_ids)
        self.labels.copy_(batch.labels)
        self.positions.copy_(batch.position_ids)
        number = batch.cu_seqlens.numel()
        self.ends[:number].copy_(batch.cu_seqlens)
        self.ends[number:].fill_(self.shape.tokens)
        if self.weights is not None and batch.weights is not None:
            self.weights.copy_(batch.weights)
        for term, share in _shares(counts, tuple(self.shares)).items():
            self.shares[term].fill_(share)

    def batch(self) -> Batch:
        """A new one each time: what a batch makes of its tensors, and keeps, has to be made inside the graph."""
        T, longest = self.shape.tokens, self.shape.longest
        whole, rest = divmod(T, longest)
        lengths = (longest,) * whole + ((rest,) if rest else ())
        return Batch(
            self.ids, self.labels, self.positions, self.ends, self.weights,
            lengths=lengths, pack_tokens=(T,), num_tokens=T, num_label_tokens=self.shape.labels, label_weight=float(self.shape.labels),
        )  # fmt: skip


class Outcome(NamedTuple):
    """Of a micro-batch: normalised terms, and the gradient of each trained parameter that has one."""

    terms: dict[str, Tensor]
    gradients: dict[nn.Parameter, Tensor]


@dataclass
class _Graph:
    graph: Any
    inputs: _Inputs
    outcome: Outcome
    """Written anew by each replay."""


@dataclass
class _Seen:
    """A shape's first batch, kept until its second comes."""

    inputs: _Inputs
    first: tuple[Batch, dict[str, float]] | None = None
    """To compare with, too. Not what it gave: the weights have moved on by then."""


def _shares(counts: Mapping[str, float], terms: tuple[str, ...]) -> dict[str, Tensor | float]:
    """What each term is multiplied by. A term that no token of the whole step has is 0, and so is its gradient."""
    return {term: 1.0 / (counts[term] or 1.0) for term in terms}


def _relative(
    own: Mapping[nn.Parameter, Tensor], truth: Mapping[nn.Parameter, Tensor], scale: float = 1.0
) -> dict[nn.Parameter, float]:
    """Error of each gradient over its norm; own: times `scale`. A gradient that is 0 has to be 0. Waits for the device once."""
    tiny = torch.finfo(torch.float32).tiny
    errors = []
    for parameter, gradient in truth.items():
        wanted, found = gradient.float(), own.get(parameter)
        off = wanted if found is None else found.float() / scale - wanted
        errors.append(off.norm() / wanted.norm().clamp_min(tiny))
    return dict(zip(truth, torch.stack(errors).tolist(), strict=True)) if errors else {}


def _worst(errors: list[float]) -> float:
    """The largest; NaN if one is."""
    return next((e for e in errors if e != e), max(errors, default=0.0))


@dataclass
class MicroBatchGraphs:
    """Runs micro-batches of `trainee`, adding to `.grad` of its trained parameters as a backward does.

    terms: names of the loss terms. tell: called once with (largest relative errors by name, None), or with (None, why there is no graph).
    compare: whether the first graph is compared; not where dropout draws anew.
    """

    trainee: Callable[[Batch], dict[str, Tensor]]
    parameters: list[nn.Parameter]
    terms: tuple[str, ...]
    device: torch.device
    tell: Callable[[dict[str, float] | None, str | None], None] = lambda checked, why: None
    compare: bool = True
    off: bool = False
    replays: int = 0
    _graphs: dict[Shape, _Graph] = field(default_factory=dict)
    _seen: dict[Shape, _Seen] = field(default_factory=dict)
    _pool: Any = None
    _lent: bool = False
    """Whether `.grad` is what a graph writes to."""

    def __call__(self, batch: Batch, counts: Mapping[str, float]) -> dict[str, Tensor]:
        """The normalised terms, detached. counts: denominator of each term."""
        if self.off:
            return self._launched(batch, _shares(counts, self.terms))
        shape = shape_of(batch)
        made = self._graphs.get(shape)
        if made is not None:
            made.inputs.fill(batch, counts)
            return self._replay(made)
        seen = self._seen.get(shape)
        if seen is None:
            seen = self._seen[shape] = _Seen(_Inputs(shape, self.terms, self.device))
            if self.compare and not self._graphs:
                seen.first = (batch, dict(counts))
        elif len(self._graphs) < MOST_SHAPES:
            made = self._made(seen, batch, counts)
            if made is None:
                return self._launched(batch, _shares(counts, self.terms))
            self._graphs[shape] = made
        seen.inputs.fill(batch, counts)
        return self._launched(seen.inputs.batch(), seen.inputs.shares)

    def _launched(self, batch: Batch, shares: Mapping[str, Tensor | float]) -> dict[str, Tensor]:
        """Without a graph. What it takes is beside what the graphs hold: where there is no room for both, they go."""
        before = self._take_gradients()
        try:
            outcome = self._eager(batch, shares)
        except torch.OutOfMemoryError:
            if not self._graphs:
                raise
            outcome = None  # outside of this block: the error holds the tensors of its frames
        if outcome is None:
            self._take_gradients()
            self._give_up("there is no memory for a batch of another shape beside the graphs")
            outcome = self._eager(batch, shares)
        self._add(before, outcome.gradients, lent=False)
        return outcome.terms

    def _eager(self, batch: Batch, shares: Mapping[str, Tensor | float]) -> Outcome:
        """Forward and backward with no gradient there yet: what is found afterwards is this batch's."""
        terms = {term: value * shares[term] for term, value in self.trainee(batch).items()}
        torch.stack(list(terms.values())).sum().backward()
        found = {p: p.grad for p in self.parameters if p.grad is not None}
        return Outcome({term: value.detach() for term, value in terms.items()}, found)

    def _truth(self, batch: Batch, counts: Mapping[str, float], scale: float = 1.0) -> Outcome:
        """Of the batch as it came, its loss times `scale`. `.grad` is left as it was."""
        before = self._take_gradients()
        try:
            shares = {term: share * scale for term, share in _shares(counts, self.terms).items()}
            return self._eager(batch, shares)
        finally:
            self._take_gradients()
            self._add(before, {}, lent=False)

    def _made(self, seen: _Seen, batch: Batch, counts: Mapping[str, float]) -> _Graph | None:
        """The graph of a shape; None, once and for all, where there can be none."""
        errors, beyond = {}, 0.0
        try:
            truths, noise = [], {}
            if seen.first is not None:
                # before the capture: what they take is not beside what the graph holds
                truths = [
                    ("batch", (batch, counts), self._truth(batch, counts)),
                    ("other batch", seen.first, self._truth(*seen.first)),
                ]
                noise = self._noise(batch, counts, truths[0][-1])
                errors["rounding"] = max(noise.values(), default=0.0)
            made = self._graph_of(seen, batch, counts)
            for name, given, truth in truths:
                made.inputs.fill(*given)
                errors[f"{name} loss"], errors[f"{name} gradient"], over = self._error(made, truth, noise)
                beyond = _worst([beyond, errors[f"{name} loss"], over])
        except RuntimeError as error:  # whatever CUDA says of what may not be captured, or no memory
            self._give_up(f"it cannot be captured: {' '.join(str(error).split())[:200]}")
            return None
        seen.first = None
        if not beyond <= ALLOWED:
            by = f"{beyond:.1e} more than rounding does (allowed {ALLOWED:g})"
            self._give_up(f"it differs from the same batch without a graph by {by}")
            return None
        if not self._graphs:
            self.tell(errors, None)
        return made

    def _graph_of(self, seen: _Seen, batch: Batch, counts: Mapping[str, float]) -> _Graph:
        """Captured with this batch in its inputs; `.grad` is left as it was."""
        seen.inputs.fill(batch, counts)
        before = self._take_gradients()
        try:
            return self._capture(seen.inputs)
        finally:
            self._take_gradients()
            self._add(before, {}, lent=False)

    def _noise(self, batch: Batch, counts: Mapping[str, float], truth: Outcome) -> dict[nn.Parameter, float]:
        """What rounding does to each gradient of `truth`, relative."""
        other = self._truth(batch, counts, OTHER_SCALE).gradients
        return _relative(other, truth.gradients, OTHER_SCALE)

    def _capture(self, inputs: _Inputs) -> _Graph:
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        gc.collect()
        torch.cuda.empty_cache()  # nothing is given back during a capture
        # thread_local: another thread may fill the next batch meanwhile
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            outcome = self._eager(inputs.batch(), inputs.shares)
        return _Graph(graph, inputs, outcome)

    def _error(self, made: _Graph, truth: Outcome, noise: Mapping[nn.Parameter, float]) -> tuple[float, float, float]:
        """Of the graph over the batch that lies in its inputs, relative: (error of the loss, of the worst gradient, the most that a gradient has
        beyond what rounding may do). NaN where there is one."""
        made.graph.replay()
        each = _relative(made.outcome.gradients, truth.gradients)
        over = [error - NOISE_FACTOR * noise.get(p, 0.0) for p, error in each.items()]
        loss = [relative_error(made.outcome.terms[t], v) for t, v in truth.terms.items()]
        return _worst(loss), _worst(list(each.values())), _worst(over)

    def _replay(self, made: _Graph) -> dict[str, Tensor]:
        before = self._take_gradients()
        made.graph.replay()
        self.replays += 1
        self._add(before, made.outcome.gradients, lent=True)
        return {term: value.clone() for term, value in made.outcome.terms.items()}

    def _take_gradients(self) -> dict[nn.Parameter, Tensor]:
        """What earlier micro-batches left, safe from the next replay; `.grad` is None then."""
        found = {p: p.grad for p in self.parameters if p.grad is not None}
        if found and self._lent:
            found = dict(zip(found, torch._foreach_add(list(found.values()), 0.0), strict=True))
        for parameter in self.parameters:
            parameter.grad = None
        self._lent = False
        return found

    def _add(self, before: dict[nn.Parameter, Tensor], new: dict[nn.Parameter, Tensor], *, lent: bool) -> None:
        """`.grad` = before + new."""
        both = [p for p in new if p in before]
        if both:
            torch._foreach_add_([before[p] for p in both], [new[p] for p in both])
        for parameter, gradient in {**new, **before}.items():
            parameter.grad = gradient
        self._lent = lent and not before
        if lent and before:  # a parameter that only this micro-batch reached
            for parameter in new.keys() - before.keys():
                parameter.grad = new[parameter].clone()

    def _give_up(self, why: str) -> None:
        """Go on without graphs, and without what they hold."""
        self.off = True
        self._graphs.clear()
        self._seen.clear()
        self._pool = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.tell(None, why)
