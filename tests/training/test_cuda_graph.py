"""Graphs of micro-batches: what is filled up changes nothing, gradients add up as a backward's do, and whatever cannot be is told.

A graph of CUDA is stood in for by one that computes again into the same tensors; the real one: test_step_gpu.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rft.data.batch import Batch
from rft.errors import Refused
from rft.training import cuda_graph
from rft.training.cuda_graph import MicroBatchGraphs, Outcome, shape_of
from rft.training.setup import why_no_graph
from support.data import write_tiny_tokenizer
from support.model_run import model_job, model_run, random_packs
from support.tiny import tiny_llama

T = 64


class Toy(nn.Module):
    """A loss that sees ids, borders, positions, weights and the bound of labels, with a parameter that only some batches reach."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(400, 8)
        self.head = nn.Linear(8, 400)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        document = torch.bucketize(torch.arange(T), batch.cu_seqlens, right=True)
        hidden = self.table(batch.input_ids[0]) + 0.01 * batch.position_ids[0, :, None] + 0.1 * document[:, None]
        kept = batch.labels[0] != -100
        assert int(kept.sum()) <= batch.num_label_tokens
        assert int(batch.cu_seqlens.diff().max()) <= batch.max_length
        each = nn.functional.cross_entropy(self.head(hidden), batch.labels[0], reduction="none", ignore_index=-100)
        weights = 1.0 if batch.weights is None else batch.weights[0]
        return {"next_token": (each * weights).sum()}


class Again:
    """Stands in for a captured graph: computes anew, into the tensors that the capture gave."""

    def __init__(self, run: Any, outcome: Outcome, wrong: float, only: int | None):
        self.run, self.outcome, self.wrong, self.only = run, outcome, wrong, only

    def replay(self) -> None:
        found: Outcome = self.run()
        for term, value in found.terms.items():
            self.outcome.terms[term].copy_(value)
        for number, (parameter, gradient) in enumerate(found.gradients.items()):
            wrong = self.wrong if self.only in (None, number) else 0.0
            self.outcome.gradients[parameter].copy_(gradient * (1 + wrong))


class Graphs(MicroBatchGraphs):
    """With stand-ins."""

    wrong = 0.0
    only: int | None = None
    """Which gradient is wrong; None: all."""
    fails: str | None = None

    def _capture(self, inputs: Any) -> Any:
        if self.fails:
            raise RuntimeError(self.fails)
        outcome = self._eager(inputs.batch(), inputs.shares)

        def run() -> Outcome:
            before = self._take_gradients()
            found = self._eager(inputs.batch(), inputs.shares)
            self._take_gradients()
            self._add(before, {}, lent=False)
            return found

        return cuda_graph._Graph(Again(run, outcome, self.wrong, self.only), inputs, outcome)


def build() -> tuple[Toy, Graphs, list[Any]]:
    toy, told = Toy(), []
    graphs = Graphs(toy, list(toy.parameters()), ("next_token",), torch.device("cpu"), lambda *said: told.append(said))
    return toy, graphs, told


def plain(toy: Toy, batch: Batch, counts: dict[str, float]) -> Tensor:
    loss = toy(batch)["next_token"] / counts["next_token"]
    loss.backward()
    return loss.detach()


def gradients(toy: Toy) -> list[Tensor]:
    return [p.grad.clone() for p in toy.parameters() if p.grad is not None]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_steps_are_those_without_a_graph(micro_batches: int, weighted: bool):
    toy, graphs, told = build()
    packs = []
    for documents in (2, 5, 3, 4, 2, 5):
        packs += random_packs(3, seq_len=T, documents=documents)
    if weighted:
        packs = [with_weights(b) for b in packs]
    for start in range(0, len(packs), micro_batches):
        step = packs[start : start + micro_batches]
        counts = {"next_token": sum(b.label_weight for b in step)}
        toy.zero_grad()
        truth = sum(plain(toy, b, counts) for b in step)
        wanted = gradients(toy)
        toy.zero_grad()
        found = sum(graphs(b, counts)["next_token"] for b in step)
        torch.testing.assert_close(found, truth)
        for own, other in zip(gradients(toy), wanted, strict=True):
            torch.testing.assert_close(own, other)
        with torch.no_grad():  # a graph is compared with a batch of an earlier step, too: by the weights of now
            for parameter in toy.parameters():
                parameter.sub_(0.5 * parameter.grad)
    assert graphs.replays >= 4
    assert [why for _, why in told] == [None]
    assert set(told[0][0]) == {"batch loss", "batch gradient", "other batch loss", "other batch gradient", "rounding"}


def with_weights(batch: Batch) -> Batch:
    weights = torch.rand(1, T, generator=torch.Generator().manual_seed(int(batch.input_ids.sum())))
    return replace(batch, weights=weights, label_weight=float(weights[0][batch.labels[0] != -100].sum()))


def test_gradients_of_the_last_step_do_not_reach_into_the_next():
    toy, graphs, _ = build()
    packs = random_packs(4, seq_len=T, documents=2)
    for batch in packs:
        graphs(batch, {"next_token": batch.label_weight})
        toy.zero_grad(set_to_none=True)
    batch = packs[0]
    graphs(batch, {"next_token": batch.label_weight})
    own = gradients(toy)
    toy.zero_grad(set_to_none=True)
    plain(toy, batch, {"next_token": batch.label_weight})
    for a, b in zip(own, gradients(toy), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("change", "words"), [
    ({"fails": "operation not permitted"}, "cannot be captured: operation not permitted"),
    ({"wrong": 0.02}, "differs from the same batch"),
    ({"wrong": 0.02, "only": 2}, "differs from the same batch"),
    ({"wrong": float("nan"), "only": 0}, "differs from the same batch"),
])  # fmt: skip
def test_what_cannot_be_or_differs_goes_on_without_and_says_so(change: dict[str, Any], words: str):
    toy, graphs, told = build()
    vars(graphs).update(change)
    for batch in random_packs(4, seq_len=T, documents=2):
        counts = {"next_token": batch.label_weight}
        toy.zero_grad()
        truth = plain(toy, batch, counts)
        wanted = gradients(toy)
        toy.zero_grad()
        torch.testing.assert_close(graphs(batch, counts)["next_token"], truth)
        for own, other in zip(gradients(toy), wanted, strict=True):
            torch.testing.assert_close(own, other)
    assert graphs.off
    assert graphs.replays == 0
    assert len(told) == 1
    assert words in told[0][1]


class Rounds(torch.autograd.Function):
    """The gradient is off by another few percent each time, as that of a deep model in few bits is."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad * (1 + 0.03 * torch.randn(grad.shape))


def test_what_rounding_does_to_a_gradient_is_no_fault_of_the_graph():
    toy, graphs, told = build()
    toy.table.register_forward_hook(lambda module, given, out: Rounds.apply(out))
    for batch in random_packs(5, seq_len=T, documents=2):
        graphs(batch, {"next_token": batch.label_weight})
        toy.zero_grad()
    ((checked, why),) = told
    assert why is None
    assert 0.01 < checked["rounding"] < 0.06
    assert 0.01 < checked["batch gradient"] < 0.06
    assert graphs.replays >= 1


def test_more_shapes_than_there_may_be_run_without_a_graph(monkeypatch):
    toy, graphs, _ = build()
    monkeypatch.setattr(cuda_graph, "MOST_SHAPES", 1)
    monkeypatch.setattr(cuda_graph, "DOCUMENTS", 4)
    (one,), (other,) = random_packs(1, seq_len=T, documents=2), random_packs(1, seq_len=T, documents=12)
    for batch in (one, one, one, other, other, other):
        counts = {"next_token": batch.label_weight}
        toy.zero_grad()
        truth = plain(toy, batch, counts)
        toy.zero_grad()
        torch.testing.assert_close(graphs(batch, counts)["next_token"], truth)
    assert (len(graphs._graphs), graphs.replays) == (1, 1)


def test_where_a_batch_has_no_room_beside_the_graphs_they_go(monkeypatch):
    toy, graphs, told = build()
    monkeypatch.setattr(cuda_graph, "DOCUMENTS", 4)
    (first,), (other,) = random_packs(1, seq_len=T, documents=2), random_packs(1, seq_len=T, documents=12)
    for _ in range(3):
        graphs(first, {"next_token": first.label_weight})
        toy.zero_grad()
    graphs(first, {"next_token": first.label_weight})
    before = gradients(toy)
    times = []

    def full(module: Toy, given: Any) -> None:
        times.append(len(graphs._graphs))
        if graphs._graphs:
            raise torch.OutOfMemoryError("out of memory")

    toy.register_forward_pre_hook(full)
    found = graphs(other, {"next_token": other.label_weight})["next_token"]
    assert times == [1, 0]
    assert graphs.off
    assert "beside the graphs" in told[-1][1]
    both = gradients(toy)
    toy.zero_grad()
    torch.testing.assert_close(found, plain(toy, other, {"next_token": other.label_weight}))
    for own, one, two in zip(both, before, gradients(toy), strict=True):
        torch.testing.assert_close(own, one + two)


def test_bounds_of_a_shape_hold_its_batch():
    for documents in (1, 2, 9, 16):
        for batch in random_packs(2, seq_len=T, documents=documents):
            shape = shape_of(batch)
            assert shape.documents >= len(batch.lengths)
            assert shape.longest >= batch.max_length
            assert T >= shape.labels >= batch.num_label_tokens


def test_a_job_without_cuda_is_refused(tmp_path):
    folder = write_tiny_tokenizer(tiny_llama(tmp_path / "model", vocab_size=400))
    with pytest.raises(Refused, match="a cpu has no CUDA graphs") as refused:
        model_run(folder, tmp_path, random_packs(1), train={"cuda_graph": True})
    assert "train.cuda_graph = false" in str(refused.value)


@pytest.mark.parametrize(("change", "words"), [
    ({"world_size": 2}, "2 ranks sum their gradients"),
    ({"attention": "cudnn"}, "attention cudnn needs every document's length"),
    ({"recompute": "full"}, 'recompute "full"'),
    ({"moe": True}, "experts take as many tokens"),
])  # fmt: skip
def test_why_a_job_has_no_graph(tmp_path, change: dict[str, Any], words: str):
    folder = write_tiny_tokenizer(tiny_llama(tmp_path / "model", vocab_size=400))
    job = model_job(folder, tmp_path)
    config = job.config
    config = config.model_copy(update={"model": config.model.model_copy(update={"attention": change.get("attention", "varlen")})})  # fmt: skip
    config = config.model_copy(update={"memory": config.memory.model_copy(update={"recompute": change.get("recompute", "none")})})  # fmt: skip
    world = replace(job.world, device=torch.device("cuda"), world_size=change.get("world_size", 1))
    told = why_no_graph(replace(job, config=config, world=world, facts=replace(job.facts, is_moe=True) if change.get("moe") else job.facts))  # fmt: skip
    assert told is not None
    assert words in told
