"""A small copy of an architecture: the model's own config class with reduced sizes, random fp32 weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rft.errors import Refused

WINDOW = 8
"""Sliding windows and attention chunks of a small copy, so that short documents are longer than they are."""

_VOCABULARY = 128
_WIDTHS = (
    "intermediate_size", "intermediate_size_mlp", "moe_intermediate_size", "shared_expert_intermediate_size",
    "shared_intermediate_size", "moe_shared_expert_intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "block_ff_dim",
)  # fmt: skip
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
_PERIODS = (
    "sliding_window_pattern", "full_attention_interval", "decoder_sparse_step", "interleave_moe_layer_step",
    "attn_layer_period", "expert_layer_period", "global_attn_every_n_layers", "no_rope_layer_interval",
)  # fmt: skip
_MOST_LAYERS = 16
_MOST_BYTES = 2 << 30


def _small_configs(config: Any) -> list[Callable[[], Any]]:
    """Configs to try, smallest first: every size reduced; with all layers (some configs tie layers together); depth alone."""
    return [
        lambda: _rebuilt(config, {**_fewer_layers(config), **_smaller_sizes(config)}),
        lambda: _rebuilt(config, {**_small_windows(config), **_smaller_sizes(config)}),
        lambda: _rebuilt(config, _fewer_layers(config)),
    ]


def build_small(config: Any, device: torch.device | str, *, trust_remote_code: bool = False, seed: int = 0) -> Any:
    """A random small model of this architecture in fp32, eval mode, its attention "rft" where it takes that, else "eager".

    Raises Refused where none can be built.
    """
    from rft.models.attention import NAME, register

    register()
    problems = []
    for attempt in _small_configs(config):
        for attention in (NAME, "eager"):
            try:
                return _build(attempt(), attention, device, trust_remote_code, seed)
            except Refused:
                raise
            except Exception as error:  # a config that does not fit its own model can raise anything
                problems.append(f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0][:160]}")
    raise Refused(
        config.model_type,
        f"no small copy of this architecture can be built, so nothing about it can be proved ({problems[0]})",
        do="see to the model's config.json if it was changed; else report the architecture",
    )


def _build(config: Any, attention: str, device: torch.device | str, trust_remote_code: bool, seed: int) -> Any:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        sketch = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    size = 4 * sum(p.numel() for p in sketch.parameters())
    if size > _MOST_BYTES:
        raise ValueError(f"its small copy takes {size / 2**30:.0f} GiB")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, dtype=torch.float32, trust_remote_code=trust_remote_code
        )
    _randomise(model, seed)
    model.to(device).eval()
    with torch.no_grad():
        model(input_ids=torch.arange(3, 3 + 2 * WINDOW, device=device)[None], use_cache=False)
    return model


def _rebuilt(config: Any, changes: dict[str, Any]) -> Any:
    values = {**copy.deepcopy(config.to_dict()), **changes}
    for key in ("transformers_version", "architectures", "quantization_config", "dtype", "torch_dtype"):
        values.pop(key, None)
    return type(config).from_dict(values)


def _get(config: Any, *names: str) -> Any:
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    return None


def _fewer_layers(config: Any) -> dict[str, Any]:
    """As few layers as show every kind of layer."""
    values = config.to_dict()
    total = _get(config, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    lists = {k: v for k, v in values.items() if isinstance(v, list) and len(v) == total and total > 1}
    kinds = [tuple(str(v[i]) for v in lists.values()) for i in range(total)]
    layers = next(n for n in range(1, total + 1) if set(kinds[:n]) == set(kinds))
    layers = max(layers, 2, *(int(values.get(p) or 0) for p in _PERIODS))
    indices = values.get("attn_layer_indices")
    if indices:
        layers = max(layers, min(indices) + 1)
    layers = min(layers, total, max(_MOST_LAYERS, 2))
    changes: dict[str, Any] = {k: v[:layers] for k, v in lists.items()}
    if indices:
        changes["attn_layer_indices"] = [i for i in indices if i < layers]
    for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
        if isinstance(values.get(name), int):
            changes[name] = layers
    if values.get("first_k_dense_replace"):
        changes["first_k_dense_replace"] = 1
    if values.get("mlp_only_layers"):
        changes["mlp_only_layers"] = [i for i in values["mlp_only_layers"] if i < layers]
    for name, value in values.items():
        if isinstance(value, dict) and value and all(str(k).isdigit() for k in value):
            changes[name] = {k: v for k, v in value.items() if int(k) < layers}  # settings of single layers
    return {**changes, **_small_windows(config)}


def _small_windows(config: Any) -> dict[str, Any]:
    """A small vocabulary, and windows shorter than a test document."""
    values = config.to_dict()
    changes: dict[str, Any] = {"vocab_size": _VOCABULARY}
    for token, name in enumerate(("pad_token_id", "bos_token_id", "eos_token_id")):
        if values.get(name) is not None:
            changes[name] = token
    for name in ("vocab_size_per_layer_input",):
        if isinstance(values.get(name), int):
            changes[name] = _VOCABULARY
    for name in ("sliding_window", "attention_chunk_size"):
        if isinstance(values.get(name), int):
            changes[name] = min(WINDOW, values[name])
    return changes


def _smaller_sizes(config: Any) -> dict[str, Any]:
    """Fewer heads of the same size (so that rotary tables keep their shape), narrow MLPs, few experts."""
    values = config.to_dict()
    hidden, heads = (
        _get(config, "hidden_size", "n_embd", "d_model"),
        _get(config, "num_attention_heads", "n_head", "n_heads"),
    )
    changes: dict[str, Any] = {}
    if hidden and heads:
        kv_heads = _get(config, "num_key_value_heads") or heads
        size = values.get("head_dim") or hidden // heads
        few_kv = min(kv_heads, 2)
        few = few_kv * min(max(heads // kv_heads, 1), 2)
        # latent attention (q_lora_rank) has a head size of its own
        width = few * (size if not values.get("qk_nope_head_dim") else 64)
        for names, value in (
            (("hidden_size", "n_embd", "d_model"), width),
            (("num_attention_heads", "n_head", "n_heads"), few),
        ):
            changes.update({n: value for n in names if isinstance(values.get(n), int)})
        if isinstance(values.get("num_key_value_heads"), int):
            changes["num_key_value_heads"] = few_kv
        changes.update(_smaller_state_spaces(values, width))
    changes.update({n: min(values[n], 128) for n in _WIDTHS if isinstance(values.get(n), int)})
    changes.update({n: min(values[n], 4) for n in _EXPERTS if isinstance(values.get(n), int)})
    changes.update({n: min(values[n], 2) for n in _CHOSEN if isinstance(values.get(n), int)})
    if isinstance(values.get("n_group"), int):
        changes.update(n_group=min(values["n_group"], 2), topk_group=1)
    changes.update({n: min(values[n], 32) for n in ("q_lora_rank", "kv_lora_rank") if isinstance(values.get(n), int)})
    return changes


def _smaller_state_spaces(values: dict[str, Any], width: int) -> dict[str, Any]:
    """Mamba and DeltaNet sizes that fit a hidden size of `width`."""
    changes: dict[str, Any] = {}
    if isinstance(values.get("mamba_n_heads"), int):
        inner = width * int(values.get("mamba_expand") or 2)
        head = 32 if inner % 32 == 0 else inner
        changes.update(mamba_n_heads=inner // head, mamba_d_head=head, mamba_n_groups=1)
        if isinstance(values.get("mamba_d_ssm"), int):
            changes["mamba_d_ssm"] = inner
        if isinstance(values.get("mamba_d_state"), int):
            changes["mamba_d_state"] = min(values["mamba_d_state"], 16)
    if isinstance(values.get("linear_num_value_heads"), int):
        changes.update(
            linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=32
        )
    return changes


def _randomise(model: nn.Module, seed: int) -> None:
    """Weights that keep activations near one, so that a leak between documents is large; norms and biases off their defaults."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point():
                continue
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() <= 1:
                parameter.add_(noise * 0.1)
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
