"""`final/` is what transformers and PEFT load: the same numbers, the base's own names, complete or as it was before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rft.checkpoint import hf
from rft.checkpoint.hf import model_card, save_final
from rft.checkpoint.save import remove_leftovers
from rft.errors import CheckpointError
from rft.models.source import ModelSource
from rft.training.run import Run
from support.data import write_tiny_tokenizer
from support.ranked import gathered, make_run, steps, write_base
from support.tiny import tiny_llama, write_model

IDS = torch.tensor([[5, 9, 33, 7, 120, 6]])


def final(run: Run) -> Path:
    save_final(
        run.run_dir / "final", model=run.model, source=run.source, tokenizer=run.tokenizer, config=run.config.model_dump(),
        masters=run.optimizer.named_masters(), template="{{ messages }}",
    )  # fmt: skip
    return run.run_dir / "final"


def mixtral(folder: Path) -> Path:
    from transformers import MixtralConfig

    config = MixtralConfig(
        vocab_size=400, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=128,
    )  # fmt: skip
    return write_tiny_tokenizer(write_model(folder, config))


def tied(folder: Path) -> Path:
    tiny_llama(folder, vocab_size=400, tied=True)
    return write_tiny_tokenizer(folder)


def logits_of(run: Run) -> torch.Tensor:
    """Of the model as trained, through the plain attention of transformers."""
    run.model.set_attn_implementation("eager")
    with torch.no_grad():
        return run.model.eval()(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("write", [write_base, tied, mixtral])
@pytest.mark.parametrize("file_bytes", [5 * 10**9, 60_000], ids=["one file", "several files"])
def test_a_trained_model_loads_in_transformers_with_the_same_logits(tmp_path, write, file_bytes, monkeypatch):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setattr(hf, "FILE_BYTES", file_bytes)
    base = write(tmp_path / "base")
    run = make_run(base, tmp_path / "run", lora=False)
    steps(run, 2)
    folder = final(run)
    saved = {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
    expected = load_file(base / "model.safetensors")
    assert {name: (t.shape, t.dtype) for name, t in saved.items()} == {
        name: (t.shape, t.dtype) for name, t in expected.items()
    }
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (file_bytes < 10**6)
    assert any(not torch.equal(saved[name], expected[name]) for name in saved)
    loaded = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        got = loaded.eval()(input_ids=IDS).logits
    assert (got - logits_of(run)).abs().max() <= 1e-5
    assert loaded.config.tie_word_embeddings == run.model.config.tie_word_embeddings
    assert AutoTokenizer.from_pretrained(folder).chat_template == "{{ messages }}"


def test_a_trained_adapter_loads_in_peft_with_the_same_logits(tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = write_base(tmp_path / "base")
    run = make_run(base, tmp_path / "run", train={"precision": "fp32"})
    steps(run, 3)
    folder = final(run)
    stock = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    with torch.no_grad():
        before = stock.eval()(input_ids=IDS).logits
        got = PeftModel.from_pretrained(stock, folder).eval()(input_ids=IDS).logits
    assert (got - logits_of(run)).abs().max() <= 1e-5
    assert (got - before).abs().max() > 1e-3
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    card = (folder / "README.md").read_text()
    assert f'base_model: "{base}"' in card
    assert "stub.jsonl" in card
    assert 'AutoPeftModelForCausalLM.from_pretrained("<run>/final")' in card
    assert f"The base is read from `{base}`" in card


@pytest.mark.parametrize(("lora", "loads"), [(True, "<run>/merged"), (False, "<run>/final")], ids=["adapter", "full"])
def test_card_of_a_run_on_a_gguf_file_loads_a_whole_model(tmp_path, lora, loads):
    source = ModelSource("gguf", tmp_path / "base.gguf", None, None)  # type: ignore[arg-type]
    config = {
        "adapter": {"name": "lora", "r": 4} if lora else {"name": "none"},
        "data": {"train": [{"path": "rows.jsonl"}]},
    }
    card = model_card(source, config)
    assert f'AutoModelForCausalLM.from_pretrained("{loads}")' in card
    assert "AutoPeftModel" not in card
    assert ("rft merge <run>" in card) == lora


def test_a_bf16_run_saves_its_fp32_masters_as_the_adapter_and_the_type_of_the_base_as_the_model(tmp_path):
    base = write_base(tmp_path / "base")
    run = make_run(base, tmp_path / "lora", train={"precision": "bf16"})
    steps(run, 1)
    adapter = load_file(final(run) / "adapter_model.safetensors")
    masters = gathered(run)
    for name, tensor in masters.items():
        assert torch.equal(adapter[name.removeprefix("model.").replace(".default", "")], tensor)
        assert tensor.dtype == torch.float32
    run = make_run(base, tmp_path / "full", lora=False, train={"precision": "bf16"})
    steps(run, 1)
    model = load_file(final(run) / "model.safetensors")
    assert {t.dtype for t in model.values()} == {torch.float32}  # what this base is stored in
    assert all(torch.equal(model[name.removeprefix("model.")], tensor) for name, tensor in gathered(run).items())


def test_a_final_that_cannot_be_written_leaves_the_earlier_one(tmp_path, monkeypatch):
    run = make_run(write_base(tmp_path / "base"), tmp_path / "run")
    before = {path.name: path.read_bytes() for path in final(run).iterdir()}
    steps(run, 1)

    def full(*args, **kwargs) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(hf, "write_bytes", full)
        with pytest.raises(CheckpointError, match=r"the disk is full: final/ could not be written"):
            final(run)
    assert before == {path.name: path.read_bytes() for path in (run.run_dir / "final").iterdir()}
    assert (run.run_dir / ".final.saving").exists()
    remove_leftovers(run.run_dir)
    assert not (run.run_dir / ".final.saving").exists()
    final(run)
    changed = {path.name for path in (run.run_dir / "final").iterdir() if path.read_bytes() != before[path.name]}
    assert changed == {"adapter_model.safetensors"}
