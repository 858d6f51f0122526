"""`rft merge`: base + adapter, streamed, equals PEFT's own merge; ties, types, shards and refusals."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rft.checkpoint import merge as merging
from rft.checkpoint.merge import merge
from rft.errors import ConfigError, ModelError, RftError
from support.data import write_tiny_tokenizer
from support.tiny import tiny_llama, write_model

IDS = torch.tensor([[5, 9, 17, 33, 8, 2, 91, 64, 12]])


def adapter_on(base: Path, out: Path, *, seed: int = 7, **options):
    """A LoRA with non-zero A and B on `base`, saved by PEFT; returns the live model."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    options = {"r": 4, "lora_alpha": 10, "target_modules": ["q_proj", "v_proj", "down_proj"], **options}
    live = get_peft_model(model, LoraConfig(**options))
    with torch.no_grad():
        for name, parameter in live.named_parameters():
            if "lora_magnitude" in name:
                parameter.mul_(1 + 0.1 * torch.rand_like(parameter))
            elif parameter.requires_grad:
                parameter.copy_(0.1 * torch.randn_like(parameter))
    live.save_pretrained(out)
    return live.eval()


def logits_of(folder: Path, ids: torch.Tensor = IDS, dtype: torch.dtype | None = None) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=dtype).eval()
    with torch.no_grad():
        return model(input_ids=ids).logits.float()


def live_logits(live, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        return live(input_ids=ids).logits.float()


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"target_modules": "all-linear", "use_rslora": True},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.1.mlp.down_proj": 3}},
        {"use_dora": True},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["q_proj", "lm_head"]},
        {"modules_to_save": ["lm_head"]},
    ],
    ids=["plain", "rslora", "patterns", "dora", "embedding", "head", "saved-head"],
)
def test_merged_weights_equal_those_of_peft(tmp_path, options):
    base = tiny_llama(tmp_path / "base")
    live = adapter_on(base, tmp_path / "adapter", **options)
    merge(tmp_path / "adapter", tmp_path / "merged")
    ours = all_tensors(tmp_path / "merged")
    theirs = live.merge_and_unload().state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-6, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


def test_gpt2_keeps_its_transposed_weights(tmp_path):
    from transformers import GPT2Config

    config = GPT2Config(vocab_size=128, n_embd=32, n_layer=2, n_head=2, n_positions=64, tie_word_embeddings=True)
    base = write_model(tmp_path / "base", config)
    live = adapter_on(base, tmp_path / "adapter", target_modules=["c_attn", "attn.c_proj"], fan_in_fan_out=True)
    expected = live_logits(live)
    merge(tmp_path / "adapter", tmp_path / "merged")
    torch.testing.assert_close(logits_of(tmp_path / "merged"), expected, rtol=0, atol=1e-5)


