"""`train.compile`: a run with compiled layers is the run without, in few graphs whatever the packs hold; what cannot be compiled says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rft.errors import Refused
from rft.models import attention_opaque, compiled
from rft.training.evaluate import evaluate
from rft.training.run import Run
from rft.training.step import train_step
from support.data import write_tiny_tokenizer
from support.families import FAMILIES
from support.model_run import model_run, random_packs
from support.ranks import run_ranks
from support.tiny import tiny_llama, write_model

PACKS = [p for documents in (3, 5, 2, 7) for p in random_packs(1, documents=documents, seed=documents)]
"""Of one length, and of four numbers of documents."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_llama(folder, vocab_size=400, hidden=32, layers=3)
    return write_tiny_tokenizer(folder)


@pytest.fixture(autouse=True)
def traced_alone(monkeypatch) -> None:
    """Everything but the code that Inductor would generate: results are those of the traced operations, bit by bit."""
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")


def trained(model_dir: Path, tmp_path: Path, *, compile: bool, **tables: Any) -> tuple[list[float], dict, Run]:
    """Two steps of two micro-batches between two evaluations: all losses, trained weights, the run."""
    train = {"compile": compile, "accumulate": 2, **tables.pop("train", {})}
    run = model_run(
        model_dir, tmp_path / str(compile), PACKS, eval_packs=PACKS[:2], packs_per_step=2, train=train, **tables
    )
    losses = [evaluate(run).loss]
    losses += [float(sum(train_step(run, PACKS[at : at + 2]).terms.values())) for at in (0, 2)]
    losses.append(evaluate(run).loss)
    return losses, {name: master.clone() for name, master in run.optimizer.named_masters().items()}, run


def same_run(model_dir: Path, tmp_path: Path, **tables: Any) -> tuple[Run, Run]:
    """Both runs, once they were found to be equal bit by bit."""
    losses, weights, plain = trained(model_dir, tmp_path, compile=False, **tables)
    own_losses, own_weights, run = trained(model_dir, tmp_path, compile=True, **tables)
    assert own_losses == losses
    assert losses[0] - losses[-1] > 1e-4, "something was learned, or equal losses would prove nothing"
    for name, weight in weights.items():
        assert torch.equal(own_weights[name], weight), name
    assert not attention_opaque._calls, "a backward leaves no attention graph behind"
    return plain, run


def receipt(run: Run) -> dict[str, Any]:
    (entry,) = [a for a in run.receipts["applied"] if a["what"] == "compiled layers"]
    return entry


RUNS = [
    pytest.param("none", "none", id="full"),
    pytest.param("none", "full", id="full, recompute"),
    pytest.param("none", "selective", id="full, selective"),
    pytest.param("none", 2, id="full, every second", marks=pytest.mark.slow),
    pytest.param("lora", "none", id="lora", marks=pytest.mark.slow),
    pytest.param("lora", "full", id="lora, recompute", marks=pytest.mark.slow),
    pytest.param("lora", "selective", id="lora, selective"),
]


@pytest.mark.parametrize(("adapter", "recompute"), RUNS)
def test_packs_of_any_number_of_documents_share_their_graphs(
    model_dir: Path, tmp_path: Path, adapter: str, recompute: Any
):
    tables: dict[str, Any] = {"adapter": {"name": adapter}, "memory": {"recompute": recompute}}
    if adapter == "lora":
        tables["adapter"] |= {"targets": ["q_proj", "down_proj"]}  # PEFT's layers take long to trace
    plain, run = same_run(model_dir, tmp_path, **tables, optim={"lr": 5e-3})
    attention = [r.trainee._parts[0].state.calls for r in (plain, run)]
    assert attention[0] == attention[1], "the comparison of a layer with itself is not counted"
    # evaluation, and training; the first layer of a LoRA run is one more: its input needs no gradient
    graphs = 3 if adapter == "lora" else 2
    assert run.trainee.compiled.graphs == graphs  # type: ignore[union-attr]
    entry = receipt(run)
    assert (entry["count"], entry["of"]) == (3, 3)
    assert entry["how"].startswith(f"{graphs} graphs, none broken, ")
    assert set(entry["checked"]) == {"output", "gradient"}
    assert not [d for d in run.receipts["declined"] if d["what"] == "compiled layers"]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_with_every_kernel_swapped_in(tmp_path: Path, family: str):
    """In Triton's interpreter: registered ops and our autograd functions lie in the one graph."""
    config = FAMILIES[family]()
    config.vocab_size = 400
    folder = write_tiny_tokenizer(write_model(tmp_path / "model", config))
    packs = random_packs(1, seq_len=16, documents=2) + random_packs(1, seq_len=16, documents=3, seed=1)
    steps = []
    for compile in (False, True):
        run = model_run(
            folder, tmp_path / str(compile), packs, packs_per_step=2, kernels=True, memory={"recompute": "selective"},
            train={"compile": compile}, optim={"lr": 5e-3},
        )  # fmt: skip
        result = train_step(run, packs)
        steps.append([result.terms["next_token"], result.grad_norm, *run.optimizer.named_masters().values()])
    assert all(torch.equal(own, plain) for plain, own in zip(*steps, strict=True))
    done = {a["what"]: a["count"] for a in run.receipts["applied"]}
    assert done["gated mlp"] == done["attention block"] == done["add and norm"] == done["compiled layers"] == 2
    assert run.trainee.compiled.graphs == 2  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "phi3", "gpt_oss"])
