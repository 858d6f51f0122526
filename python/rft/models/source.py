"""Where a model's weights are: a directory, the hub's local cache, or a GGUF file; read by (name, slice), never by pickle."""

from __future__ import annotations

import copy
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from rft.config.explain import nearest_path
from rft.config.model import ModelConfig
from rft.errors import ModelError
from rft.models.rope import scale_rope
from rft.models.tensor_reader import Slices, TensorReader

_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "tokenizer*"]


@dataclass(frozen=True)
class ModelSource:
    """A model that was found. Nothing of its weights is in memory."""

    kind: Literal["directory", "hub", "gguf"]
    path: Path
    """The directory that holds config.json (a snapshot in the cache for hub ids), or the GGUF file."""
    config: Any
    """`transformers` config."""
    reader: TensorReader
    hub_id: str | None = None
    revision: str | None = None
    rope: str = ""
    """What was done to its positions."""

    @property
    def base_id(self) -> str:
        """How an adapter names its base: the hub id, never a cache path; else the absolute path."""
        return self.hub_id or str(self.path.resolve())


class SafetensorsReader:
    """The safetensors files of one directory. Files are mapped, so a slice reads only its own bytes."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._file_of = _weight_map(directory)
        self._handles: dict[str, Any] = {}

    def names(self) -> list[str]:
        return list(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._handle(name).get_slice(name).get_shape())

    def read(self, name: str, part: Slices | None = None) -> Tensor:
        handle = self._handle(name)
        if part is None or not part:
            return handle.get_tensor(name)
        return handle.get_slice(name)[part]

    def _handle(self, name: str) -> Any:
        from safetensors import SafetensorError, safe_open

        file = self._file_of[name]
        if file not in self._handles:
            path = self._directory / file
            try:
                self._handles[file] = safe_open(str(path), framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelError(str(path), f"cannot be read as safetensors: {error}", do="download it again") from None
        return self._handles[file]

    def __getstate__(self):
        return {"_directory": self._directory, "_file_of": self._file_of, "_handles": {}}


def find_model(cfg: ModelConfig) -> ModelSource:
    """Find `model.path`: an existing directory, a .gguf file, or a hub id (its cached snapshot, else a download).

    Its config reaches as far as `model.rope` says. Raises ModelError: nothing there, no config, pickled weights only, a config that
    needs code from the model; ConfigError where the positions cannot be scaled so.
    """
    found = _find(cfg)
    if cfg.rope.target_length is None:
        return found
    config = copy.deepcopy(found.config)
    return replace(found, config=config, rope=scale_rope(config, cfg.rope))


def _find(cfg: ModelConfig) -> ModelSource:
    path = Path(cfg.path).expanduser()
    if path.is_dir():
        return _from_directory(path, cfg)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(
                f"model.path = {cfg.path!r}",
                "is a file but not a GGUF file",
                wanted="a directory, a .gguf file or a hub id",
            )
        from rft.models.gguf import open_gguf

        config, reader = open_gguf(path)
        return ModelSource("gguf", path, config, reader)
    if path.is_absolute() or cfg.path.startswith((".", "~")) or cfg.path.count("/") > 1 or cfg.path.endswith(".gguf"):
        raise ModelError(
            f"model.path = {cfg.path!r}", "no such file or directory", wanted="a directory, a .gguf file or a hub id"
        )
    snapshot = _snapshot(cfg)
    return _from_directory(snapshot, cfg, hub_id=cfg.path)


def _snapshot(cfg: ModelConfig) -> Path:
    """Directory of a hub id's files: the local cache first, so that no network is needed once it is there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    where = f"model.path = {cfg.path!r}"
    try:
        found = Path(
            snapshot_download(cfg.path, revision=cfg.revision, local_files_only=True, allow_patterns=_HUB_FILES)
        )
        if (found / "config.json").is_file() and _complete(found):
            return found
    except HFValidationError:
        raise ModelError(
            where, "no such directory or file, and not a hub id", wanted="a directory, a .gguf file or owner/name"
        ) from None
    except LocalEntryNotFoundError:
        pass
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        raise ModelError(
            where,
            "is no directory, and not in the local cache (HF_HUB_OFFLINE is set)",
            do=_did_you_mean(cfg.path) or f"hf download {cfg.path}, or give a directory",
        )
    try:
        return Path(snapshot_download(cfg.path, revision=cfg.revision, allow_patterns=_HUB_FILES))
    except (
        Exception
    ) as error:  # the hub client raises many kinds (HTTP, connection, gated, not found): each ends the run here
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise ModelError(
            where,
            f"is no directory, not in the local cache, and could not be downloaded: {reason}",
            do=_did_you_mean(cfg.path) or "give a directory, or check the id, the network and your access",
        ) from None


