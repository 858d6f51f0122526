"""LoRA through PEFT: targets that we name, values that start right, files that stock PEFT reads and writes."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from rft.adapters.files import adapter_tensors, save_adapter
from rft.adapters.lora import find_targets, initialise, inject, train_everything, trained_parameters
from rft.config.adapter import LoraConfig
from rft.config.model import ModelConfig
from rft.errors import CheckpointError, ConfigError, ModelError, Refused
from rft.models.attention import install_attention
from rft.models.backbone import Backbone
from rft.models.head import Head
from rft.models.load import build_meta, find_model, materialise
from rft.models.receipts import Receipts
from support.close import assert_close
from support.families import FAMILIES, build
from support.rows import packed_batch, random_documents
from support.tiny import tiny_llama, write_model

IDS = random_documents(14, vocabulary=100)[0][None]


def make(directory, adapter: LoraConfig | None = None, *, seed=0, dtype=torch.float32, **kwargs):
    """A model of the directory with an adapter, in the order of design.md 3, and its source."""
    adapter = adapter or LoraConfig()
    cfg = ModelConfig(path=str(directory))
    source = find_model(cfg)
    grown = kwargs.pop("vocab_size", None)
    model = inject(build_meta(source, cfg, dtype, vocab_size=grown), adapter, base_id=source.base_id, **kwargs)
    state = install_attention(model, "sdpa")
    materialise(model, source, "cpu")
    return initialise(model, adapter, seed=seed), state


def nudge(model, seed=7):
    """Move every trained number off its start, as training would."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trained_parameters(model).values():
            parameter.add_(torch.randn(parameter.shape, generator=g) * 0.05)
    return model


def logits(model, ids=IDS):
    with torch.no_grad():
        return model.eval()(input_ids=ids, use_cache=False).logits.float()


def stock(directory, adapter_directory):
    base = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    return peft.PeftModel.from_pretrained(base, str(adapter_directory))


