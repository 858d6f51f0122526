"""The code of the pages for other trainers, run as it stands there. TRL and torchtitan themselves where they are installed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

import rft.data
from rft.data import command
from support.data import prepare_rows, some_chats, tiny_files

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return prepare_rows(tmp_path_factory.mktemp("set"), some_chats(60)).train.path


def code(page: str) -> list[str]:
    """The blocks of Python of a page, in order."""
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)


def run(page: str, number: int, names: dict) -> dict:
    exec(compile(code(page)[number], f"{page}, block {number}", "exec", dont_inherit=True), names)
    return names


def tiny_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=400, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=2048,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def mean_loss(model, batch) -> torch.Tensor:
    """The mean loss of a batch's labels, documents kept apart."""
    with torch.no_grad():
        logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits[0].float(), batch.labels[0])


def test_opening_a_set(path):
    names = run("other-trainers.md", 0, {"path": path})
    assert names["batch"].input_ids.shape == (1, 1024)


def test_a_position_is_resumed(path):
    opened = rft.data.open(path, seq_len=128, pad_id=0)
    names = run("other-trainers.md", 1, {"opened": opened})
    *_, last = opened.epoch(0)
    assert torch.equal(names["batch"].input_ids, last.input_ids)


def test_a_position_behind_a_resume_counts_from_it_also_with_other_ranks(path):
    opened, pairs = (rft.data.open(path, seq_len=128, pad_id=0, micro_batch=size) for size in (1, 2))
    packs = [batch.input_ids for batch in opened.epoch(0)]
    since = opened.state(0, 3)
    again = pairs.state(0, 2, since=since)
    assert again["packs"] == 7
    assert all(
        torch.equal(batch.input_ids, wanted) for batch, wanted in zip(opened.resume(again), packs[7:], strict=True)
    )
    assert pairs.state(0, 10_000, since=since)["packs"] == len(packs)
    with pytest.raises(ValueError, match="a state of epoch 0"):
        opened.state(1, 1, since=since)


# ---- plain PyTorch


def test_plain_pytorch_learns_and_keeps_documents_apart(path):
    model = tiny_model()
    first = next(iter(rft.data.open(path, seq_len=512, pad_id=0).epoch(0)))
    start, end = first.cu_seqlens[:2].tolist()
    with torch.no_grad():
        whole = model(input_ids=first.input_ids, position_ids=first.position_ids, use_cache=False).logits
        second_end = int(first.cu_seqlens[2])
        alone = model(input_ids=first.input_ids[:, end:second_end]).logits
    assert start == 0
    torch.testing.assert_close(whole[:, end:second_end], alone, rtol=1e-4, atol=1e-5)
    names = run("pytorch.md", 0, {"path": path, "model": model})
    assert names["loss"].item() / names["batch"].label_weight < np.log(400)


def test_ranks_sum_to_the_gradient_of_one_process_and_go_on_from_a_position(path, monkeypatch):
    import torch.distributed as dist

    monkeypatch.setattr(dist, "is_initialized", lambda: True)

    def gradients(world_size, position, stop):
        """Of the first `stop` batches behind a position, ranks one after another; their mean, as DDP takes it."""
        labels = {}
        for rank in range(world_size):
            opened = rft.data.open(path, seq_len=512, pad_id=0, rank=rank, world_size=world_size)
            batches = opened.resume(position) if position else opened.epoch(0)
            for step, batch in zip(range(stop), batches, strict=False):
                labels[step] = labels.get(step, 0.0) + batch.label_weight
        model, at = tiny_model(), None
        for rank in range(world_size):
            sums = iter(labels[step] for step in range(stop))
            monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
            monkeypatch.setattr(dist, "get_world_size", lambda: world_size)
            monkeypatch.setattr(dist, "all_reduce", lambda tensor, sums=sums: tensor.fill_(next(sums)))
            at = run("pytorch.md", 1, {"path": path, "model": model, "position": position, "stop": stop})["position"]
        return {name: weight.grad / world_size for name, weight in model.named_parameters()}, at

    one, after_two = gradients(1, None, 2)
    two, after_one = gradients(2, None, 1)
    assert after_one == after_two
    # One step of two packs divides by their labels together, two steps of one each by their own: a pack at a time.
    first, position = gradients(1, None, 1)
    second, _ = gradients(1, position, 1)
    torch.testing.assert_close(one, {name: first[name] + second[name] for name in first}, rtol=1e-4, atol=1e-6)
    counts = [
        batch.label_weight
        for batch, _ in zip(rft.data.open(path, seq_len=512, pad_id=0).epoch(0), range(2), strict=False)
    ]
    wanted = {name: (first[name] * counts[0] + second[name] * counts[1]) / sum(counts) for name in first}
    torch.testing.assert_close(two, wanted, rtol=1e-4, atol=1e-6)


# ---- Hugging Face


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    datasets.disable_progress_bars()
    return datasets


def test_datasets_and_trainer_take_the_packs(path, datasets):
    packed = run("hugging-face.md", 0, {"path": path})["packed"]
    batches = list(rft.data.open(path, seq_len=512, pad_id=0).epoch(0))
    assert len(packed) == len(batches)
    from transformers import default_data_collator

    model = tiny_model()
    model.config.use_cache = False
    with torch.no_grad():
        theirs = model(**default_data_collator([packed[0]])).loss
    torch.testing.assert_close(theirs, mean_loss(model, batches[0]), rtol=1e-5, atol=1e-6)


