"""Adapters on disk, in PEFT's format: adapter_config.json and adapter_model.safetensors. Nothing is pickled."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rft.config.adapter import LoraConfig
from rft.errors import CheckpointError, ConfigError, ModelError
from rft.models.source import in_a_line, whole

ADAPTER = "default"
WEIGHTS = "adapter_model.safetensors"
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def adapter_tensors(model: Any) -> dict[str, Tensor]:
    """Name in the adapter file -> the model's own parameter."""
    from peft import get_peft_model_state_dict

    own = dict(model.named_parameters(remove_duplicate=False))
    return get_peft_model_state_dict(model, state_dict=own, adapter_name=ADAPTER, save_embedding_layers=False)


def read_adapter_config(cfg: LoraConfig) -> Any:
    """PEFT's config of `adapter.path`, ready to be trained on.

    Raises ModelError: not an adapter, pickled, not LoRA, tied to a changed base; ConfigError where `[adapter]` contradicts it.
    """
    from peft import LoraConfig as PeftLoraConfig

    directory = Path(str(cfg.path))
    where = f"adapter.path = {cfg.path!r}"
    if not (directory / "adapter_config.json").is_file():
        raise ModelError(where, "holds no adapter_config.json", wanted="a directory with an adapter in PEFT's format")
    if not (directory / WEIGHTS).is_file():
        if (directory / "adapter_model.bin").is_file():
            raise ModelError(
                str(directory / "adapter_model.bin"),
                "weights are pickled; a pickle can run code when it is read, so rft does not open it",
                wanted=WEIGHTS,
                do="load it with PEFT, if you trust it, and save it again",
            )
        raise ModelError(where, f"holds no {WEIGHTS}")
    raw = _read_json(directory / "adapter_config.json")
    if raw.get("peft_type") != "LORA":
        raise ModelError(where, f"is a {raw.get('peft_type')} adapter", wanted="LORA")
    if str(raw.get("init_lora_weights")).lower().startswith(_CHANGES_BASE):
        raise ModelError(
            where,
            f"was made with init_lora_weights = {raw['init_lora_weights']!r}, which belongs to a changed base",
            wanted="a plain LoRA (PEFT converts one when it is saved)",
        )
    if raw.get("target_parameters"):
        raise ModelError(where, "adapts bare parameters (target_parameters), which rft does not train yet")
    explicit = {
        "r": raw.get("r"),
        "alpha": raw.get("lora_alpha"),
        "dora": bool(raw.get("use_dora")),
        "rslora": bool(raw.get("use_rslora")),
    }
    for key, value in explicit.items():
        if key in cfg.model_fields_set and getattr(cfg, key) != value:
            raise ConfigError(
                f"adapter.{key}",
                f"is {getattr(cfg, key)}, but the adapter at {cfg.path} has {value}",
                do=f"leave adapter.{key} out",
            )
    try:
        config = PeftLoraConfig.from_pretrained(str(directory))
    except (TypeError, ValueError, KeyError, AttributeError) as error:  # PEFT checks little, in many ways
        problem = f"PEFT cannot read it: {in_a_line(error)}"
        raise ModelError(str(directory / "adapter_config.json"), problem, do="save the adapter again") from None
    config.inference_mode = False
    config.init_lora_weights = True
    return config


_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "r": ((int,), "a whole number above 0"),
    "lora_alpha": ((int, float), "a number"),
    "lora_dropout": ((int, float), "a number from 0 to 1"),
    "target_modules": ((list, str), "a list of module names, or a pattern"),
}


def _read_json(path: Path) -> dict[str, Any]:
    """adapter_config.json with what PEFT takes unseen and stumbles over later checked."""
    try:
        raw = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelError(str(path), f"is not JSON: {error}", do="save the adapter again") from None
    if not isinstance(raw, dict):
        raise ModelError(str(path), "is not what PEFT writes", wanted="a JSON object", do="save the adapter again")
    for key, (kinds, wanted) in _KINDS.items():
        value: Any = raw.get(key)
        if value is None:
            continue
        bad = isinstance(value, bool) or not isinstance(value, kinds)
        if bad or (key == "r" and value < 1) or (key == "lora_dropout" and not 0 <= value <= 1):
            raise ModelError(str(path), f"{key} is {value!r}", wanted=wanted, do="put it back as it was saved")
    return raw


