"""Models are found, built on meta and filled; what cannot be read is refused with the reason."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from rft.adapters.lora import inject
from rft.config.adapter import LoraConfig
from rft.config.model import ModelConfig
from rft.errors import ModelError
from rft.models.load import build_meta, find_model, materialise, whole
from rft.models.source import checkpoint_dtype
from support.families import FAMILIES
from support.rows import random_documents
from support.tiny import tiny_llama, write_model


def load(path, dtype=torch.float32, **kwargs):
    cfg = ModelConfig(path=str(path))
    source = find_model(cfg)
    return materialise(build_meta(source, cfg, dtype, **kwargs), source, "cpu").eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_and_logit_equals_from_pretrained(family, tmp_path):
    """Buffers too: rotary tables, embedding scales and the like are in no checkpoint (BO-33)."""
    write_model(tmp_path, FAMILIES[family]())
    stock = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    loaded = load(tmp_path)
    truth = {**stock.state_dict(), **dict(stock.named_buffers())}
    own = {**loaded.state_dict(), **dict(loaded.named_buffers())}
    assert list(own) == list(truth)
    for name, value in truth.items():
        assert torch.equal(own[name], value), name
        assert own[name].dtype == value.dtype, name
    ids = random_documents(12)[0][None]
    with torch.no_grad():
        difference = loaded(input_ids=ids).logits - stock(input_ids=ids).logits
    assert difference.abs().max() <= 2e-6


def test_a_model_in_bf16_keeps_fp32_where_transformers_does_and_rotary_tables_in_fp32(tmp_path):
    write_model(tmp_path, FAMILIES["deepseek_v3"]())
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    loaded = load(tmp_path, torch.bfloat16)
    assert {n: t.dtype for n, t in loaded.state_dict().items()} == {n: t.dtype for n, t in stock.state_dict().items()}
    assert loaded.model.rotary_emb.inv_freq.dtype == torch.float32


def test_rotary_frequencies_are_exact_after_meta(tmp_path):
    """BO-33: head size 8, base 10,000 gives 1, 0.1, 0.01, 0.001, also in a bf16 model."""
    tiny_llama(tmp_path, hidden=32, heads=4)
    frequencies = load(tmp_path, torch.bfloat16).model.rotary_emb.inv_freq
    assert torch.allclose(frequencies, torch.tensor([1.0, 0.1, 0.01, 0.001]))
    assert frequencies.dtype == torch.float32


def test_a_buffer_that_nothing_computes_stops_the_start(tmp_path):
    tiny_llama(tmp_path)
    cfg = ModelConfig(path=str(tmp_path))
    source = find_model(cfg)
    model = build_meta(source, cfg, torch.float32)
    model.model.register_buffer("table", torch.zeros(3, device="meta"), persistent=False)
    with pytest.raises(ModelError, match=r"'model\.table'"):
        materialise(model, source, "cpu")


class _Recorder:
    """A reader that remembers how much was read at a time."""

    def __init__(self, inner):
        self.inner, self.read_rows = inner, {}

    def names(self):
        return self.inner.names()

    def shape(self, name):
        return self.inner.shape(name)

    def read(self, name, part=None):
        tensor = self.inner.read(name, part)
        self.read_rows[name] = max(self.read_rows.get(name, 0), tensor.shape[0])
        return tensor


def test_a_process_reads_and_fills_only_its_own_rows(tmp_path):
    tiny_llama(tmp_path)
    cfg = ModelConfig(path=str(tmp_path))
    source = find_model(cfg)
    recorder = _Recorder(source.reader)
    object.__setattr__(source, "reader", recorder)
    model = build_meta(source, cfg, torch.float32)

    def second_half(parameter):
        half = parameter.shape[0] // 2
        parameter.data[:half] = float("nan")
        return parameter.data[half:], (slice(half, parameter.shape[0]), *(slice(0, n) for n in parameter.shape[1:]))

    materialise(model, source, "cpu", local_part=second_half)
    for name, truth in load_file(tmp_path / "model.safetensors").items():
        half = truth.shape[0] // 2
        own = model.state_dict()[name]
        assert torch.equal(own[half:], truth[half:]), name
        assert own[:half].isnan().all(), name
        assert recorder.read_rows[name] == truth.shape[0] - half, name


def test_tied_embeddings_stay_one_parameter_also_under_peft(tmp_path):
    tiny_llama(tmp_path, tied=True)
    plain = load(tmp_path)
    assert plain.lm_head.weight is plain.model.embed_tokens.weight
    cfg = ModelConfig(path=str(tmp_path))
    source = find_model(cfg)
    wrapped = materialise(inject(build_meta(source, cfg, torch.float32), LoraConfig()), source, "cpu")
    assert wrapped.get_output_embeddings().weight is wrapped.get_input_embeddings().weight
    assert torch.equal(wrapped.get_input_embeddings().weight, plain.model.embed_tokens.weight)


def test_two_different_tensors_for_one_tied_weight_are_refused(tmp_path):
    tiny_llama(tmp_path, tied=True)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file)
    load(tmp_path)
    tensors["lm_head.weight"][100, 3] += 1
    save_file(tensors, file)
    with pytest.raises(ModelError, match="two different tensors"):
        load(tmp_path)


def test_new_vocabulary_rows_start_at_the_mean_and_the_old_ones_are_untouched(tmp_path):
    tiny_llama(tmp_path, vocab_size=100)
    model = load(tmp_path, vocab_size=104)
    old = load_file(tmp_path / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        own = model.state_dict()[name]
        assert own.shape[0] == 104
        assert torch.equal(own[:100], old[name])
        assert torch.allclose(own[100:], old[name].mean(0).expand(4, -1), atol=1e-6)
    assert model.config.vocab_size == 104


def _edited(directory: Path, change) -> Path:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return directory


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("model.norm.weight"),
            "1 of the 21 weights of LlamaForCausalLM are missing, first 'model.norm.weight'",
        ),
        (lambda t: t.update({"model.extra": torch.zeros(2)}), "do not belong to LlamaForCausalLM, first 'model.extra'"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(63)}),
            r"model.norm.weight has shape \[63\] in the checkpoint, \[64\]",
        ),
    ],
)
def test_weights_that_do_not_fit_are_named_before_anything_is_read(tmp_path, change, message):
    _edited(tiny_llama(tmp_path), change)
    cfg = ModelConfig(path=str(tmp_path))
    with pytest.raises(ModelError, match=message):
        build_meta(find_model(cfg), cfg, torch.float32)


class _Bomb:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path(self.marker).touch, ()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.ckpt", "weights.pt"])
def test_pickled_weights_are_refused_unopened_with_the_command_that_converts_them(tmp_path, name):
    """BO-42."""
    directory = tiny_llama(tmp_path / "model")
    (directory / "model.safetensors").unlink()
    (directory / name).write_bytes(pickle.dumps(_Bomb(str(tmp_path / "marker"))))
    with pytest.raises(ModelError, match=r"(?s)pickled.*save_pretrained"):
        find_model(ModelConfig(path=str(directory)))
    assert not (tmp_path / "marker").exists()


def test_a_truncated_file_and_a_missing_shard_are_named(tmp_path):
    directory = tiny_llama(tmp_path / "a")
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        find_model(ModelConfig(path=str(directory)))
    directory = tiny_llama(tmp_path / "b")
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"x": "model-00001-of-00002.safetensors"}})
    )
    with pytest.raises(ModelError, match="model-00001-of-00002"):
        find_model(ModelConfig(path=str(directory)))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../b/model.safetensors"}}))
    with pytest.raises(ModelError, match="outside its directory"):
        find_model(ModelConfig(path=str(directory)))


def _config(tmp_path: Path, **values) -> ModelConfig:
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(values))
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    return ModelConfig(path=str(tmp_path))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]},
            "Gemma3ForConditionalGeneration is a multimodal checkpoint",
        ),
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "encoder-decoder"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "awq", "bits": 4}}, r"quantised \(awq\)"),
        (
            {"model_type": "brand_new", "auto_map": {"AutoConfig": "configuration_x.X"}},
            "needs Python code that comes with the model",
        ),
        ({"model_type": "brand_new"}, "cannot read a model of type 'brand_new'"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(tmp_path, values, message):
    with pytest.raises(ModelError, match=message):
        find_model(_config(tmp_path / "m", **values))


def test_a_vocabulary_of_the_config_that_the_weights_do_not_have_is_refused(tmp_path):
    tiny_llama(tmp_path, vocab_size=128)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 200}))
    cfg = ModelConfig(path=str(tmp_path))
    with pytest.raises(ModelError, match=r"lm_head.weight has shape \[128, 64\] in the checkpoint, \[200, 64\]"):
        build_meta(find_model(cfg), cfg, torch.float32, vocab_size=128)


def test_a_path_that_is_not_there_is_told_from_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match="no such file or directory"):
        find_model(ModelConfig(path=str(tmp_path / "nothing")))
    with pytest.raises(ModelError, match="not in the local cache"):
        find_model(ModelConfig(path="someone/some-model-that-is-not-here"))
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="is an adapter"):
        find_model(ModelConfig(path=str(tmp_path / "adapter")))
    with pytest.raises(ModelError, match=r"no config\.json"):
        find_model(ModelConfig(path=str(tmp_path)))


def test_a_hub_id_is_served_from_the_local_cache_and_named_by_its_id(tmp_path, monkeypatch):
    commit = "0123456789abcdef0123456789abcdef01234567"
    cache = tmp_path / "cache" / "models--someone--tiny"
    tiny_llama(cache / "snapshots" / commit)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(commit)
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    source = find_model(ModelConfig(path="someone/tiny"))
    assert (source.kind, source.base_id) == ("hub", "someone/tiny")
    shutil.copytree(cache / "snapshots" / commit, tmp_path / "someone" / "tiny")
    local = find_model(ModelConfig(path="someone/tiny"))  # a directory beats a hub id
    assert (local.kind, local.hub_id) == ("directory", None)
    assert checkpoint_dtype(local) == torch.float32


def test_the_full_model_is_saved_with_the_checkpoint_names_it_came_with(tmp_path):
    """Fused experts and renamed modules go back to the names on disk."""
    write_model(tmp_path / "a", FAMILIES["mixtral"]())
    model = load(tmp_path / "a")
    model.save_pretrained(tmp_path / "b")
    first, second = (load_file(tmp_path / d / "model.safetensors") for d in "ab")
    assert set(first) == set(second)
    assert all(torch.equal(first[n], second[n]) for n in first)


def test_whole_covers_every_dimension():
    parameter = torch.nn.Parameter(torch.zeros(3, 5))
    local, part = whole(parameter)
    assert local is parameter
    assert torch.ones(3, 5)[part].shape == (3, 5)
