"""LoRA through PEFT: which modules, injection on the untouched meta tree, and how adapters start."""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rft.adapters.files import adapter_tensors, load_adapter, read_adapter_config
from rft.config.adapter import LoraConfig
from rft.errors import ConfigError, ModelError, Refused
from rft.models.backbone import decoder_layers, find_base
from rft.models.describe import has_experts
from rft.models.receipts import Receipts
from rft.models.source import in_a_line, whole

ADAPTER = "default"


@dataclass(frozen=True)
class Targets:
    """Full names of the modules that get an adapter."""

    names: list[str]
    of: int
    """Linears in the decoder layers."""
    note: str


def find_targets(model: Any, targets: str | Sequence[str]) -> Targets:
    """Explicit module names for `adapter.targets`. PEFT's own "all-linear" would take routers and experts.

    Raises ConfigError for a name that matches nothing, with the nearest that exists.
    """
    linears = {name: m for name, m in model.named_modules() if _is_linear(m)}
    in_layers = _linears_in_layers(model)
    if targets == "all-linear":
        moe = has_experts(model)
        names = [n for n, in_attention, allowed in in_layers if allowed and (in_attention or not moe)]
        note = "every linear of the decoder layers"
        if moe:
            note = "attention only: this is a mixture of experts, and its experts and routers get no adapter"
        elif len(names) < len(in_layers):
            note += f", but {len(in_layers) - len(names)} whose inner kernels read their weight directly"
        if not names:
            raise Refused(
                'adapter.targets = "all-linear"',
                f"no linear found in the decoder layers of {type(model).__name__}",
                do="name the modules in adapter.targets",
            )
        return Targets(names, len(in_layers), note)
    embeddings = {name for name, m in model.named_modules() if isinstance(m, nn.Embedding)}
    known = [*linears, *embeddings]
    chosen: list[str] = []
    for target in targets:
        found = [n for n in known if n == target or n.endswith("." + target)]
        if not found:
            endings = sorted({n.rpartition(".")[2] for n in known})
            close = difflib.get_close_matches(target, endings, n=1)
            raise ConfigError(
                "adapter.targets",
                f"no linear or embedding is called {target!r}" + (f"; did you mean {close[0]!r}?" if close else ""),
                wanted=", ".join(endings),
            )
        chosen += [n for n in found if n not in chosen]
    return Targets(chosen, len(in_layers), "named in adapter.targets")


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _linears_in_layers(model: Any) -> list[tuple[str, bool, bool]]:
    """(name, whether it is part of attention, whether an adapter works there) of every linear in the decoder layers."""
    name_of = {id(m): n for n, m in model.named_modules()}
    found = []
    for layer in decoder_layers(model):
        for child_name, child in layer.named_children():
            attention = "attn" in child_name or "Attention" in type(child).__name__
            for name, module in child.named_modules():
                if _is_linear(module):
                    parent = child.get_submodule(name.rpartition(".")[0]) if name else layer
                    # Mamba's kernels take out_proj.weight and never call the module: PEFT refuses it there
                    allowed = not (hasattr(parent, "A_log") and name.endswith("out_proj"))
                    found.append((name_of[id(module)], attention, allowed))
    return found


def inject(
    model: Any,
    cfg: LoraConfig,
    *,
    dtype: torch.dtype = torch.float32,
    base_id: str | None = None,
    new_token_ids: Sequence[int] | None = None,
    receipts: Receipts | None = None,
) -> Any:
    """Wrap a (meta) model in PEFT and return the `PeftModel`; only adapters are trained, kept in `dtype`.

    new_token_ids: rows of the embeddings (and of an untied head) that are trained and saved with the adapter; None = those
    of the adapter at `adapter.path`, whatever they are.
    With `adapter.path` rank, alpha and targets are that adapter's. Values come later: `initialise`.
    """
    from peft import LoraConfig as PeftLoraConfig
    from peft import get_peft_model

    if cfg.path is not None:
        config = read_adapter_config(cfg)
        if new_token_ids is not None:
            _check_token_rows(cfg, config, new_token_ids)
        note = f"as in {cfg.path}"
        of = len(_linears_in_layers(model))
    else:
        targets = find_targets(model, cfg.targets)
        note, of = targets.note, targets.of
        conv = {type(m).__name__ == "Conv1D" for n, m in model.named_modules() if n in set(targets.names)}
        config = PeftLoraConfig(
            task_type="CAUSAL_LM",
            r=cfg.r,
            lora_alpha=cfg.alpha if cfg.alpha is not None else 2 * cfg.r,  # type: ignore[arg-type]
            lora_dropout=cfg.dropout,
            target_modules=targets.names,
            use_rslora=cfg.rslora,
            use_dora=cfg.dora,
            bias=cfg.bias,
            fan_in_fan_out=conv == {True},
            modules_to_save=_modules_to_save(model, cfg) or None,
        )
    if new_token_ids and getattr(config, "trainable_token_indices", None) is None:
        config.trainable_token_indices = _token_rows(model, new_token_ids)
    config.base_model_name_or_path = base_id
    try:
        wrapped = get_peft_model(model, config, autocast_adapter_dtype=False)
    except (ValueError, re.error) as error:  # a pattern that is none
        if cfg.path is None:
            raise
        problem = f"PEFT cannot put it on {type(model).__name__}: {in_a_line(error)}"
        raise ModelError(f"adapter.path = {cfg.path!r}", problem, wanted="an adapter of this model") from None
    set_trained_dtype(wrapped, dtype)
    count = sum(1 for m in wrapped.modules() if hasattr(m, "lora_A") and ADAPTER in (*m.lora_A, *m.lora_embedding_A))
    if receipts is not None:
        receipts.apply("lora", count, of, f"r = {config.r}, alpha = {config.lora_alpha:g}, {note}")
    return wrapped


