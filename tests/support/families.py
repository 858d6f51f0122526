"""Tiny configs of decoder families for `transformers`, one entry each: 2 layers, hidden 64, vocabulary 128, windows of 8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

from support.tiny import randomise

VOCABULARY = 128
WINDOW = 8


def _values(**values: Any) -> dict[str, Any]:
    return values


_BASE: dict[str, Any] = _values(
    vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
_ALTERNATING = ["sliding_attention", "full_attention"]
_MAMBA: dict[str, Any] = _values(mamba_d_head=16, mamba_n_groups=1, mamba_d_state=16, mamba_chunk_size=16)
_DELTA: dict[str, Any] = _values(
    head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
    layer_types=["linear_attention", "full_attention"],
)  # fmt: skip
_FOUR_EXPERTS: dict[str, Any] = _values(num_experts_per_tok=2, moe_intermediate_size=48)


def _family(class_name: str, without: tuple[str, ...] = (), **values: Any) -> Callable[[], Any]:
    def make() -> Any:
        merged = {k: v for k, v in {**_BASE, **values}.items() if k not in without}
        return getattr(transformers, class_name)(**merged)

    return make


def _gpt2() -> Any:
    return transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=256, bos_token_id=1, eos_token_id=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": _family("LlamaConfig", head_dim=16),
    "mistral": _family("MistralConfig", head_dim=16, sliding_window=WINDOW),
    "qwen2": _family("Qwen2Config"),
    "qwen3": _family("Qwen3Config", head_dim=16),
    "gemma2": _family("Gemma2Config", head_dim=16, sliding_window=WINDOW, query_pre_attn_scalar=16, layer_types=_ALTERNATING),
    "gemma3_text": _family("Gemma3TextConfig", head_dim=16, sliding_window=WINDOW, query_pre_attn_scalar=16, layer_types=_ALTERNATING),
    "phi3": _family("Phi3Config", sliding_window=WINDOW),
    "olmo2": _family("Olmo2Config"),
    "olmo3": _family("Olmo3Config", sliding_window=WINDOW, layer_types=_ALTERNATING),
    "smollm3": _family("SmolLM3Config", no_rope_layers=[1, 0], layer_types=["full_attention"] * 2),
    "gpt2": _gpt2,
    "gpt_neox": _family("GPTNeoXConfig", without=("num_key_value_heads",)),
    "mixtral": _family("MixtralConfig", num_local_experts=4, num_experts_per_tok=2, head_dim=16),
    "qwen3_moe": _family("Qwen3MoeConfig", num_experts=4, head_dim=16, decoder_sparse_step=1, mlp_only_layers=[], **_FOUR_EXPERTS),
    "gpt_oss": _family(
        "GptOssConfig", num_local_experts=4, num_experts_per_tok=2, head_dim=16, sliding_window=WINDOW, layer_types=_ALTERNATING,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "granite": _family("GraniteConfig", embedding_multiplier=3.0, logits_scaling=5.0, residual_multiplier=0.5, attention_multiplier=0.2),
    "cohere2": _family("Cohere2Config", sliding_window=WINDOW, layer_types=_ALTERNATING, logit_scale=0.25),
    "glm4": _family("Glm4Config", head_dim=16, partial_rotary_factor=0.5),
    "glm4_moe": _family("Glm4MoeConfig", head_dim=16, n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1, n_shared_experts=1, **_FOUR_EXPERTS),
    "deepseek_v3": _family(
        "DeepseekV3Config", num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
        n_routed_experts=4, n_group=2, topk_group=1, first_k_dense_replace=1, n_shared_experts=1, **_FOUR_EXPERTS,
    ),
    "llama4_text": _family(
        "Llama4TextConfig", head_dim=16, intermediate_size_mlp=96, num_local_experts=4, num_experts_per_tok=1, interleave_moe_layer_step=2,
        attention_chunk_size=WINDOW, layer_types=["chunked_attention", "full_attention"], no_rope_layers=[1, 0],
    ),
    "starcoder2": _family("Starcoder2Config", sliding_window=WINDOW),
    "stablelm": _family("StableLmConfig"),
    "qwen3_next": _family("Qwen3NextConfig", num_experts=4, shared_expert_intermediate_size=48, **_FOUR_EXPERTS, **_DELTA),
    "qwen3_5": _family("Qwen3_5TextConfig", **_DELTA),
    "falcon_h1": _family(
        "FalconH1Config", mamba_d_ssm=64, mamba_n_heads=4, lm_head_multiplier=0.5, embedding_multiplier=2.0, key_multiplier=0.5, **_MAMBA
    ),
    "bamba": _family("BambaConfig", mamba_n_heads=8, attn_layer_indices=[1], **_MAMBA),
    "granitemoehybrid": _family(
        "GraniteMoeHybridConfig", mamba_n_heads=8, layer_types=["mamba", "attention"], num_local_experts=4, num_experts_per_tok=2,
        shared_intermediate_size=48, **_MAMBA,
    ),
    "lfm2": _family("Lfm2Config", layer_types=["conv", "full_attention"]),
}  # fmt: skip


def build(family: str, *, attention: str = "eager", seed: int = 0) -> Any:
    """A random fp32 causal LM of the family in eval mode; every parameter is random, norms and biases too."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(
            FAMILIES[family](), attn_implementation=attention, dtype=torch.float32
        )
    return randomise(model, seed).eval()