def _did_you_mean(path: str) -> str:
    """A mistyped path looks like a hub id: the folder or file of a similar name here, or ""."""
    near = nearest_path(Path.cwd() / path)
    return f"did you mean {os.path.relpath(near)}? It is here" if near else ""


def _complete(directory: Path) -> bool:
    """Whether every weight file that the index names is there."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        files = set(json.loads(index.read_text())["weight_map"].values())
        return all((directory / f).is_file() for f in files)
    return any(directory.glob("*.safetensors"))


def _from_directory(directory: Path, cfg: ModelConfig, hub_id: str | None = None) -> ModelSource:
    if not (directory / "config.json").is_file():
        if (directory / "adapter_config.json").is_file():
            raise ModelError(
                str(directory),
                "is an adapter, not a model",
                do="set model.path to its base model, and adapter.path to this directory",
            )
        gguf = sorted(directory.glob("*.gguf"))
        hint = f'set model.path = "{gguf[0]}"' if gguf else ""
        raise ModelError(str(directory), "has no config.json", wanted="a Hugging Face model directory", do=hint)
    config = read_config(directory, cfg)
    _refuse_what_is_not_text(directory, config)
    kind: Literal["hub", "directory"] = "hub" if hub_id else "directory"
    reader: TensorReader = SafetensorsReader(directory)
    if _quantised_by(config):
        from rft.models.bitsandbytes_files import BitsandbytesReader

        reader = BitsandbytesReader(reader, str(directory))
        del config.quantization_config  # what is built, and saved, holds plain weights
    _check_layers(directory, config, len(reader.names()))
    return ModelSource(kind, directory, config, reader, hub_id, cfg.revision)


def _check_layers(directory: Path, config: Any, num_tensors: int) -> None:
    """A layer has a tensor at least. Millions of layers would be built before anything else is compared."""
    layers = getattr(config, "num_hidden_layers", 0)
    if isinstance(layers, int) and layers > num_tensors:
        raise ModelError(
            str(directory / "config.json"),
            f"num_hidden_layers is {layers:,}, and the checkpoint has {num_tensors:,} tensors in all",
            wanted="weights and config.json of the same model",
            do=_CONFIG_DO,
        )


def read_config(directory: Path, cfg: ModelConfig) -> Any:
    """The `transformers` config of a directory. Raises ModelError naming an unknown architecture or one that needs its own code."""
    from transformers import AutoConfig

    path = directory / "config.json"
    try:
        raw = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelError(str(path), f"is not JSON: {error}", do="download it again") from None
    if not isinstance(raw, dict):
        raise ModelError(str(path), "is no JSON object", wanted="the config of a model", do="download it again")
    kind = raw.get("model_type", "unknown")
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=cfg.trust_remote_code)
    except (
        Exception
    ) as error:  # many kinds, among them those of a validator of its own: each says what the file has wrong
        if raw.get("auto_map") and not cfg.trust_remote_code:
            raise ModelError(
                str(directory),
                f"model type {kind!r} needs Python code that comes with the model, which is off",
                do="read that code, then set model.trust_remote_code = true",
            ) from None
        import transformers

        raise ModelError(
            str(path),
            f"transformers {transformers.__version__} cannot read a model of type {kind!r}: {in_a_line(error)}",
            do="see to config.json if it was changed; upgrade transformers if the model is newer",
        ) from None
    _check_sizes(path, config)
    _check_kinds(path, raw, config)
    return config


def in_a_line(error: BaseException, limit: int = 300) -> str:
    """What a library's exception says, without its line breaks."""
    text = " ".join(str(error).split())
    return text[:limit] if text else type(error).__name__


_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "n_embd", "n_head", "n_layer", "n_positions", "d_model",
)  # fmt: skip


def _check_sizes(path: Path, config: Any) -> None:
    """Sizes that no model can have; a library would stumble over them late, each in words of its own."""
    for name in _SIZES:
        value = getattr(config, name, None)
        if value is None or isinstance(value, list | tuple):  # a list: a size of each layer
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(str(path), f"{name} is {value!r}", wanted="a whole number above 0", do=_CONFIG_DO)
    heads, groups = getattr(config, "num_attention_heads", None), getattr(config, "num_key_value_heads", None)
    if isinstance(heads, int) and isinstance(groups, int) and heads % groups:
        raise ModelError(
            str(path),
            f"num_key_value_heads = {groups} does not divide num_attention_heads = {heads}",
            wanted="as many query heads for each key-value head",
            do=_CONFIG_DO,
        )


