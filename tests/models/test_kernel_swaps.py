"""Which parts of which families run through the kernels, and that the models compute what they did. In the interpreter, fp32."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from rft.memory.recompute import apply_recompute
from rft.models.attention import install_attention, register
from rft.models.attention_block import AttentionBlock
from rft.models.backbone import Backbone, decoder_layers
from rft.models.head import Head
from rft.models.linear import LORA_LINEAR, read, why_not_fused
from rft.models.mlp import GATED_MLP, FusedGatedMLP, GatedMLP
from rft.models.probe import find_transform
from rft.models.receipts import Receipts
from rft.models.surgery import apply_swaps
from support.close import assert_close, assert_close_fp32
from support.families import build
from support.rows import packed_batch, random_documents

# family -> how many of how many (norms, gated MLPs, attention blocks) are swapped. What is not:
# layers whose norm subtracts the mean (Cohere 2), LayerNorm, MLPs without a gate, stacked experts, joint q, k, v in another order
# (GPT-NeoX), latent attention (DeepSeek), complex tables (Llama 4), output gates (Qwen 3 Next, 3.5), key multipliers (Falcon H1).
TABLE: dict[str, tuple[str, str, str]] = {
    "llama": ("5/5", "2/2", "2/2"), "mistral": ("5/5", "2/2", "2/2"), "qwen2": ("5/5", "2/2", "2/2"), "qwen3": ("9/9", "2/2", "2/2"),
    "gemma2": ("9/9", "2/2", "2/2"), "gemma3_text": ("13/13", "2/2", "2/2"), "phi3": ("5/5", "2/2", "2/2"), "olmo2": ("9/9", "2/2", "2/2"),
    "olmo3": ("9/9", "2/2", "2/2"), "smollm3": ("5/5", "2/2", "2/2"), "gpt2": ("0/0", "0/0", "0/0"), "gpt_neox": ("0/0", "0/0", "0/2"),
    "mixtral": ("5/5", "0/0", "2/2"), "qwen3_moe": ("9/9", "0/0", "2/2"), "gpt_oss": ("5/5", "0/0", "2/2"), "granite": ("5/5", "2/2", "2/2"),
    "cohere2": ("0/3", "2/2", "2/2"), "glm4": ("9/9", "2/2", "2/2"), "glm4_moe": ("5/5", "2/2", "2/2"), "deepseek_v3": ("9/9", "2/2", "0/2"),
    "llama4_text": ("5/5", "2/2", "0/2"), "starcoder2": ("0/0", "0/0", "2/2"), "stablelm": ("0/0", "2/2", "2/2"), "qwen3_next": ("7/7", "2/2", "0/1"),
    "qwen3_5": ("7/7", "2/2", "0/1"), "falcon_h1": ("5/5", "2/2", "0/2"), "bamba": ("5/5", "2/2", "1/1"), "granitemoehybrid": ("5/5", "2/2", "0/1"),
    "lfm2": ("7/7", "2/2", "1/1"),
}  # fmt: skip
# The layers whose addition and norm are one kernel: those with RMSNorms before both parts. Not: norms behind the parts alone (OLMo 2), a
# factor on the residual (Granite), attention and MLP side by side, MLPs that give two results (GPT-OSS).
LAYERS = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "smollm3", "mixtral", "qwen3_moe"), "2/2"),
    **dict.fromkeys(("glm4", "glm4_moe", "deepseek_v3"), "2/2"), **dict.fromkeys(("qwen3_next", "qwen3_5", "lfm2"), "1/1"),
    **dict.fromkeys(("olmo2", "olmo3", "gpt_neox", "gpt_oss", "granite", "cohere2", "llama4_text", "starcoder2", "stablelm"), "0/2"),
    "gpt2": "0/0", "falcon_h1": "0/2", "bamba": "0/1", "granitemoehybrid": "0/1",
}  # fmt: skip
WHAT = ("rms_norm kernel", "gated mlp", "attention block")


def some_always(families, *always):
    """All of them, the others where minutes do not count."""
    return [f if f in always else pytest.param(f, marks=pytest.mark.slow) for f in families]


def counts(receipts: Receipts, what: str) -> str:
    done = sum(a.count for a in receipts.applied if a.what == what)
    return f"{done}/{done + sum(d.count for d in receipts.declined if d.what == what)}"


def swapped(family: str) -> tuple[nn.Module, Receipts]:
    register()
    model, receipts = build(family, attention="rft"), Receipts()
    apply_swaps(model, receipts, kernels=True)
    return model, receipts


@pytest.mark.parametrize("family", some_always(TABLE, "phi3", "cohere2", "falcon_h1"))
def test_what_is_swapped_is_as_the_table_says_and_packed_losses_and_gradients_stay(family):
    model, receipts = swapped(family)
    assert tuple(counts(receipts, what) for what in WHAT) == TABLE[family]
    assert counts(receipts, "add and norm") == LAYERS[family]
    assert all(d.why for d in receipts.declined)
    original = build(family, attention="rft")
    assert list(model.state_dict()) == list(original.state_dict())
    recurrent = family in ("qwen3_next", "qwen3_5", "falcon_h1", "bamba", "granitemoehybrid", "lfm2")
    documents = random_documents(*((17,) if recurrent else (13, 5, 21)))
    batch = packed_batch(*documents, fill=3)
    with torch.no_grad():
        transform = find_transform(build(family))
    runs = []
    for each, kernels in ((original, False), (model, True)):
        state = install_attention(each, "math")
        hidden, _ = Backbone(each, state, isolate=not recurrent)(batch)
        head = Head(each, transform, kernels=kernels)
        assert not kernels or head.why_not_kernel() is None
        total = head.loss_sums(hidden, batch.labels, num_label_tokens=batch.num_label_tokens)["next_token"]
        total.backward()
        runs.append((total.detach(), {n: p.grad for n, p in each.named_parameters()}))
    assert_close(runs[1][0], runs[0][0], 1e-5, "loss")
    largest = max(float(g.abs().max()) for g in runs[0][1].values() if g is not None)
    for name, gradient in runs[0][1].items():
        if gradient is None:
            assert runs[1][1][name] is None, name
        else:
            assert float((runs[1][1][name] - gradient).abs().max()) <= 2e-5 * largest, name


# ---- LoRA


def with_lora(family: str, **options):
    from peft import LoraConfig, get_peft_model

    from rft.adapters.lora import find_targets

    register()
    model = build(family, attention="rft")
    config = LoraConfig(r=4, lora_alpha=8, target_modules=find_targets(model, "all-linear").names, **options)
    torch.manual_seed(0)
    wrapped = get_peft_model(model, config, autocast_adapter_dtype=False)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    return wrapped


def logits_and_gradients(model, seed=0):
    model.zero_grad()
    torch.manual_seed(seed)
    logits = model(input_ids=random_documents(19)[0][None], use_cache=False).logits
    logits.square().mean().backward()
    return logits.detach(), {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


FUSED = {"llama": "14/14", "qwen2": "14/14", "phi3": "8/8", "mixtral": "8/8", "gpt_neox": "8/8", "deepseek_v3": "10/10"}


@pytest.mark.parametrize("family", some_always(FUSED, "llama"))
def test_every_lora_linear_is_fused_and_peft_still_switches_merges_and_copies(family):
    original, model, receipts = with_lora(family), with_lora(family), Receipts()
    apply_swaps(model, receipts, kernels=True)
    assert counts(receipts, "lora linear") == FUSED[family]
    assert list(model.state_dict()) == list(original.state_dict())
    (truth, gradients), (got, own) = logits_and_gradients(original), logits_and_gradients(model)
    assert_close_fp32(got, truth, 1e-5)
    for name, gradient in gradients.items():
        assert_close_fp32(own[name], gradient, 1e-5, name)
    with torch.no_grad():
        ids = random_documents(19)[0][None]
        with original.disable_adapter(), model.disable_adapter():
            off = original(input_ids=ids, use_cache=False).logits
            assert_close(model(input_ids=ids, use_cache=False).logits, off, 2e-5)
        assert (off - truth).abs().max() > 1e-3
        assert_close(copy.deepcopy(model)(input_ids=ids, use_cache=False).logits, truth, 2e-5)
        model.merge_adapter()
        assert_close(model(input_ids=ids, use_cache=False).logits, truth, 2e-5)
        model.unmerge_adapter()


def test_two_active_adapters_are_both_in_the_result():
    from peft import LoraConfig

    models = [with_lora("llama") for _ in range(2)]
    for model in models:
        torch.manual_seed(1)
        model.add_adapter(
            "second", LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        )
        model.base_model.set_adapter(["default", "second"])
    original, model = models
    apply_swaps(model, Receipts(), kernels=True)
    (truth, gradients), (got, own) = logits_and_gradients(original), logits_and_gradients(model)
    assert_close_fp32(got, truth, 1e-5)
    assert any("second" in n for n in gradients)
    for name, gradient in gradients.items():
        assert_close_fp32(own[name], gradient, 1e-5, name)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        pytest.param({"use_dora": True}, "DoraLinearVariant", id="dora"),
        pytest.param({"lora_bias": True}, "bias of its own", id="lora bias", marks=pytest.mark.slow),
    ],
)
def test_what_the_fused_path_has_not_is_left_to_peft_by_name_and_the_block_around_it_is_still_ours(options, why):
    original, model, receipts = with_lora("llama", **options), with_lora("llama", **options), Receipts()
    apply_swaps(model, receipts, kernels=True)
    (declined,) = [d for d in receipts.declined if d.what == "lora linear"]
    assert declined.count == 14
    assert why in declined.why
    assert (counts(receipts, "gated mlp"), counts(receipts, "attention block")) == ("2/2", "2/2")
    for each in (original, model):
        each.train()
    (truth, gradients), (got, own) = logits_and_gradients(original), logits_and_gradients(model)
    assert_close_fp32(got, truth, 1e-5)
    for name, gradient in gradients.items():
        assert_close_fp32(own[name], gradient, 1e-5, name)


def test_dropout_of_adapters_is_on_the_fast_path_and_a_layer_computed_again_drops_the_same():
    from peft import LoraConfig, get_peft_model

    batch = packed_batch(*random_documents(2, 2))
    runs = []
    for recompute, p in (("none", 0.3), ("full", 0.3)):
        register()
        torch.manual_seed(0)
        config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_dropout=p, init_lora_weights=False)
        model, receipts = get_peft_model(build("llama", attention="rft"), config), Receipts()
        apply_swaps(model, receipts, kernels=True, matchers=[LORA_LINEAR])
        assert counts(receipts, "lora linear") == "4/4"
        assert "dropout" in receipts.applied[0].how
        apply_recompute(list(decoder_layers(model.train())), recompute)
        state = install_attention(model, "sdpa")
        torch.manual_seed(3)
        hidden, _ = Backbone(model, state)(batch)
        after = torch.rand(())
        hidden.square().sum().backward()
        with torch.no_grad():
            evaluated = Backbone(model.eval(), state)(batch)[0]
        runs.append(
            (hidden.detach(), {n: q.grad for n, q in model.named_parameters() if q.requires_grad}, after, evaluated)
        )
    (hidden, gradients, after, evaluated), again = runs
    assert torch.equal(again[0], hidden)
    assert torch.equal(again[2], after)  # the generator is where it was
    for name, gradient in gradients.items():
        assert torch.equal(again[1][name], gradient), name
    assert (hidden - evaluated).abs().max() > 1e-3


@pytest.mark.slow
def test_rslora_and_biases_of_the_base_stay_on_the_fast_path():
    original, model = (with_lora("qwen2", use_rslora=True, bias="lora_only") for _ in range(2))
    apply_swaps(model, Receipts(), kernels=True)
    assert all(why_not_fused(m) is None for m in model.modules() if hasattr(m, "lora_A"))
    (_, gradients), (_, own) = logits_and_gradients(original), logits_and_gradients(model)
    assert any(n.endswith("q_proj.base_layer.bias") for n in gradients)
    for name, gradient in gradients.items():
        assert_close_fp32(own[name], gradient, 1e-5, name)


def test_a_module_that_somebody_listens_to_is_called():
    model = with_lora("llama")
    apply_swaps(model, Receipts(), kernels=True)
    layer = model.base_model.model.model.layers[0]
    heard = []
    layer.self_attn.q_proj.register_forward_hook(lambda *_: heard.append("q"))
    layer.mlp.down_proj.lora_A["default"].register_forward_hook(lambda *_: heard.append("A of down"))
    assert read(layer.self_attn.q_proj) is None
    before = logits_and_gradients(model)[0]
    assert heard == ["q", "A of down"]
    assert_close(before, logits_and_gradients(with_lora("llama"))[0], 2e-5)


# ---- the blocks decline what they are not


def test_an_mlp_with_another_activation_or_a_factor_is_declined_with_the_measured_error():
    model, receipts = build("llama", attention="rft"), Receipts()
    model.model.layers[0].mlp.act_fn = nn.Tanh()
    apply_swaps(model, receipts, kernels=True)
    assert isinstance(model.model.layers[1].mlp, GatedMLP)
    assert not isinstance(model.model.layers[0].mlp, GatedMLP)
    (declined,) = [d for d in receipts.declined if d.what == "gated mlp"]
    assert "differs by" in declined.why


class _Backwards(nn.Module):
    """A gated MLP whose names say the opposite of what it does."""

    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(32, 48), nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x):
        return self.down_proj(nn.functional.gelu(self.up_proj(x)) * self.gate_proj(x))


def test_roles_and_activation_are_found_by_comparing_and_not_by_name():
    original, model, receipts = _Backwards(), nn.Sequential(_Backwards()), Receipts()
    original.load_state_dict(model[0].state_dict())
    apply_swaps(model, receipts, matchers=[GATED_MLP])
    assert receipts.applied[0].how == "gelu_erf(up_proj) * gate_proj, down_proj"
    x = torch.randn(5, 32)
    assert_close(model(x), original(x), 1e-5)


@pytest.mark.slow
def test_a_scaled_window_or_cap_that_only_reaches_attention_is_handed_on():
    for family, name in (("gemma2", "softcap"), ("mistral", "sliding_window"), ("granite", "scaling")):
        model, _ = swapped(family)
        blocks = [m for m in model.modules() if isinstance(m, AttentionBlock)]
        values = {getattr(b.rft_plan.constants, name) for b in blocks}
        assert values - {None, 0.25}, family


@pytest.mark.slow
def test_partial_and_interleaved_rotation_and_layers_without_it_are_told_apart():
    plans = {
        f: [m.rft_plan for m in swapped(f)[0].modules() if isinstance(m, AttentionBlock)]
        for f in ("glm4", "cohere2", "smollm3")
    }
    assert {p.interleaved for p in plans["glm4"]} == {True}
    assert [p.rotation is None for p in plans["cohere2"]] == [False, True]
    assert [p.rotation is None for p in plans["smollm3"]] == [False, True]


@pytest.mark.parametrize("kind", some_always(["linear", "llama3", "yarn"], "llama3"))
def test_scaled_rotary_tables_are_served_as_they_are(kind):
    import transformers

    scaling = {
        "linear": {"rope_type": "linear", "factor": 2.0},
        "llama3": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        },
        "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    }[kind]  # fmt: skip
    register()
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, rope_parameters={"rope_theta": 10000.0, **scaling},
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="rft", dtype=torch.float32)
    ids, receipts = random_documents(40)[0][None], Receipts()
    with torch.no_grad():
        before = model(input_ids=ids, use_cache=False).logits
        apply_swaps(model, receipts, kernels=True)
        assert counts(receipts, "attention block") == "1/1"
        assert_close(model(input_ids=ids, use_cache=False).logits, before, 1e-5)


def test_swaps_with_kernels_are_verified_while_the_model_is_on_meta():
    import transformers

    from support.families import FAMILIES

    register()
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(FAMILIES["phi3"](), attn_implementation="rft")
    receipts = Receipts()
    apply_swaps(model, receipts, kernels=True)
    assert [counts(receipts, what) for what in WHAT] == ["5/5", "2/2", "2/2"]
    assert isinstance(model.model.layers[0].mlp, FusedGatedMLP)
    assert all(p.is_meta for p in model.parameters())
