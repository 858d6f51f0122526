"""Facts about a model, read from its (meta) modules and config. Decides nothing."""

from __future__ import annotations

from typing import Any

from torch import nn

from rft.models.backbone import decoder_layers, find_base
from rft.models.facts import Facts
from rft.models.names import is_adapter_parameter


def describe(model: Any) -> Facts:
    """Facts of a model, wrapped by PEFT or not."""
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = causal.config.get_text_config()
    layers = decoder_layers(model)
    hidden = _first(config, "hidden_size", "n_embd", "d_model")
    heads = _first(config, "num_attention_heads", "n_head", default=1)
    experts = _first(config, "num_local_experts", "num_experts", "n_routed_experts", default=0) or 0
    chosen = _first(config, "num_experts_per_tok", "moe_topk", default=0) or 0
    moe = has_experts(model)
    own = [(n, p) for n, p in model.named_parameters() if not is_adapter_parameter(n)]
    frozen, trained = _matmul_weights(model, chosen / experts if moe and experts else 1.0)
    embedding, head = causal.get_input_embeddings(), causal.get_output_embeddings()
    return Facts(
        name=type(causal).__name__,
        model_type=config.model_type,
        num_layers=len(layers),
        hidden_size=hidden,
        vocab_size=config.vocab_size,
        max_positions=_first(config, "max_position_embeddings", "n_positions", "seq_length", default=None),
        num_parameters=sum(p.numel() for _, p in own),
        num_trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
        weight_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
        trained_bytes=sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad),
        matmul_frozen=frozen,
        matmul_trained=trained,
        num_heads=heads,
        head_size=getattr(config, "head_dim", None) or hidden // heads,
        is_moe=moe,
        num_experts=experts if moe else 0,
        experts_per_token=chosen if moe else 0,
        is_tied=head is not None and _weight(head) is _weight(embedding),
        num_kv_heads=_first(config, "num_key_value_heads", default=None) or heads,
        intermediate_size=_intermediate(config, hidden, chosen if moe else 0),
        **_inside_layers(layers, hidden),
        windows=_windows(config, len(layers)),
    )


def _inside_layers(layers: Any, hidden: int) -> dict[str, int]:
    """Widths of norms and adapters of a layer on average, and the frozen linears of all."""
    norms = qk = rank = frozen = largest = 0
    for layer in layers:
        for name, module in layer.named_modules():
            own = dict(module.named_parameters(recurse=False))
            if "lora_" in name:
                rank += module.out_features if ".lora_A." in f".{name}" and isinstance(module, nn.Linear) else 0
            elif "weight" in own and own["weight"].dim() == 1:
                width = own["weight"].shape[0]
                ending = name.rpartition(".")[2]
                if ending in _QK_NORMS:
                    heads = _width_out(layer, name, ending)
                    qk += heads or width
                elif width == hidden:
                    norms += width
            elif isinstance(module, nn.Linear) and not own["weight"].requires_grad:
                frozen += own["weight"].numel()
                largest = max(largest, own["weight"].numel())
    count = max(len(layers), 1)
    return {
        "norm_width": round(norms / count),
        "qk_norm_width": round(qk / count),
        "layer_rank": round(rank / count),
        "linear_frozen": frozen,
        "largest_linear": largest,
    }


_QK_NORMS = {"q_norm": "q_proj", "k_norm": "k_proj", "q_layernorm": "q_proj", "k_layernorm": "k_proj"}


def _width_out(layer: nn.Module, name: str, ending: str) -> int:
    """Width of the projection that a norm of q or k reads; 0 where it is joined with others."""
    parent = layer.get_submodule(name.rpartition(".")[0])
    projection: Any = getattr(parent, _QK_NORMS[ending], None)
    base = projection.get_base_layer() if hasattr(projection, "get_base_layer") else projection
    return getattr(base, "out_features", 0) or 0


def _windows(config: Any, num_layers: int) -> tuple[int | None, ...]:
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if not window or getattr(config, "use_sliding_window", True) is False:
        return ()
    if kinds is None:
        return (window,) * num_layers
    return tuple(window if "sliding" in kind or "chunked" in kind else None for kind in kinds)


def _intermediate(config: Any, hidden: int, chosen: int) -> int:
    """Width of what a token is between the linears of its MLP, or of all experts that it meets."""
    dense = _first(config, "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", default=None) or 4 * hidden
    if not chosen:
        return dense
    shared = _first(config, "shared_expert_intermediate_size", "shared_intermediate_size", default=0) or 0
    return chosen * (_first(config, "moe_intermediate_size", default=None) or dense) + shared


def has_experts(model: Any) -> bool:
    """Whether a decoder layer routes tokens to experts: a weight with an experts dim, or a list of experts."""
    for layer in decoder_layers(model):
        for name, module in layer.named_modules():
            stacked = any(p.dim() == 3 for p in module.parameters(recurse=False)) and not isinstance(module, nn.Conv1d)
            if stacked or (name.rpartition(".")[2] == "experts" and isinstance(module, nn.ModuleList)):
                return True
    return False


def _weight(module: nn.Module) -> Any:
    """The parameter of an embedding or head, through PEFT's wrappers."""
    for attribute in ("original_module", "base_layer"):
        inner = getattr(module, attribute, None)
        if isinstance(inner, nn.Module):
            return _weight(inner)
    return module.weight


def _matmul_weights(model: Any, share: float) -> tuple[int, int]:
    """(frozen, trained) weights that a token meets: 2-D weights of linears and, by `share`, stacked experts."""
    counts = [0.0, 0.0]
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = causal.get_output_embeddings()
    for layer in decoder_layers(model):
        for module in layer.modules():
            for parameter in module.parameters(recurse=False):
                if parameter.dim() == 2:
                    counts[parameter.requires_grad] += parameter.numel()
                elif parameter.dim() == 3 and not isinstance(module, nn.Conv1d):
                    counts[parameter.requires_grad] += parameter.numel() * share
    if head is not None:
        weight = _weight(head)
        counts[weight.requires_grad] += weight.numel()
    return int(counts[0]), int(counts[1])


def _first(config: Any, *names: str, **default: Any) -> Any:
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    if "default" in default:
        return default["default"]
    raise AttributeError(f"{type(config).__name__} has none of {', '.join(names)}")


def base_name(model: Any) -> str:
    """Class name of the decoder."""
    return type(find_base(model)).__name__