def _check_kinds(path: Path, raw: dict[str, Any], config: Any) -> None:
    """What transformers does not look at before it uses it."""
    names = raw.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ModelError(str(path), f"architectures is {names!r}", wanted="a list of class names", do=_CONFIG_DO)
    window = getattr(config, "sliding_window", None)
    if window is not None and (not isinstance(window, int) or isinstance(window, bool)):
        raise ModelError(str(path), f"sliding_window is {window!r}", wanted="a whole number, or null", do=_CONFIG_DO)
    for name, value in raw.items():
        if "dropout" in name and isinstance(value, int | float) and not isinstance(value, bool) and not 0 <= value < 1:
            raise ModelError(str(path), f"{name} is {value!r}", wanted="at least 0 and below 1", do=_CONFIG_DO)


_CONFIG_DO = "put config.json back as it came with the weights"


def _refuse_what_is_not_text(directory: Path, config: Any) -> None:
    names = ", ".join(getattr(config, "architectures", None) or [config.model_type])
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(str(directory), f"{names} is an encoder-decoder", wanted="a decoder-only language model")
    if config.get_text_config() is not config:
        raise ModelError(
            str(directory),
            f"{names} is a multimodal checkpoint; training its text part alone is not built yet",
            do="use the text-only checkpoint of the same family",
        )
    method = _quantised_by(config)
    if method not in (None, "bitsandbytes"):
        raise ModelError(
            str(directory),
            f"its weights are stored quantised ({method})",
            wanted="a checkpoint in bf16, fp16 or fp32, or one in NF4 or int8 by bitsandbytes",
            do="use the unquantised model",
        )


def _quantised_by(config: Any) -> str | None:
    """How the weights of a checkpoint are quantised, by its config; None: they are not."""
    how = getattr(config, "quantization_config", None)
    if not how:
        return None
    method = how.get("quant_method", "unknown") if isinstance(how, dict) else getattr(how, "quant_method", "unknown")
    return str(getattr(method, "value", method))


def _weight_map(directory: Path) -> dict[str, str]:
    """Tensor name -> file. Raises ModelError for missing files and for pickled weights, which are never opened."""
    from safetensors import SafetensorError, safe_open

    index = directory / "model.safetensors.index.json"
    if index.is_file():
        weight_map = json.loads(index.read_text())["weight_map"]
        missing = sorted({f for f in weight_map.values() if not (directory / f).is_file()})
        if missing:
            raise ModelError(
                str(directory),
                f"{len(missing)} of its weight files are missing, first {missing[0]}",
                do="download the model again",
            )
        if any(Path(f).name != f for f in weight_map.values()):
            raise ModelError(str(index), "names a file outside its directory")
        return weight_map
    single = directory / "model.safetensors"
    files = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
    files = [f for f in files if f.name not in ("adapter_model.safetensors", "consolidated.safetensors")]
    if not files:
        pickled = sorted(p.name for pattern in _PICKLED for p in directory.glob(pattern))
        if pickled:
            raise ModelError(
                str(directory / pickled[0]),
                "weights are pickled; a pickle can run code when it is read, so rft does not open it",
                wanted="safetensors",
                do=f"convert once, if you trust the file: python -c \"from transformers import AutoModelForCausalLM as M; M.from_pretrained('{directory}').save_pretrained('{directory}-safetensors')\"",
            )
        raise ModelError(
            str(directory),
            "holds no weights",
            wanted="model.safetensors, or model.safetensors.index.json and its files",
        )
    found: dict[str, str] = {}
    for file in files:
        try:
            with safe_open(str(file), framework="pt") as handle:
                found.update(dict.fromkeys(handle.keys(), file.name))
        except (SafetensorError, OSError) as error:
            raise ModelError(str(file), f"cannot be read as safetensors: {error}", do="download it again") from None
    return found


def whole(parameter: Tensor) -> tuple[Tensor, Slices]:
    """The local part of a parameter that is not sharded: all of it. `parallel` has the one for sharded parameters."""
    return parameter, tuple(slice(0, size) for size in parameter.shape)


def checkpoint_dtype(source: ModelSource) -> torch.dtype:
    """Type in which the checkpoint says its weights are stored; float32 where it does not say."""
    dtype = getattr(source.config, "dtype", None) or torch.float32
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype
