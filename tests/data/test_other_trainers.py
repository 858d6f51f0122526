"""The code of docs/other-trainers.md, run as it stands there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import rft.data
from support.data import prepare_rows, some_chats

PAGE = Path(__file__).resolve().parents[2] / "docs" / "other-trainers.md"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return prepare_rows(tmp_path_factory.mktemp("set"), some_chats(60)).train.path


def blocks() -> dict[str, str]:
    """Code by its heading."""
    parts = re.split(r"^#+ (.*)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    found = {}
    for heading, text in zip(parts[::2], parts[1::2], strict=True):
        code = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        assert len(code) == 1, f"{heading}: one block a heading"
        found[heading] = code[0]
    return found


def run(heading: str, names: dict) -> dict:
    exec(compile(blocks()[heading], f"{PAGE.name}: {heading}", "exec"), names)
    return names


def tiny_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=400, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=2048,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def test_opening_a_set(path):
    names = run("Prepared sets in other trainers", {"path": path})
    assert names["batch"].input_ids.shape == (1, 1024)


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
    names = run("Plain PyTorch", {"path": path, "model": model})
    assert names["loss"].item() / names["batch"].label_weight < np.log(400)


def test_a_position_is_resumed(path):
    opened = rft.data.open(path, seq_len=128, pad_id=0)
    names = run("Position", {"opened": opened})
    *_, last = opened.epoch(0)
    assert torch.equal(names["batch"].input_ids, last.input_ids)


def test_datasets_and_trainer_take_the_packs(path, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    datasets.disable_progress_bars()
    packed = run("Hugging Face datasets and Trainer", {"path": path})["packed"]
    opened = rft.data.open(path, seq_len=512, pad_id=0)
    batches = list(opened.epoch(0))
    assert len(packed) == len(batches)
    from transformers import default_data_collator

    model = tiny_model()
    model.config.use_cache = False
    batch = default_data_collator([packed[0]])
    with torch.no_grad():
        theirs = model(**batch).loss
        logits = model(input_ids=batches[0].input_ids, position_ids=batches[0].position_ids, use_cache=False).logits
        ours = torch.nn.functional.cross_entropy(logits[0].float(), batches[0].labels[0])
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-6)


def test_the_loader_for_torchtitan_goes_on_from_its_state_into_the_next_epoch(path):
    names = run("torchtitan", {})
    training = SimpleNamespace(dataset_path=path, seq_len=128, local_batch_size=2)

    def loader():
        return names["build_packed_dataloader"](2, 1, None, SimpleNamespace(training=training))

    first = loader()
    straight = [(labels, first.state_dict()) for (_, labels), _ in zip(first, range(40), strict=False)]
    epochs = [state["position"]["epoch"] for _, state in straight]
    assert epochs[-1] > epochs[0], "into the next epoch"
    for stop in (3, epochs.index(1), 30):
        again = loader()
        again.load_state_dict(json.loads(json.dumps(straight[stop][1])))
        rest = zip(again, straight[stop + 1 :], strict=False)
        assert all(torch.equal(ours, theirs) for (_, ours), (theirs, _) in rest)
    inputs, labels = next(iter(loader()))
    assert inputs["input"].shape == inputs["positions"].shape == labels.shape == (2, 128)