def test_families(tmp_path: Path, family: str):
    """Norms of q and k; one projection for all; sinks, windows and experts."""
    config = FAMILIES[family]()
    config.vocab_size = 400
    folder = write_tiny_tokenizer(write_model(tmp_path / "model", config))
    losses, _, _ = trained(folder, tmp_path, compile=False)
    own, _, run = trained(folder, tmp_path, compile=True)
    assert own == pytest.approx(losses, rel=1e-6)
    assert receipt(run)["count"] == 2


@pytest.mark.slow
def test_generated_code(model_dir: Path, tmp_path: Path, monkeypatch):
    """Through Inductor, as a run has it: equal but for rounding."""
    monkeypatch.setattr(compiled, "BACKEND", "inductor")
    tables = {"adapter": {"name": "none"}, "memory": {"recompute": "selective"}}
    losses, weights, _ = trained(model_dir, tmp_path, compile=False, **tables)
    own, own_weights, run = trained(model_dir, tmp_path, compile=True, **tables)
    assert own == pytest.approx(losses, rel=1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(own_weights[name], weight, rtol=1e-3, atol=2e-4, msg=name)
    assert receipt(run)["count"] == 3
    assert 0 < max(receipt(run)["checked"].values()) < 1e-5, "other code gives other roundings"


OTHERS = [
    pytest.param({"memory": {"offload": "cpu", "recompute": "selective"}}, id="offload"),
    pytest.param(
        {"memory": {"offload": "cpu"}, "adapter": {"name": "lora"}},
        id="offload of what is saved",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        {"optim": {"in_backward": True, "lr": 5e-3}, "train": {"accumulate": 1, "max_grad_norm": "none"}},
        id="in backward",
    ),
    pytest.param({"train": {"precision": "bf16"}}, id="bf16"),
]


@pytest.mark.parametrize("tables", OTHERS)
def test_beside_what_else_acts_on_a_layer(model_dir: Path, tmp_path: Path, tables: dict):
    _, run = same_run(model_dir, tmp_path, **{"adapter": {"name": "none"}, "optim": {"lr": 5e-3}, **tables})
    assert receipt(run)["count"] == 3


def test_a_layer_that_cannot_be_traced_goes_on_as_it_was(model_dir: Path, tmp_path: Path, monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaMLP

    plain = LlamaMLP.forward

    def breaks_the_graph(self, x):
        torch._dynamo.graph_break()
        return plain(self, x)

    monkeypatch.setattr(LlamaMLP, "forward", breaks_the_graph)
    tables = {"adapter": {"name": "none"}, "memory": {"recompute": "full"}, "optim": {"lr": 5e-3}}
    _, run = same_run(model_dir, tmp_path, **tables)
    (declined,) = [d for d in run.receipts["declined"] if d["what"] == "compiled layers"]
    assert declined["count"] == 3
    assert declined["why"].startswith("it cannot be compiled whole: ")
    assert not [a for a in run.receipts["applied"] if a["what"] == "compiled layers"]


@pytest.mark.parametrize("wrong", ["differs by", "fails: RuntimeError: no such thing"])
def test_a_compiled_layer_that_gives_something_else_is_not_used(
    model_dir: Path, tmp_path: Path, monkeypatch, wrong: str
):
    from torch._dynamo.backends import registry

    found = registry.lookup_backend

    def lookup(name):
        def backend(module, inputs, **kwargs):
            run = found(name)(module, inputs, **kwargs)

            def call(*args):
                if "fails" in wrong and torch.is_grad_enabled():
                    raise RuntimeError("no such thing")
                return [out * 1.01 if torch.is_tensor(out) else out for out in run(*args)]

            return call

        return backend

    monkeypatch.setattr(registry, "lookup_backend", lookup)
    losses, _, _ = trained(model_dir, tmp_path, compile=False, adapter={"name": "none"})
    own, _, run = trained(model_dir, tmp_path, compile=True, adapter={"name": "none"})
    assert own == losses, "not even the evaluation before the first step"
    (declined,) = [d for d in run.receipts["declined"] if d["what"] == "compiled layers"]
    assert (declined["count"], wrong in declined["why"]) == (3, True), declined


def test_layers_without_such_attention_are_refused(tmp_path: Path):
    config = FAMILIES["gpt2"]()
    config.vocab_size = 400
    folder = write_tiny_tokenizer(write_model(tmp_path / "model", config))
    with pytest.raises(Refused, match=r"train.compile = true: it has no attention"):
        model_run(folder, tmp_path, PACKS, train={"compile": True})


def over_ranks(world, folder: str, out: str, mode: str, compile: bool) -> tuple[list[float], dict[str, Any]]:
    compiled.BACKEND = "aot_eager"
    own = PACKS[world.rank :: 2]
    run = model_run(
        Path(folder), Path(out) / str(world.rank), own, packs_per_step=2, world=world, adapter={"name": "none"}, optim={"lr": 5e-3},
        train={"compile": compile}, parallel={"data": mode}, memory={"recompute": "selective"},
    )  # fmt: skip
    steps = [train_step(run, [batch]) for batch in own]
    return [float(s.terms["next_token"]) for s in steps] + [float(s.grad_norm) for s in steps], run.receipts


@pytest.mark.slow
def test_over_two_ranks(model_dir: Path, tmp_path: Path):
    """Within what gathers the weights and shares out the gradients."""
    plain, own = (run_ranks(over_ranks, str(model_dir), str(tmp_path), "shard", compile) for compile in (False, True))
    for (numbers, _), (own_numbers, receipts) in zip(plain, own, strict=True):
        assert own_numbers == numbers
        (entry,) = [a for a in receipts["applied"] if a["what"] == "compiled layers"]
        assert (entry["count"], entry["how"][:8]) == (3, "1 graph,")