def _check_token_rows(cfg: LoraConfig, config: Any, ids: Sequence[int]) -> None:
    """An adapter goes on with the rows that it was made with. Raises ConfigError for other added tokens."""
    rows = config.trainable_token_indices
    if rows is None:
        return
    saved = sorted({i for listed in (rows.values() if isinstance(rows, dict) else [rows]) for i in listed})
    if saved != sorted(ids):
        raise ConfigError(
            "model.add_tokens",
            f"gives the token ids {sorted(ids)}, but the adapter at {cfg.path} trains the rows {saved}",
            wanted="the tokens that the adapter was trained with, in their order",
            do="set model.add_tokens as in that run, or merge the adapter first and add tokens to the result",
        )


def _modules_to_save(model: Any, cfg: LoraConfig) -> list[str]:
    """Full names: PEFT compares endings without a dot, so that "norm" would take every "input_layernorm" too."""
    names = [n for n, _ in model.named_modules() if n]
    chosen: list[str] = []
    for wanted in cfg.modules_to_save:
        found = [n for n in names if n == wanted or n.endswith("." + wanted)]
        if not found:
            close = difflib.get_close_matches(wanted, sorted({n.rpartition(".")[2] for n in names}), n=1)
            raise ConfigError(
                "adapter.modules_to_save",
                f"no module is called {wanted!r}" + (f"; did you mean {close[0]!r}?" if close else ""),
            )
        chosen += [n for n in found if n not in chosen]
    return chosen


def _token_rows(model: Any, ids: Sequence[int]) -> dict[str, list[int]]:
    """PEFT's trainable_token_indices: the input embeddings, and the head too where it is a weight of its own."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = {id(m): n for n, m in model.named_modules()}
    rows = {names[id(embedding)].rpartition(".")[2]: sorted(ids)}
    if head is not None and head.weight is not embedding.weight:
        rows[names[id(head)].rpartition(".")[2]] = sorted(ids)
    return rows


def train_everything(model: Any, *, dtype: torch.dtype = torch.float32) -> Any:
    """Full fine-tuning: every parameter is trained, kept in `dtype`."""
    model.requires_grad_(True)
    return set_trained_dtype(model, dtype)


def set_trained_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Keep everything that is trained in one type, and return the model. A tied weight stays tied."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return model


@torch.no_grad()
def initialise(model: Any, cfg: LoraConfig, *, seed: int, local_part=whole) -> Any:
    """Give a materialised model's adapters their first values, or those of `adapter.path`; returns the model.

    Each tensor is drawn whole on the CPU from the seed and its name, so that values do not depend on how the model
    is sharded. `pissa`, `olora` and DoRA read whole base weights: Refused where a parameter is sharded.
    """
    if cfg.path is not None:
        load_adapter(model, cfg.path, local_part=local_part)
        return model
    layers = [(n, m) for n, m in model.named_modules() if hasattr(m, "lora_A") and hasattr(m, "reset_lora_parameters")]
    for name, layer in layers:
        _start_layer(name, layer, cfg, seed, local_part)
    if cfg.init in ("pissa", "olora"):
        model.rft_initial_adapter = {k: t.detach().clone() for k, t in adapter_tensors(model).items() if ".lora_" in k}
    return model


def _start_layer(name: str, layer: Any, cfg: LoraConfig, seed: int, local_part) -> None:
    reads_base = cfg.init in ("pissa", "olora") or cfg.dora
    base = layer.get_base_layer().weight if reads_base else None  # one in fewer bits is made anew by a look at it
    if base is not None and local_part(base)[0].shape != base.shape:
        what = "adapter.dora" if cfg.dora else f'adapter.init = "{cfg.init}"'
        raise Refused(
            what, "reads whole base weights, which no process holds when sharded", do='set parallel.data = "replicate"'
        )
    if ADAPTER in layer.lora_A:
        down, up = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
        if cfg.init == "pissa":
            layer.pissa_init(ADAPTER, "pissa")
        elif cfg.init == "olora":
            layer.olora_init(ADAPTER)
        else:
            generator = _generator(seed, name)
            if cfg.init == "gaussian":
                values = torch.randn(down.shape, generator=generator) / cfg.r
            else:  # as nn.Linear starts, and as PEFT starts A
                values = (torch.rand(down.shape, generator=generator) * 2 - 1) * down.shape[1] ** -0.5
            _put(down, values, local_part)
            _put(up, torch.zeros(up.shape), local_part)
        if layer.lora_B[ADAPTER].bias is not None:
            _put(layer.lora_B[ADAPTER].bias, torch.zeros(layer.lora_B[ADAPTER].bias.shape), local_part)
    if ADAPTER in layer.lora_embedding_A:
        down, up = layer.lora_embedding_A[ADAPTER], layer.lora_embedding_B[ADAPTER]
        _put(down, torch.zeros(down.shape), local_part)
        _put(up, torch.randn(up.shape, generator=_generator(seed, name)), local_part)
    if cfg.dora and ADAPTER in layer.lora_magnitude_vector:
        assert base is not None
        magnitude = layer.lora_magnitude_vector[ADAPTER].weight
        rows = base.T if getattr(layer, "fan_in_fan_out", False) else base
        magnitude.copy_(torch.linalg.vector_norm(rows.float(), dim=1).view_as(magnitude))


def _put(parameter: Tensor, values: Tensor, local_part) -> None:
    local, part = local_part(parameter)
    if local.numel():
        local.copy_(values[part].to(local))


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name -> parameter of everything that is trained; a tied parameter once."""
    return {n: p for n, p in model.named_parameters() if p.requires_grad}


def base_of(model: Any) -> nn.Module:
    """The decoder below PEFT and the causal LM."""
    return find_base(model)