@torch.no_grad()
def load_adapter(model: Any, directory: str | Path, *, local_part=whole) -> None:
    """Put the tensors of an adapter directory into the model, each process its own part. Raises ModelError where they do not fit."""
    from safetensors import SafetensorError, safe_open

    path = Path(directory) / WEIGHTS
    own = adapter_tensors(model)
    try:
        with safe_open(str(path), framework="pt") as handle:
            given = set(handle.keys())
            missing, foreign = sorted(set(own) - given), sorted(given - set(own))
            if missing or foreign:
                first = f"lacks {missing[0]!r}" if missing else f"has {foreign[0]!r}, which this model has no place for"
                raise ModelError(
                    str(path),
                    f"{first} ({len(missing)} missing, {len(foreign)} foreign)",
                    wanted="the adapter of this model",
                )
            for name, parameter in own.items():
                shape = tuple(handle.get_slice(name).get_shape())
                if shape != tuple(parameter.shape):
                    raise ModelError(
                        str(path), f"{name} has shape {list(shape)}, the model's is {list(parameter.shape)}"
                    )
                local, part = local_part(parameter)
                if local.numel():
                    values = handle.get_slice(name)[part] if part else handle.get_tensor(name)
                    if not bool(torch.isfinite(values).all()):
                        raise ModelError(
                            f"{path}: {name}",
                            "holds NaN or infinities: the adapter cannot be used or trained on",
                            do="go on from another one, or start anew without adapter.path",
                        )
                    local.copy_(values.to(local))
    except (SafetensorError, OSError) as error:
        raise ModelError(str(path), f"cannot be read as safetensors: {error}") from None


def save_adapter(
    model: Any,
    directory: str | Path,
    *,
    gather: Callable[[Tensor], Tensor] | None = None,
    write: bool = True,
    base_id: str | None = None,
) -> None:
    """Write the adapter so that stock PEFT loads it on the untouched base.

    gather: makes a sharded parameter whole; it is called for every tensor in the same order on every process.
    write: whether this process writes. base_id: hub id or path of the base, as `ModelSource.base_id`.
    Raises CheckpointError rather than write an adapter without numbers.
    """
    tensors = {}
    for name, parameter in sorted(adapter_tensors(model).items()):
        tensors[name] = (gather(parameter) if gather else parameter).detach().to("cpu").contiguous()
    config = copy.deepcopy(model.peft_config[ADAPTER])
    initial = getattr(model, "rft_initial_adapter", None)
    if initial:
        tensors = _relative_to_base(tensors, initial, config)
    if not tensors or any(t.numel() == 0 for t in tensors.values()):
        empty = next((n for n, t in tensors.items() if t.numel() == 0), "everything")
        raise CheckpointError(str(directory), f"the adapter to be saved is empty ({empty})")
    if not write:
        return
    from safetensors.torch import save_file

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config.inference_mode = True
    config.init_lora_weights = True
    config.base_model_name_or_path = base_id or config.base_model_name_or_path
    config.save_pretrained(str(directory))
    save_file(tensors, str(directory / WEIGHTS), metadata={"format": "pt"})


def _relative_to_base(tensors: dict[str, Tensor], initial: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """PiSSA and OLoRA took s B0 A0 out of the base. On the untouched base the same model is s (B A - B0 A0): a LoRA of rank 2r."""
    merged = dict(tensors)
    for name, start in initial.items():
        start = start.to("cpu", tensors[name].dtype)
        if name.endswith("lora_A.weight"):
            merged[name] = torch.cat([tensors[name], start], dim=0)
        elif name.endswith("lora_B.weight"):
            merged[name] = torch.cat([tensors[name], -start], dim=1)
    config.lora_alpha *= 2**0.5 if config.use_rslora else 2
    config.r *= 2
    return merged