KINDS = {
    "default": LoraConfig(),
    "rslora": LoraConfig(rslora=True, r=8),
    "alpha 0.5, named targets": LoraConfig(alpha=4.0, targets=["q_proj", "mlp.down_proj"]),
    "dora": LoraConfig(dora=True, r=4),
    "gaussian": LoraConfig(init="gaussian"),
    "pissa": LoraConfig(init="pissa", r=4),
    "pissa, rslora": LoraConfig(init="pissa", r=4, rslora=True),
    "olora": LoraConfig(init="olora", r=4),
    "bias": LoraConfig(bias="lora_only", targets=["q_proj", "v_proj"]),
    "saved head and norm": LoraConfig(modules_to_save=["lm_head", "norm"]),
    "on the head": LoraConfig(targets=["q_proj", "lm_head"]),
    "on the embedding": LoraConfig(targets=["embed_tokens", "v_proj"]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_saved_by_rft_gives_the_same_logits_in_stock_peft(kind, tmp_path):
    family = "qwen2" if kind == "bias" else "llama"
    write_model(tmp_path / "base", FAMILIES[family]())
    model, _ = make(tmp_path / "base", KINDS[kind])
    nudge(model)
    save_adapter(model, tmp_path / "adapter", base_id="someone/base")
    loaded = stock(tmp_path / "base", tmp_path / "adapter")
    assert_close(logits(loaded), logits(model), 2e-5)
    with loaded.disable_adapter():
        assert (logits(loaded) - logits(model)).abs().max() > 1e-3
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "someone/base"
    assert config["inference_mode"] is True
    assert sorted(p.name for p in (tmp_path / "adapter").iterdir() if p.suffix != ".md") == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


@pytest.mark.parametrize("kind", ["default", "dora", "gaussian", "saved head and norm", "pissa", "olora"])
def test_a_fresh_adapter_leaves_the_model_as_it_was(kind, tmp_path):
    tiny_llama(tmp_path)
    model, _ = make(tmp_path, KINDS[kind])
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    assert_close(logits(model), logits(base), 2e-5)


def test_an_adapter_saved_by_peft_goes_on_training_with_equal_logits_and_its_own_rank(tmp_path):
    tiny_llama(tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    config = peft.LoraConfig(
        r=5, lora_alpha=7, target_modules=["q_proj", "up_proj"], lora_dropout=0.25, modules_to_save=["lm_head"]
    )
    theirs = nudge(peft.get_peft_model(base, config))
    theirs.save_pretrained(tmp_path / "adapter")
    model, _ = make(tmp_path / "base", LoraConfig(path=str(tmp_path / "adapter")))
    assert_close(logits(model), logits(theirs), 2e-6)
    assert {p.shape[0] for n, p in trained_parameters(model).items() if "lora_A" in n} == {5}
    assert all(p.requires_grad for p in adapter_tensors(model).values())
    save_adapter(model, tmp_path / "again")
    first, second = (load_file(tmp_path / d / "adapter_model.safetensors") for d in ("adapter", "again"))
    assert set(first) == set(second)
    assert all(torch.equal(first[n], second[n]) for n in first)
    with pytest.raises(ConfigError, match=r"adapter\.r: is 16.*has 5"):
        make(tmp_path / "base", LoraConfig(path=str(tmp_path / "adapter"), r=16))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"r": -1}, "r is -1"),
        ({"r": "16"}, "r is '16'"),
        ({"r": True}, "r is True"),
        ({"lora_alpha": "x"}, "lora_alpha is 'x'"),
        ({"target_modules": 3}, "target_modules is 3"),
        ({"target_modules": "no_such_module"}, "PEFT cannot put it on PeftModel|PEFT cannot put it on Llama"),
        ({"target_modules": "("}, "PEFT cannot put it on"),
        ({"lora_dropout": 7}, "lora_dropout is 7"),
        (None, "is not JSON"),
        ([], "is not what PEFT writes"),
    ],
    ids=str,
)
def test_an_adapter_config_that_was_changed_by_hand_is_refused_by_its_key(tmp_path, change, problem):
    tiny_llama(tmp_path / "base")
    model, _ = make(tmp_path / "base")
    save_adapter(model, tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    if isinstance(change, dict):
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    else:
        path.write_text("{" if change is None else "[]")
    with pytest.raises(ModelError, match=problem):
        make(tmp_path / "base", LoraConfig(path=str(tmp_path / "adapter")))


def test_going_on_from_an_adapter_that_does_not_fit_or_is_pickled_is_refused(tmp_path):
    tiny_llama(tmp_path / "base")
    tiny_llama(tmp_path / "wider", hidden=128)
    model, _ = make(tmp_path / "base")
    save_adapter(model, tmp_path / "adapter")
    with pytest.raises(ModelError, match="has shape"):
        make(tmp_path / "wider", LoraConfig(path=str(tmp_path / "adapter")))
    marker = tmp_path / "marker"

    class Bomb:
        def __reduce__(self):
            return Path(str(marker)).touch, ()

    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    (tmp_path / "adapter" / "adapter_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ModelError, match="pickled"):
        make(tmp_path / "base", LoraConfig(path=str(tmp_path / "adapter")))
    assert not marker.exists()
    with pytest.raises(ModelError, match=r"no adapter_config\.json"):
        make(tmp_path / "base", LoraConfig(path=str(tmp_path)))
    (tmp_path / "adapter" / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "init_lora_weights": "pissa"})
    )
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="changed base"):
        make(tmp_path / "base", LoraConfig(path=str(tmp_path / "adapter")))


@pytest.mark.parametrize(
    ("family", "per_layer"),
    [
        ("llama", 7),
        ("phi3", 4),
        ("gpt2", 4),
        ("gpt_neox", 4),
        ("gemma2", 7),
        ("stablelm", 7),
        ("olmo2", 7),
        ("lfm2", None),
    ],
)
def test_all_linear_takes_every_linear_of_the_layers_and_nothing_else(family, per_layer):
    model = build(family)
    targets = find_targets(model, "all-linear")
    assert all(type(model.get_submodule(n)).__name__ in ("Linear", "Conv1D") for n in targets.names)
    assert len(targets.names) == targets.of == (2 * per_layer if per_layer else targets.of)
    assert not any("lm_head" in n or "embed" in n for n in targets.names)


@pytest.mark.parametrize(
    "family",
    ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "glm4_moe", "llama4_text", "qwen3_next", "granitemoehybrid"],
)
def test_a_mixture_of_experts_gets_adapters_on_attention_only_and_the_receipt_says_so(family):
    receipts = Receipts()
    model = inject(build(family), LoraConfig(), receipts=receipts)
    adapted = [n for n, m in model.named_modules() if hasattr(m, "lora_A")]
    assert adapted
    assert all("attn" in n for n in adapted), adapted
    (lora,) = receipts.applied
    assert lora.count == len(adapted)
    assert "attention only" in lora.how


def test_mamba_projections_that_no_adapter_can_reach_are_left_out_and_counted():
    targets = find_targets(build("falcon_h1"), "all-linear")
    assert not any(n.endswith("mamba.out_proj") for n in targets.names)
    assert any(n.endswith("mamba.in_proj") for n in targets.names)
    assert "but 2" in targets.note
    inject(build("falcon_h1"), LoraConfig())


def test_unknown_targets_get_the_nearest_name():
    with pytest.raises(ConfigError, match=r"'q_porj'; did you mean 'q_proj'"):
        find_targets(build("llama"), ["q_porj"])
    with pytest.raises(ConfigError, match=r"'lm_haed'; did you mean 'lm_head'"):
        inject(build("llama"), LoraConfig(modules_to_save=["lm_haed"]))


def test_only_adapters_are_trained_and_they_are_fp32_on_a_bf16_base(tmp_path):
    """BO-30."""
    tiny_llama(tmp_path)
    model, _ = make(tmp_path, LoraConfig(modules_to_save=["lm_head"]), dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        trained = "lora_" in name or "modules_to_save" in name
        assert parameter.requires_grad == trained, name
        assert parameter.dtype == (torch.float32 if trained else torch.bfloat16), name


def test_first_values_depend_on_the_seed_and_the_name_only(tmp_path):
    tiny_llama(tmp_path)
    first, again, other = (make(tmp_path, seed=s)[0] for s in (0, 0, 1))
    a = [{n: p for n, p in trained_parameters(m).items() if "lora_A" in n} for m in (first, again, other)]
    assert all(torch.equal(a[0][n], a[1][n]) for n in a[0])
    assert not any(torch.equal(a[0][n], a[2][n]) for n in a[0])
    values = torch.stack([p for n, p in a[0].items() if "q_proj" in n])
    assert not torch.equal(values[0], values[1])
    assert values.abs().max() <= 64**-0.5
    assert abs(float(values.std()) - 64**-0.5 / 3**0.5) < 0.01
    assert not any(p.any() for n, p in trained_parameters(first).items() if "lora_B" in n)


def test_a_sharded_start_is_the_slice_of_the_whole_start(tmp_path):
    tiny_llama(tmp_path)
    whole_model, _ = make(tmp_path)
    cfg = ModelConfig(path=str(tmp_path))
    source = find_model(cfg)
    model = materialise(inject(build_meta(source, cfg, torch.float32), LoraConfig()), source, "cpu")

    def top(parameter):
        rows = parameter.shape[0] // 2
        return parameter.data[:rows], (slice(0, rows), *(slice(0, n) for n in parameter.shape[1:]))

    initialise(model, LoraConfig(), seed=0, local_part=top)
    truth = trained_parameters(whole_model)
    for name, parameter in trained_parameters(model).items():
        rows = parameter.shape[0] // 2
        assert torch.equal(parameter[:rows], truth[name][:rows]), name
    for adapter in (LoraConfig(init="pissa"), LoraConfig(dora=True)):
        other = materialise(inject(build_meta(source, cfg, torch.float32), adapter), source, "cpu")
        with pytest.raises(Refused, match="whole base weights"):
            initialise(other, adapter, seed=0, local_part=top)


def test_a_saved_adapter_holds_every_number_and_an_empty_one_is_an_error(tmp_path):
    """BO-27: hidden 64, 2 layers, r = 8 on q_proj and v_proj."""
    tiny_llama(tmp_path / "base", kv_heads=4)
    model, _ = make(tmp_path / "base", LoraConfig(r=8, targets=["q_proj", "v_proj"]))
    save_adapter(model, tmp_path / "adapter")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(tensors) == 8
    assert sum(t.numel() for t in tensors.values()) == 4096
    with pytest.raises(CheckpointError, match="empty"):
        save_adapter(model, tmp_path / "other", gather=lambda p: p[:0])
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("tied", [False, True])
def test_added_tokens_are_trained_saved_and_loaded_by_peft_without_hand_work(tied, tmp_path):
    """BO-29: four tokens on a vocabulary of 100."""
    tiny_llama(tmp_path / "base", vocab_size=100, tied=tied)
    new = [100, 101, 102, 103]
    model, state = make(tmp_path / "base", vocab_size=104, new_token_ids=new)
    old = load_file(tmp_path / "base" / "model.safetensors")["model.embed_tokens.weight"]
    batch = packed_batch(torch.tensor([3, 100, 101, 5, 102, 103, 9]), random_documents(8, vocabulary=100)[0])
    hidden, _ = Backbone(model, state)(batch)
    total = Head(model).loss_sums(hidden, batch.labels)["next_token"]
    total.backward()
    rows = {n: p for n, p in trained_parameters(model).items() if "trainable_tokens" in n}
    assert len(rows) == (1 if tied else 2)
    assert all(p.grad is not None and p.grad.any() for p in rows.values())
    truth = torch.nn.functional.cross_entropy(
        model.get_output_embeddings()(hidden), batch.labels[0], reduction="sum", ignore_index=-100
    )
    assert_close(total, truth, 1e-5)
    nudge(model)
    save_adapter(model, tmp_path / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", dtype=torch.float32, attn_implementation="eager"
    )
    base.resize_token_embeddings(104)  # as AutoPeftModelForCausalLM does from the tokenizer beside the adapter
    loaded = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    ids = torch.tensor([[3, 100, 101, 5, 102, 103, 9]])
    assert_close(logits(loaded, ids), logits(model, ids), 2e-5)
    merged = loaded.merge_and_unload().get_input_embeddings().weight
    assert torch.equal(merged[:100], old)
    assert torch.equal(merged[100:], next(p for n, p in rows.items() if "embed_tokens" in n))
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert not any(t.shape[0] == 104 for t in tensors.values())
    again, _ = make(tmp_path / "base", LoraConfig(path=str(tmp_path / "adapter")), vocab_size=104, new_token_ids=new)
    assert_close(logits(again, ids), logits(model, ids), 2e-6)


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_through_trained_head_rows_equal_those_of_a_whole_head(tied, tmp_path):
    tiny_llama(tmp_path, vocab_size=104, tied=tied)
    model, state = make(tmp_path, LoraConfig(targets=["q_proj"]), new_token_ids=[100, 103])
    nudge(model)
    batch = packed_batch(torch.tensor([3, 100, 101, 5, 102, 103, 9, 100]))
    gradients = []
    for ours in (False, True):
        model.zero_grad()
        hidden, _ = Backbone(model, state)(batch)
        if ours:
            total = Head(model, chunk_rows=3).loss_sums(hidden, batch.labels)["next_token"]
        else:
            total = torch.nn.functional.cross_entropy(
                model.get_output_embeddings()(hidden), batch.labels[0], reduction="sum", ignore_index=-100
            )
        total.backward()
        gradients.append({n: p.grad.clone() for n, p in trained_parameters(model).items()})
    for name, truth in gradients[0].items():
        assert_close(gradients[1][name], truth, 2e-5, name)


def test_loss_through_an_adapter_on_the_head_equals_whole_logits(tmp_path):
    tiny_llama(tmp_path)
    model, state = make(tmp_path, LoraConfig(targets=["lm_head", "q_proj"]))
    nudge(model)
    batch = packed_batch(*random_documents(9, 7))
    gradients = []
    for ours in (False, True):
        model.zero_grad()
        hidden, _ = Backbone(model, state)(batch)
        if ours:
            total = Head(model, chunk_rows=4).loss_sums(hidden, batch.labels)["next_token"]
        else:
            total = torch.nn.functional.cross_entropy(
                model.get_output_embeddings()(hidden), batch.labels[0], reduction="sum", ignore_index=-100
            )
        total.backward()
        gradients.append({n: p.grad.clone() for n, p in trained_parameters(model).items()})
    for name, truth in gradients[0].items():
        assert_close(gradients[1][name], truth, 2e-5, name)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "mixtral"])