def test_adapter_on_the_head_of_a_tied_model_unties_it_and_leaves_the_embedding_alone(tmp_path):  # BO-26
    base = tiny_llama(tmp_path / "base", tied=True)
    live = adapter_on(base, tmp_path / "adapter", target_modules=["lm_head"])
    expected = live_logits(live)
    result = merge(tmp_path / "adapter", tmp_path / "merged")
    ours, before = all_tensors(tmp_path / "merged"), all_tensors(base)
    assert result.untied
    assert "lm_head.weight" not in before
    assert torch.equal(ours["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    A, B = (adapter[f"base_model.model.lm_head.lora_{side}.weight"] for side in "AB")
    torch.testing.assert_close(ours["lm_head.weight"], before["model.embed_tokens.weight"] + 2.5 * B @ A)
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["tie_word_embeddings"] is False
    torch.testing.assert_close(logits_of(tmp_path / "merged"), expected, rtol=0, atol=1e-5)


def test_tied_model_with_an_adapter_elsewhere_stays_tied_and_stores_one_copy(tmp_path):
    base = tiny_llama(tmp_path / "base", tied=True)
    live = adapter_on(base, tmp_path / "adapter")
    expected = live_logits(live)
    assert not merge(tmp_path / "adapter", tmp_path / "merged").untied
    assert "lm_head.weight" not in all_tensors(tmp_path / "merged")
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["tie_word_embeddings"] is True
    torch.testing.assert_close(logits_of(tmp_path / "merged"), expected, rtol=0, atol=1e-5)


def test_sum_is_made_in_fp32_and_rounded_once(tmp_path):
    base = tiny_llama(tmp_path / "base")
    adapter_on(base, tmp_path / "adapter")
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(tmp_path / "base16")
    from rft.config.model import ModelConfig

    merge(tmp_path / "adapter", tmp_path / "merged", base=ModelConfig(path=str(tmp_path / "base16")))
    before, after = all_tensors(tmp_path / "base16"), all_tensors(tmp_path / "merged")
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    name = "model.layers.1.self_attn.q_proj"
    A, B = (adapter[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
    exact = (before[f"{name}.weight"].float() + 2.5 * B @ A).bfloat16()
    assert after[f"{name}.weight"].dtype == torch.bfloat16
    assert torch.equal(after[f"{name}.weight"], exact)
    assert torch.equal(after["model.norm.weight"], before["model.norm.weight"])


def test_shards_and_small_blocks_give_the_same_bytes_as_one_file(tmp_path, monkeypatch):
    base = tiny_llama(tmp_path / "base")
    live = adapter_on(base, tmp_path / "adapter", target_modules=["q_proj", "lm_head", "embed_tokens"])
    expected = live_logits(live)
    merge(tmp_path / "adapter", tmp_path / "one")
    monkeypatch.setattr(merging, "BLOCK_ELEMENTS", 200)  # three rows of 64
    merge(tmp_path / "adapter", tmp_path / "many", shard_bytes=60_000)
    assert (tmp_path / "many" / "model.safetensors.index.json").is_file()
    assert len(list((tmp_path / "many").glob("model-*.safetensors"))) > 2
    one, many = all_tensors(tmp_path / "one"), all_tensors(tmp_path / "many")
    assert one.keys() == many.keys()
    for name in one:  # matrix products over other block sizes may round differently in the last bit
        torch.testing.assert_close(one[name], many[name], rtol=0, atol=1e-7)
    torch.testing.assert_close(logits_of(tmp_path / "many"), expected, rtol=0, atol=1e-5)


def test_memory_is_bounded_by_blocks_not_by_the_model(tmp_path, monkeypatch):
    from rft.models.source import SafetensorsReader

    base = tiny_llama(tmp_path / "base")
    adapter_on(base, tmp_path / "adapter")
    largest = 0
    read = SafetensorsReader.read

    def watched(self, name, part=None):
        nonlocal largest
        tensor = read(self, name, part)
        largest = max(largest, tensor.numel())
        return tensor

    monkeypatch.setattr(SafetensorsReader, "read", watched)
    monkeypatch.setattr(merging, "BLOCK_ELEMENTS", 1000)
    merge(tmp_path / "adapter", tmp_path / "merged")
    assert 0 < largest <= 1000


def test_trained_rows_of_added_tokens_are_in_the_merged_embedding(tmp_path):  # BO-29
    base = tiny_llama(tmp_path / "base", vocab_size=104, tied=True)
    live = adapter_on(base, tmp_path / "adapter", trainable_token_indices={"embed_tokens": [100, 101, 102, 103]})
    ids = torch.tensor([[5, 100, 17, 103, 8]])
    expected = live_logits(live, ids)
    merge(tmp_path / "adapter", tmp_path / "merged")
    after, before = all_tensors(tmp_path / "merged"), all_tensors(base)
    rows = load_file(tmp_path / "adapter" / "adapter_model.safetensors")[
        "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    ]
    assert torch.equal(after["model.embed_tokens.weight"][100:], rows)
    assert torch.equal(after["model.embed_tokens.weight"][:100], before["model.embed_tokens.weight"][:100])
    torch.testing.assert_close(logits_of(tmp_path / "merged", ids), expected, rtol=0, atol=1e-5)


def test_resized_embeddings_saved_with_the_adapter_grow_the_model_and_its_config(tmp_path):  # BO-29
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = tiny_llama(tmp_path / "base", vocab_size=100, tied=True)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    model.resize_token_embeddings(104)
    live = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"])).eval()
    live.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    ids = torch.tensor([[5, 100, 17, 103, 8]])
    result = merge(tmp_path / "adapter", tmp_path / "merged")
    assert not result.untied
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["vocab_size"] == 104
    torch.testing.assert_close(logits_of(tmp_path / "merged", ids), live_logits(live, ids), rtol=0, atol=1e-5)


def test_tokenizer_template_and_generation_config_come_along(tmp_path):
    base = tiny_llama(tmp_path / "base", vocab_size=400)
    write_tiny_tokenizer(base)
    adapter_on(base, tmp_path / "adapter")
    write_tiny_tokenizer(tmp_path / "adapter", template="{{ messages }}")
    (tmp_path / "adapter" / "generation_config.json").write_text('{"temperature": 0.5}')
    merge(tmp_path / "adapter", tmp_path / "merged")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "merged" / name).read_bytes() == (tmp_path / "adapter" / name).read_bytes()


def test_adapter_of_another_model_is_refused_with_both_shapes(tmp_path):
    from rft.config.model import ModelConfig

    adapter_on(tiny_llama(tmp_path / "base"), tmp_path / "adapter")
    other = tiny_llama(tmp_path / "other", hidden=32)
    with pytest.raises(ModelError, match=r"32 x 96 in the base, the adapter's update is 64 x 96"):
        merge(tmp_path / "adapter", tmp_path / "merged", base=ModelConfig(path=str(other)))
    assert not (tmp_path / "merged").exists()
    assert not list(tmp_path.glob(".merged*"))


def test_folder_with_something_in_it_is_never_overwritten(tmp_path):
    adapter_on(tiny_llama(tmp_path / "base"), tmp_path / "adapter")
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged" / "precious.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        merge(tmp_path / "adapter", tmp_path / "merged")
    assert (tmp_path / "merged" / "precious.txt").read_text() == "mine"


class _Marker:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.safetensors", "adapter_config.json"])
def test_pickle_in_an_adapter_folder_is_refused_by_name_and_never_run(tmp_path, name):  # BO-42
    adapter_on(tiny_llama(tmp_path / "base"), tmp_path / "adapter")
    if name == "adapter_model.bin":
        (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    (tmp_path / "adapter" / name).write_bytes(pickle.dumps(_Marker(tmp_path / "marker")))
    with pytest.raises(ModelError, match=name):
        merge(tmp_path / "adapter", tmp_path / "merged")
    assert not (tmp_path / "marker").exists()


def test_method_that_cannot_be_merged_is_refused_by_name(tmp_path):
    adapter_on(tiny_llama(tmp_path / "base"), tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "peft_type": "IA3"}))
    with pytest.raises(ModelError, match="IA3"):
        merge(tmp_path / "adapter", tmp_path / "merged")
    path.write_text(json.dumps({**config, "init_lora_weights": "pissa"}))
    with pytest.raises(ModelError, match="pissa"):
        merge(tmp_path / "adapter", tmp_path / "merged")


def test_unknown_tensor_in_the_adapter_file_is_refused(tmp_path):
    adapter_on(tiny_llama(tmp_path / "base"), tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({**load_file(file), "base_model.model.model.layers.9.q_proj.lora_C.weight": torch.zeros(2, 2)}, file)
    with pytest.raises(ModelError, match="lora_C"):
        merge(tmp_path / "adapter", tmp_path / "merged")


def test_disk_without_room_is_told_before_anything_is_written(tmp_path, monkeypatch):
    from collections import namedtuple

    adapter_on(tiny_llama(tmp_path / "base"), tmp_path / "adapter")
    usage = namedtuple("usage", "total used free")(100, 99, 1)
    monkeypatch.setattr(merging.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(RftError, match="the disk is full") as raised:
        merge(tmp_path / "adapter", tmp_path / "merged")
    assert raised.value.exit_code == 1  # the machine's fault, where a folder that may not be written is the user's
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter", "base"]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("targets", [["q_proj"], ["embed_tokens", "q_proj"]], ids=["linears", "embedding"])
def test_a_tokenizer_with_more_tokens_than_the_base_has_rows_gives_a_model_that_takes_them_all(tmp_path, tied, targets):
    """As in training: rows that the base lacks are the mean of those it has."""
    from transformers import AutoModelForCausalLM

    from rft.checkpoint.target import find_target
    from rft.config.load import load_config
    from rft.generate.load import load_speaker
    from rft.training.api import train_config
    from support.command import write_project

    toml = write_project(tmp_path, adapter=f"targets = {json.dumps(targets)}", train="max_steps = 2")
    tiny_llama(tmp_path / "base", vocab_size=300, tied=tied)
    train_config(load_config(toml), device="cpu")
    run = tmp_path / "runs" / "chat"
    merged = merge(run / "final", tmp_path / "merged")
    if targets == ["q_proj"]:
        assert "100 rows added for tokens" in "".join(merged.notes)
    ids = torch.tensor([[1, 250, 299, 300, 350, 399]])
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="float32")
    assert stock.config.vocab_size == 400
    live = load_speaker(find_target(str(run)), device=torch.device("cpu"), dtype=torch.float32).model
    with torch.no_grad():
        assert (live(ids).logits - stock(ids).logits).abs().max() < 1e-5
