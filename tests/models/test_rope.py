"""Longer texts than a model was trained for: frequencies by their formulas, the result's config, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3TextConfig, GPT2Config, LlamaConfig, Phi3Config

from rft.checkpoint.merge import merge
from rft.config.model import ModelConfig, RopeConfig
from rft.errors import ConfigError
from rft.models.load import build_meta, find_model, materialise
from rft.models.rope import scale_rope, settle_dynamic
from support.ranked import final, make_run, steps, write_base
from support.tiny import tiny_llama

CPU = torch.device("cpu")
BASE, SIZE = 10_000.0, 16


def llama(**rope) -> LlamaConfig:
    parameters = {"rope_type": "default", "rope_theta": BASE, **rope}
    return LlamaConfig(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=4, intermediate_size=64, num_hidden_layers=1, vocab_size=64,
        max_position_embeddings=4096, rope_parameters=parameters,
    )  # fmt: skip


def frequencies(config) -> torch.Tensor:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    return LlamaRotaryEmbedding(config).inv_freq


PLAIN = torch.tensor([BASE ** (-i / SIZE) for i in range(0, SIZE, 2)])


def test_yarn_at_four_times_the_length_is_saved_whole_and_loads_to_the_same_bits(tmp_path: Path):  # BO-39
    tiny_llama(tmp_path / "base", max_positions=4096)
    before = AutoConfig.from_pretrained(tmp_path / "base")
    cfg = ModelConfig(path=str(tmp_path / "base"), rope=RopeConfig(target_length=16_384, method="yarn"))
    source = find_model(cfg)
    model = build_meta(source, cfg, torch.float32)
    materialise(model, source, CPU)
    model.save_pretrained(tmp_path / "saved")
    rope = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert rope["max_position_embeddings"] == 16_384
    parameters = rope["rope_parameters"]
    assert parameters["rope_type"] == "yarn"
    assert parameters["factor"] == 4.0
    assert parameters["original_max_position_embeddings"] == 4096
    assert parameters["rope_theta"] == before.rope_parameters["rope_theta"], "the base is unchanged"
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    own, loaded = model.get_decoder().rotary_emb, again.get_decoder().rotary_emb
    assert torch.equal(own.inv_freq, loaded.inv_freq)
    assert own.attention_scaling == loaded.attention_scaling == pytest.approx(0.1 * math.log(4) + 1)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "base").get_decoder().rotary_emb.inv_freq
    assert torch.equal(own.inv_freq[:1], stock[:1]), "the fastest frequency stays"
    assert own.inv_freq[-1] == pytest.approx(stock[-1] / 4), "the slowest is slowed by the factor"


def scaled(config, method: str = "auto", target: int = 16_384):
    told = scale_rope(config, RopeConfig(target_length=target, method=method))
    return told, frequencies(config)


def test_linear_slows_every_frequency_by_the_stretch():
    config = llama()
    _, found = scaled(config, "linear")
    torch.testing.assert_close(found, PLAIN / 4)
    assert config.max_position_embeddings == 16_384
    told, found = scaled(config, "auto", 32_768)
    assert told == "linear: 16,384 -> 32,768 positions", "the kind that it has is kept"
    torch.testing.assert_close(found, PLAIN / 8)


def test_llama3_keeps_fast_frequencies_and_slows_slow_ones():
    _, found = scaled(llama(), "llama3")
    waves = 2 * math.pi / PLAIN
    fast, slow = waves < 4096 / 4, waves > 4096
    assert fast.any()
    assert slow.any()
    torch.testing.assert_close(found[fast], PLAIN[fast])
    torch.testing.assert_close(found[slow], PLAIN[slow] / 4)


def test_a_llama_3_model_is_stretched_from_the_factor_that_it_has():
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512}  # fmt: skip
    config = llama(**rope)
    told, _ = scaled(config)
    assert told == "llama3: 4,096 -> 16,384 positions"
    assert config.rope_parameters["factor"] == 32.0
    assert config.rope_parameters["original_max_position_embeddings"] == 512


def test_a_yarn_model_counts_from_its_original_length():
    config = llama(rope_type="yarn", factor=2.0, original_max_position_embeddings=2048)
    scaled(config)
    assert config.rope_parameters["factor"] == 8.0
    assert config.rope_parameters["original_max_position_embeddings"] == 2048


def test_longrope_leaves_short_texts_as_they_were_and_takes_yarns_factors_for_long_ones():
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config, yarn = llama(), llama()
    scale_rope(config, RopeConfig(target_length=16_384, method="longrope"))
    _, slowed = scaled(yarn, "yarn")
    rotary = LlamaRotaryEmbedding(config)
    rotary(torch.zeros(1), torch.tensor([[0, 100]]))
    torch.testing.assert_close(rotary.inv_freq, PLAIN)
    rotary(torch.zeros(1), torch.tensor([[0, 10_000]]))
    torch.testing.assert_close(rotary.inv_freq, slowed)


def test_a_longrope_model_has_its_long_factors_stretched():
    config = Phi3Config(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=1, vocab_size=64, pad_token_id=0,
        max_position_embeddings=4096, original_max_position_embeddings=1024,
        rope_parameters={"rope_type": "longrope", "rope_theta": BASE, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
    )  # fmt: skip
    scale_rope(config, RopeConfig(target_length=16_384))
    assert config.rope_parameters["long_factor"] == [8.0] * 8
    assert config.rope_parameters["short_factor"] == [1.0] * 8
    assert config.rope_parameters["factor"] == 16.0


def test_dynamic_holds_the_frequencies_of_the_target_whatever_was_seen():
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = llama()
    scale_rope(config, RopeConfig(target_length=16_384, method="dynamic"))
    rotary = LlamaRotaryEmbedding(config)
    assert settle_dynamic(rotary, 16_384) == 1
    base = BASE * (4 * 16_384 / 4096 - 3) ** (SIZE / (SIZE - 2))
    wanted = torch.tensor([base ** (-i / SIZE) for i in range(0, SIZE, 2)])
    for longest in (10, 16_000, 5):
        rotary(torch.zeros(1), torch.tensor([[0, longest]]))
        torch.testing.assert_close(rotary.inv_freq, wanted)


def test_only_layers_that_see_the_whole_text_are_stretched():
    config = Gemma3TextConfig(
        hidden_size=64, num_attention_heads=4, num_hidden_layers=2, vocab_size=64, max_position_embeddings=4096
    )
    local = dict(config.rope_parameters["sliding_attention"])
    scale_rope(config, RopeConfig(target_length=16_384))
    assert config.rope_parameters["full_attention"]["rope_type"] == "yarn"
    assert config.rope_parameters["sliding_attention"] == local


def test_none_changes_no_frequency():
    told, found = scaled(llama(), "none")
    torch.testing.assert_close(found, PLAIN)
    assert "as it is" in told


@pytest.mark.parametrize(
    ("config", "method", "target", "words"),
    [
        (llama(), "auto", 4096, "trained for 4,096 positions already"),
        (llama(rope_type="linear", factor=2.0), "yarn", 16_384, 'trained with "linear" scaling'),
        (llama(rope_type="yarn", factor=2.0), "dynamic", 16_384, 'set model.rope.method = "yarn"'),
        (GPT2Config(), "auto", 16_384, "GPT2Config has no rotary positions"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(config, method, target, words):
    with pytest.raises(ConfigError, match=words):
        scale_rope(config, RopeConfig(target_length=target, method=method))


# ---- in a run


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_base(tmp_path_factory.mktemp("rope") / "base", max_positions=8)


def test_longer_texts_than_the_model_was_trained_for_are_refused_with_both_numbers(base, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"data.seq_len = 12(.|\n)*8 positions(.|\n)*model.rope.target_length = 12"):
        make_run(base, tmp_path / "run")


def test_no_scaling_at_all_is_told_as_a_warning(base, tmp_path: Path, monkeypatch):
    told: list[str] = []
    monkeypatch.setattr("rft.log.warn", lambda text, **_: told.append(text))
    run = make_run(base, tmp_path / "run", model={"path": str(base), "rope": {"method": "none"}})
    assert run.config.model.rope.target_length == 12, "data.seq_len"
    assert any("without scaling: none: trained for 8 positions, used to 12" in text for text in told)
    steps(run, 1)


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_what_was_trained_with_is_in_the_result(base, tmp_path: Path, lora):
    run = make_run(base, tmp_path / "run", lora=lora, model={"path": str(base), "rope": {"target_length": 32}})
    assert run.config.model.rope.method == "yarn", "what auto became"
    steps(run, 1)
    folder = final(run)
    saved = AutoConfig.from_pretrained(folder)
    assert saved.rope_parameters["rope_type"] == "yarn"
    assert saved.max_position_embeddings == 32
    if lora:
        out = tmp_path / "merged"
        merge(folder, out, base=run.config.model)
        folder = out
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    own = run.model.get_base_model() if lora else run.model
    assert torch.equal(loaded.model.rotary_emb.inv_freq, own.model.rotary_emb.inv_freq)