def test_recomputation_with_a_frozen_base_gives_every_adapter_the_same_gradient(family, tmp_path):
    """BO-34: no embedding hook, non-reentrant recomputation."""
    write_model(tmp_path, FAMILIES[family]())
    from rft.models.backbone import decoder_layers

    gradients = []
    for recompute in (False, True):
        model, state = make(tmp_path)
        nudge(model)
        model.train()
        if recompute:
            for layer in decoder_layers(model):
                layer.gradient_checkpointing = True
                layer._gradient_checkpointing_func = lambda f, *a: torch.utils.checkpoint.checkpoint(
                    f, *a, use_reentrant=False
                )
        batch = packed_batch(*random_documents(9, 7))
        hidden, _ = Backbone(model, state)(batch)
        Head(model).loss_sums(hidden, batch.labels)["next_token"].backward()
        gradients.append({n: p.grad for n, p in trained_parameters(model).items()})
    for name, gradient in gradients[0].items():
        assert gradient.any(), name
        assert_close(gradients[1][name], gradient, 1e-5, name)


def test_full_training_trains_every_parameter_in_the_master_type(tmp_path):
    tiny_llama(tmp_path, tied=True)
    cfg = ModelConfig(path=str(tmp_path))
    model = train_everything(build_meta(find_model(cfg), cfg, torch.bfloat16), dtype=torch.float32)
    assert all(p.requires_grad and p.dtype == torch.float32 for p in model.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert isinstance(model.lm_head, nn.Linear)
