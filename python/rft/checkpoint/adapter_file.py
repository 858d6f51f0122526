"""A LoRA adapter as it lies on disk, in PEFT's format, read as what it does to each base tensor. No model is built."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rft.errors import ModelError

PREFIX = "base_model.model."


@dataclass
class Edit:
    """What an adapter does to one base tensor. Everything is optional; rows are those of the tensor as it is stored.

    A, B: low-rank update `scale * B @ A` (transposed where the base layer keeps its weight as [in, out]).
    replacement: the whole tensor, trained (modules_to_save, resized embeddings, biases).
    token_rows: row index -> trained row. magnitude: DoRA's norm of each output row.
    """

    A: Tensor | None = None
    B: Tensor | None = None
    scale: float = 1.0
    transposed: bool = False
    replacement: Tensor | None = None
    token_rows: dict[int, Tensor] = field(default_factory=dict)
    magnitude: Tensor | None = None

    def num_rows(self, base_rows: int) -> int:
        """Rows of the result: added tokens make an embedding longer."""
        if self.replacement is not None:
            base_rows = self.replacement.shape[0] if self.replacement.dim() else base_rows
        return max(base_rows, 1 + max(self.token_rows, default=-1))

    def apply(self, start: int, stop: int, base: Callable[[int, int], Tensor]) -> Tensor:
        """Rows start..stop of the result in fp32. base(start, stop): the same rows of the base tensor."""
        rows = (self.replacement[start:stop] if self.replacement is not None else base(start, stop)).float()
        if self.A is not None and self.B is not None:
            rows = rows + self.scale * self._update(start, stop)
        if self.magnitude is not None:
            norm = torch.linalg.vector_norm(rows, dim=1)
            rows = rows * (self.magnitude[start:stop].float() / norm)[:, None]
        if self.token_rows:
            rows = rows.clone()  # what was read may be a view of the file
        for index, row in self.token_rows.items():
            if start <= index < stop:
                rows[index - start] = row.float()
        return rows

    def _update(self, start: int, stop: int) -> Tensor:
        assert self.A is not None
        assert self.B is not None
        if self.transposed:
            return self.A[:, start:stop].float().T @ self.B.float().T
        return self.B[start:stop].float() @ self.A.float()


@dataclass(frozen=True)
class AdapterFile:
    """`edits`: by the name of the base parameter (module name + ".weight" or ".bias") in the live model."""

    path: Path
    config: dict[str, Any]
    edits: dict[str, Edit]

    @property
    def base(self) -> str:
        """What the adapter says it was trained on: a hub id or a path."""
        return self.config.get("base_model_name_or_path") or ""


def read_adapter(path: Path) -> AdapterFile:
    """Read adapter_config.json and adapter_model.safetensors.

    Raises ModelError for pickled weights, for other methods than LoRA, and for variants whose merge is not written.
    """
    config_path = path / "adapter_config.json"
    if not config_path.is_file():
        raise ModelError(str(path), "holds no adapter", wanted="adapter_config.json and adapter_model.safetensors")
    try:
        config = json.loads(config_path.read_text(encoding="utf-8"))
    except ValueError as error:  # JSON and UTF-8 errors alike
        raise ModelError(str(config_path), f"is not JSON: {error}") from None
    _refuse_what_is_not_plain(config_path, config)
    tensors = _tensors(path)
    edits: dict[str, Edit] = {}
    for key, tensor in tensors.items():
        _sort_in(edits, key.removeprefix(PREFIX), tensor, config, config_path)
    if not edits:
        raise ModelError(str(path), "the adapter file holds no tensor", do="train it again: the save was empty")
    return AdapterFile(path, config, edits)


def _refuse_what_is_not_plain(where: Path, config: dict[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise ModelError(str(where), f"peft_type is {config.get('peft_type')!r}", wanted='"LORA"')
    for key in ("target_parameters", "alora_invocation_tokens", "layer_replication", "lora_ga_config", "arrow_config"):
        if config.get(key):
            raise ModelError(str(where), f"{key} is set; rft merge does not know how to merge it", do="merge with PEFT")
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init.startswith(("pissa", "olora", "corda", "loftq", "eva")) and init != "eva":
        raise ModelError(
            str(where),
            f"init_lora_weights = {init!r}: the adapter belongs to base weights that this initialisation has changed",
            do="convert it to a plain LoRA with PEFT (path_initial_model_for_weight_conversion), then merge",
        )


def _tensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = path / "adapter_model.safetensors"
    if not file.is_file():
        if (path / "adapter_model.bin").is_file():
            raise ModelError(
                str(path / "adapter_model.bin"),
                "is pickled; a pickle can run code when it is read, so rft does not open it",
                wanted="adapter_model.safetensors",
                do="convert once, if you trust the file: load it with PEFT and call save_pretrained(folder, safe_serialization=True)",
            )
        raise ModelError(str(path), "adapter_model.safetensors is missing")
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise ModelError(str(file), f"cannot be read as safetensors: {error}") from None


def _sort_in(edits: dict[str, Edit], key: str, tensor: Tensor, config: dict[str, Any], where: Path) -> None:
    """Put one tensor of the adapter file where it belongs."""
    if match := re.fullmatch(r"(.+)\.lora_(A|B)\.weight", key):
        module, side = match.groups()
        edit = edits.setdefault(f"{module}.weight", Edit())
        edit.transposed = bool(config.get("fan_in_fan_out"))
        setattr(edit, side, tensor)
        edit.scale = scaling(module, config)
    elif match := re.fullmatch(r"(.+)\.lora_embedding_(A|B)", key):
        # an embedding's update is (B @ A)^T over its [vocabulary, hidden] weight: A is [r, vocabulary]
        module, side = match.groups()
        edit = edits.setdefault(f"{module}.weight", Edit())
        edit.transposed = True
        setattr(edit, side, tensor)
        edit.scale = scaling(module, config)
    elif match := re.fullmatch(r"(.+)\.lora_magnitude_vector(?:\.weight)?", key):
        edits.setdefault(f"{match[1]}.weight", Edit()).magnitude = tensor.reshape(-1)
    elif match := re.fullmatch(r"(.+?)(?:\.token_adapter)?\.trainable_tokens_delta", key):
        edits.setdefault(f"{match[1]}.weight", Edit()).token_rows = dict(
            zip(token_indices(match[1], config), tensor, strict=True)
        )
    elif ".lora_" in key:
        raise ModelError(str(where.parent), f"holds {key}, which rft merge does not know", do="merge with PEFT")
    else:
        name = key.replace(".base_layer.", ".").replace(".original_module.", ".")
        name = re.sub(r"\.modules_to_save\.(\w+)$", r".\1", name)
        edits.setdefault(name, Edit()).replacement = tensor


def scaling(module: str, config: dict[str, Any]) -> float:
    """alpha / r, or alpha / sqrt(r) for rsLoRA, after the adapter's own patterns by module name."""
    rank = _by_pattern(module, config.get("rank_pattern"), config["r"])
    alpha = _by_pattern(module, config.get("alpha_pattern"), config["lora_alpha"])
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def _by_pattern(module: str, patterns: dict[str, Any] | None, default: Any) -> Any:
    """PEFT's rule: the first pattern that matches the whole name or its end, from a dot on."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def token_indices(module: str, config: dict[str, Any]) -> list[int]:
    """Rows that `trainable_token_indices` names for this module: a list is for the input embedding, a dict by module name."""
    indices = config.get("trainable_token_indices") or []
    if isinstance(indices, dict):
        for name, listed in indices.items():
            if module == name or module.endswith(f".{name}"):
                return listed
        return next(iter(indices.values()), [])
    return indices