@pytest.fixture
def packed_file(path, datasets, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = command.run(["pack", str(path), "--seq-len", "512", "--to", "packed.parquet"])
    assert (code, err) == (0, "")
    return run("hugging-face.md", 1, {})["packed"]


def test_a_file_of_packs_holds_what_the_batches_hold(path, packed_file):
    for row, batch in zip(packed_file, rft.data.open(path, seq_len=512, pad_id=0).epoch(0), strict=True):
        real = batch.num_tokens
        assert row["input_ids"] == batch.input_ids[0, :real].tolist()
        assert row["labels"][1:] == batch.labels[0, : real - 1].tolist()
        assert sum(row["seq_lengths"]) == real


def test_trl_trains_on_the_file_and_begins_with_our_loss(path, packed_file, tmp_path):
    pytest.importorskip("trl", reason="TRL is not installed")
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tiny_files(tmp_path).json),
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
    )
    others = {"use_cpu": True, "report_to": "none", "logging_steps": 1, "save_strategy": "no", "bf16": False}
    others["train_sampling_strategy"] = "sequential"  # so that the first rows are ours
    names = {"model": tiny_model(), "packed": packed_file, "tokenizer": tokenizer, "others": others}
    names = run("hugging-face.md", 2, names)
    losses = [entry["loss"] for entry in names["trainer"].state.log_history if "loss" in entry]
    assert len(losses) == 3
    batch = next(iter(rft.data.open(path, seq_len=512, micro_batch=2, pad_id=0).epoch(0)))
    wanted = mean_loss(tiny_model(), batch)
    assert losses[0] == pytest.approx(wanted.item(), rel=1e-4)


# ---- torchtitan


class Configurable:
    """What of torchtitan's base class the page's loader uses, where torchtitan is not installed."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        dataset: str = ""
        dataset_path: str | None = None


@pytest.fixture
def loader_class(monkeypatch):
    try:
        import torchtitan.components.dataloader  # noqa: F401
    except ImportError:
        stand_in = types.ModuleType("torchtitan.components.dataloader")
        stand_in.BaseDataLoader = Configurable
        for name in ("torchtitan", "torchtitan.components"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    return run("torchtitan.md", 0, {"__name__": "page"})["PackedDataLoader"]


def test_the_loader_for_torchtitan_goes_on_from_its_state_into_the_next_epoch(path, loader_class):
    def loader(rank=1, world_size=2, packs=2):
        config = loader_class.Config(dataset_path=path)
        options = {"tokenizer": None, "snapshot_every_n_steps": None}  # which torchtitan gives too
        return loader_class(
            config, dp_world_size=world_size, dp_rank=rank, seq_len=128, local_batch_size=packs, **options
        )

    first = loader()
    straight = [(labels, first.state_dict()) for (_, labels), _ in zip(first, range(40), strict=False)]
    epochs = [state["epoch"] for _, state in straight]
    assert epochs[-1] > epochs[0], "into the next epoch"
    for stop in (3, epochs.index(1) - 1, epochs.index(1), 30):
        again = loader()
        again.load_state_dict(json.loads(json.dumps(straight[stop][1])))
        assert again.state_dict() == straight[stop][1]
        for (_, ours), (theirs, state) in zip(again, straight[stop + 1 :], strict=False):
            assert torch.equal(ours, theirs)
            assert again.state_dict() == state
    inputs, labels = next(iter(loader()))
    assert inputs["input"].shape == inputs["positions"].shape == labels.shape == (2, 128)
    # One rank takes up what two left.
    alone = loader(0, 1, 1)
    alone.load_state_dict(straight[3][1])
    packs = [batch.labels for batch in rft.data.open(path, seq_len=128).epoch(0)]
    assert torch.equal(next(iter(alone))[1], packs[straight[3][1]["packs"]])


def test_torchtitan_itself_trains_on_the_packs_and_resumes(path, tmp_path):
    pytest.importorskip("torchtitan", reason="torchtitan is not installed")
    script = Path(__file__).parents[1] / "support" / "torchtitan_on_cpu.py"
    page = tmp_path / "page.py"
    page.write_text("\n".join(code("torchtitan.md")))

    def train(steps, load_step=-1):
        words = [sys.executable, str(script), str(page), str(path), str(tmp_path / "out"), str(steps), str(load_step)]
        done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    told = train(6)
    batches = list(zip(range(6), rft.data.open(path, seq_len=128, micro_batch=2, pad_id=0).epoch(0), strict=False))
    assert told["labels"] == [int((batch.labels != -100).sum()) for _, batch in batches]
    assert told["losses"][-1] < told["losses"][0]
    # A position sees those before it in its document, and no others.
    documents = (batches[0][1].position_ids.view(2, 128) == 0).cumsum(1)
    wanted = (documents[:, :, None] == documents[:, None, :]).tril()
    assert torch.equal(torch.tensor(told["mask"]).view(2, 128, 128).bool(), wanted)
    assert train(6, 3)["losses"] == told["losses"][3:]
