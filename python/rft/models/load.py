"""A model built on meta, and its weights put in: each process reads and keeps only what it holds.

The order is design.md 3: build_meta -> adapters -> surgery -> shard -> materialise -> probe.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rft.config.model import ModelConfig
from rft.errors import ModelError
from rft.models.names import is_adapter_parameter, plain_name
from rft.models.source import ModelSource, checkpoint_dtype, find_model, in_a_line, whole
from rft.models.tensor_reader import Slices, TensorReader
from rft.quant.packed import PackedLinear

__all__ = ["LocalPart", "build_meta", "checkpoint_dtype", "find_model", "materialise", "whole"]

LocalPart = Callable[[Tensor], tuple[Tensor, Slices]]
"""Parameter -> (the plain tensor that this process holds of it, the slices of the whole that it covers)."""

Codes = Callable[[str], Any]
"""Plain name of a weight -> its codes (`nf4.Weight`, `int8.Weight`) where they are at hand, or None."""

# Rows of an embedding read at a time where all of them must be seen: 16k rows x 4096 in bf16 are 128 MiB.
_ROWS = 16384


def build_meta(
    source: ModelSource, cfg: ModelConfig, dtype: torch.dtype, *, vocab_size: int | None = None, attention: str = "rft"
) -> Any:
    """The `ForCausalLM` model of a source on meta, parameters in `dtype`, attention through our dispatcher.

    vocab_size: tokens of the tokenizer, added ones included; the embeddings grow where they have fewer rows.
    Raises ModelError where the architecture is no causal LM, or the checkpoint's weights are not this architecture's.
    """
    from transformers import AutoModelForCausalLM

    from rft.models.attention import register

    register()
    config = copy.deepcopy(source.config)
    if vocab_size is not None and vocab_size > config.vocab_size:
        config.vocab_size = vocab_size
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation=attention, dtype=dtype, trust_remote_code=cfg.trust_remote_code
            )
    except Exception as error:  # whatever the model's own code stumbles over, its config says it
        raise ModelError(
            str(source.path),
            f"transformers cannot build this model: {type(error).__name__}: {in_a_line(error)}",
            do="see to config.json if it was changed; upgrade transformers if the model is newer",
        ) from None
    model.generation_config = _generation_config(source, config) or model.generation_config
    _keep_in_fp32(model, dtype)
    plan_load(model, source)
    return model.train()


def _generation_config(source: ModelSource, config: Any) -> Any:
    from transformers import GenerationConfig

    if source.kind == "gguf" or not (source.path / "generation_config.json").is_file():
        return None
    try:
        return GenerationConfig.from_pretrained(source.path)
    except (OSError, ValueError):
        return None


def _keep_in_fp32(model: Any, dtype: torch.dtype) -> None:
    """Weights that `from_pretrained` holds in fp32 whatever is asked (routers' gates and their biases, for example)."""
    patterns = [p.replace("*", r"\w*") for p in getattr(model, "_keep_in_fp32_modules_strict", None) or ()]
    if dtype == torch.float32 or not patterns:
        return
    keep = re.compile("|".join(rf"(?:^|\.){p}(?:\.|$)" for p in patterns))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if keep.search(name) and tensor.is_floating_point():
            tensor.data = tensor.data.float()


@dataclass
class _Entry:
    """One group of checkpoint tensors and what becomes of it: a rename, or `transformers`' own conversion."""

    target: str
    sources: list[str]
    converter: Any = None
    patterns: dict[str, list[str]] = field(default_factory=dict)


def plan_load(model: Any, source: ModelSource) -> list[_Entry]:
    """Which tensors of the checkpoint become which of the model's. Reads names only.

    Raises ModelError naming what the checkpoint lacks, and what it has that the model does not.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    wanted = {plain_name(name): tensor for name, tensor in base.state_dict().items() if not is_adapter_parameter(name)}
    for name, packed in _packed(base).items():
        wanted[name] = torch.empty(packed.out_features, packed.in_features, device="meta")
    mapping = [] if source.kind == "gguf" else get_model_conversion_mapping(base)
    renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
    converters = [m for m in mapping if isinstance(m, WeightConverter)]
    converter_of = {pattern: c for c in converters for pattern in c.source_patterns}
    entries: dict[str, _Entry] = {}
    unexpected: list[str] = []
    prefix = base.base_model_prefix
    for key in sorted(source.reader.names(), key=dot_natural_key):
        target, pattern = rename_source_key(key, renamings, converters, prefix, wanted)
        if target not in wanted and key in wanted:
            target, pattern = rename_source_key(key, [], [], prefix, wanted)
        if target not in wanted:
            unexpected.append(key)
        elif pattern is None:
            entries[target] = _Entry(target, [key])
        else:
            entry = entries.setdefault(target, _Entry(target, [], copy.deepcopy(converter_of[pattern])))
            entry.sources.append(key)
            entry.patterns.setdefault(pattern, []).append(key)
    base._weight_conversions = [m for m in mapping if m.was_used()]
    _check_complete(base, source, wanted, list(entries.values()), unexpected)
    return list(entries.values())


def _check_complete(
    base: Any, source: ModelSource, wanted: dict[str, Tensor], entries: list[_Entry], unexpected: list[str]
) -> None:
    given = {t for e in entries for t in (_targets(e) if e.converter else [e.target])}
    tied = tied_names(base)
    may_miss = _any_of(base._keys_to_ignore_on_load_missing)
    missing = [n for n in wanted if n not in given and not any(t in given for t in tied.get(n, ())) and not may_miss(n)]
    where = str(source.path)
    kind = type(base).__name__
    if missing:
        raise ModelError(
            where,
            f"{len(missing)} of the {len(wanted)} weights of {kind} are missing, first {missing[0]!r}",
            wanted="a complete checkpoint of this architecture",
        )
    # rotary tables were once saved; they are computed
    ignored = _any_of(
        {*(base._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$", r"\.attn\.(masked_)?bias$"}
    )
    foreign = [n for n in unexpected if not ignored(n)]
    if foreign:
        raise ModelError(
            where,
            f"{len(foreign)} weights do not belong to {kind}, first {foreign[0]!r}",
            wanted="a checkpoint of this architecture",
        )
    vocabulary, own = base.config.vocab_size, getattr(source.config, "vocab_size", None)
    vocabularies = _vocabulary_names(base)
    for entry in entries:
        if entry.converter is None:
            shape, want = source.reader.shape(entry.sources[0]), tuple(wanted[entry.target].shape)
            # Embeddings that grow for added tokens: the file has what its own config says, the model what the tokenizer needs.
            if entry.target in vocabularies and own is not None and want[0] == vocabulary > own:
                want = (own, *want[1:])
            if shape != want:
                raise ModelError(
                    where,
                    f"{entry.target} has shape {list(shape)} in the checkpoint, {list(want)} by config.json",
                    wanted="weights and config.json of the same model",
                )


def _vocabulary_names(base: Any) -> set[str]:
    """Plain names of the embedding's and the head's weights, which have a row a token."""
    modules = [m for m in (base.get_input_embeddings(), base.get_output_embeddings()) if m is not None]
    inside = {id(p) for module in modules for p in module.parameters()}
    named = base.named_parameters(remove_duplicate=False)
    return {plain_name(name) for name, p in named if id(p) in inside and not is_adapter_parameter(name)}


def _targets(entry: _Entry) -> list[str]:
    """Names that a conversion yields: its first target stands in `entry.target`, the others differ by the pattern."""
    patterns = entry.converter.target_patterns
    first = patterns[0]
    return (
        [entry.target]
        if len(patterns) == 1 or first not in entry.target
        else [entry.target.replace(first, p) for p in patterns]
    )


def _any_of(patterns: Any) -> Callable[[str], bool]:
    compiled = [re.compile(p) for p in patterns or ()]
    return lambda name: any(p.search(name) for p in compiled)


def tied_names(model: nn.Module) -> dict[str, list[str]]:
    """Name -> the other names of the same parameter, plain names."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(plain_name(name))
    return {n: [m for m in names if m != n] for names in groups.values() if len(names) > 1 for n in names}


def materialise(
    model: Any,
    source: ModelSource,
    device: torch.device | str,
    *,
    root: nn.Module | None = None,
    local_part: LocalPart = whole,
    codes: Codes | None = None,
    on_host: Collection[int] = (),
) -> Any:
    """Give a meta model its memory on `device`, its buffers and its weights; adapters stay to be initialised.

    root: the module that owns everything (the trainee, where it is an FSDP root); default the model.
    local_part: says what this process holds of a parameter; default all of it. codes: asked first for what is held in fewer
    bits (checkpoint/base_cache.py). on_host: ids of parameters that are read into host memory. One tensor of the checkpoint is in memory at a time. Raises ModelError for weights that do not fit, and for a buffer that nothing has written.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    entries = plan_load(model, source)
    errors: dict[str, float] = {}
    shared = _shared_parameters(root if root is not None else model)
    owner: Any = root if root is not None else model
    owner._apply(
        lambda t: torch.empty_like(t, device="cpu" if id(t) in on_host else device)
    )  # `to_empty`, with two places
    _tie_again(shared)
    with torch.no_grad():
        _make_buffers(base)
        homes, rows, packed = _homes(base), _trained_rows(base), _packed(base)
        for entry in entries:
            for target, read in _tensors(entry, base, source.reader):
                if target in packed:
                    held = codes(target) if codes is not None else None
                    if held is None:
                        held = _whole_or_codes(entry, source.reader, read, packed[target])
                    errors[target] = packed[target].fill(held)
                for home in homes.get(target, ()):
                    _fill(home, read, local_part)
                for layer in rows.get(target, ()):
                    _fill_rows(layer, read, local_part)
        _check_tied(base, source, entries)
        _check_buffers(base)
    model.rft_packing_error = max(errors.values(), default=0.0)
    return model


def _packed(base: nn.Module) -> dict[str, PackedLinear]:
    """Plain name of a weight -> the linear that holds it in fewer bits."""
    return {plain_name(f"{n}.weight"): m for n, m in base.named_modules() if isinstance(m, PackedLinear)}


def _whole_or_codes(entry: _Entry, reader: TensorReader, read: Callable[[Slices], Tensor], linear: PackedLinear) -> Any:
    """The checkpoint's own codes where it holds such, else its numbers. One weight is in memory at a time."""
    codes = reader.packed(entry.sources[0]) if entry.converter is None and hasattr(reader, "packed") else None
    if codes is not None and set(codes._fields) == {n for n, _ in linear.named_buffers(recurse=False)}:
        return codes
    return read((slice(0, linear.out_features), slice(0, linear.in_features)))


def _shared_parameters(root: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Places (module, attribute) of every parameter that has more than one."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    seen: set[tuple[int, str]] = set()
    for module in root.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and (id(module), name) not in seen:
                seen.add((id(module), name))
                places.setdefault(id(parameter), []).append((module, name))
    return [p for p in places.values() if len(p) > 1]


def _tie_again(shared: list[list[tuple[nn.Module, str]]]) -> None:
    for (first, name), *others in shared:
        parameter = first._parameters[name]
        for module, other in others:
            if module._parameters[other] is not parameter:
                module._parameters[other] = parameter


def _homes(base: nn.Module) -> dict[str, list[Tensor]]:
    """Plain name -> every parameter or buffer that starts from that tensor (PEFT's trained copies too)."""
    homes: dict[str, list[Tensor]] = {}
    persistent = set(base.state_dict())
    named = [*base.named_parameters(remove_duplicate=False), *(b for b in base.named_buffers() if b[0] in persistent)]
    for name, tensor in named:
        if not is_adapter_parameter(name):
            places = homes.setdefault(plain_name(name), [])
            if not any(tensor is t for t in places):
                places.append(tensor)
    return homes


def _tensors(entry: _Entry, base: Any, reader: TensorReader) -> Iterator[tuple[str, Callable[[Slices], Tensor]]]:
    """(target name, function that gives a part of it). A converted tensor is made whole first: one at a time."""
    if entry.converter is None:
        name = entry.sources[0]
        yield entry.target, _reading(reader, name)
        return
    converter = copy.deepcopy(entry.converter)
    for pattern, keys in entry.patterns.items():
        for key in keys:
            converter.add_tensor(entry.target, key, pattern, lambda key=key: reader.read(key))
    for name, tensor in converter.convert(entry.target, model=base, config=base.config).items():
        value = tensor[0] if isinstance(tensor, list) else tensor
        yield name, value.__getitem__


def _reading(reader: TensorReader, name: str) -> Callable[[Slices], Tensor]:
    shape = reader.shape(name)

    def read(part: Slices) -> Tensor:
        rows = part[0] if part else None
        if rows is None or rows.stop <= shape[0]:
            return reader.read(name, part)
        # the vocabulary has grown: rows beyond the checkpoint's start at the mean of all rows
        old = slice(min(rows.start, shape[0]), shape[0])
        kept = reader.read(name, (old, *part[1:])) if old.stop > old.start else None
        new = mean_row(reader, name)[part[1:]].expand(rows.stop - max(rows.start, shape[0]), *[-1] * (len(shape) - 1))
        return new if kept is None else torch.cat([kept, new.to(kept.dtype)])

    return read


def mean_row(reader: TensorReader, name: str) -> Tensor:
    """Mean of an embedding's rows in fp32, read a block at a time. The same on every process."""
    rows, *rest = reader.shape(name)
    total = torch.zeros(rest, dtype=torch.float64)
    for start in range(0, rows, _ROWS):
        part = (slice(start, min(start + _ROWS, rows)), *(slice(0, n) for n in rest))
        total += reader.read(name, part).double().sum(0)
    return (total / rows).float()


def _fill(home: Tensor, read: Callable[[Slices], Tensor], local_part: LocalPart) -> None:
    local, part = local_part(home) if isinstance(home, nn.Parameter) else whole(home)
    if local.numel():
        local.copy_(read(part).to(local.device).view_as(local))


def _trained_rows(base: nn.Module) -> dict[str, list[Any]]:
    """Plain name of an embedding or head -> PEFT's layers that train some of its rows."""
    layers: dict[str, list[Any]] = {}
    for name, module in base.named_modules():
        if hasattr(module, "trainable_tokens_delta") and module.tied_adapter is None:
            layers.setdefault(plain_name(f"{name}.base_layer.weight"), []).append(module)
    return layers


def _fill_rows(layer: Any, read: Callable[[Slices], Tensor], local_part: LocalPart) -> None:
    """Trained rows start as the rows that they stand in for, read by themselves: the embedding may be sharded."""
    for adapter, delta in layer.trainable_tokens_delta.items():
        columns = slice(0, delta.shape[1])
        rows = torch.cat([read((slice(i, i + 1), columns)) for i in layer.token_indices[adapter]])
        _fill(delta, rows.__getitem__, local_part)
        original = layer.trainable_tokens_original[adapter]
        original.copy_(rows.to(original))


def _make_buffers(base: Any) -> None:
    """Compute every buffer again: those outside the checkpoint (rotary tables, embedding scales) are garbage after meta."""
    persistent = set(base.state_dict())
    codes = {id(b) for m in _packed(base).values() for b in m.buffers(recurse=False)}
    for buffer in base.buffers():
        if id(buffer) not in codes:
            buffer.fill_(_unset(buffer))
    parameters = list(base.parameters())
    for parameter in parameters:
        parameter._is_hf_initialized = True  # transformers' own mark: initialisers leave it alone
    owners = {n.rpartition(".")[0] for n, b in base.named_buffers() if n not in persistent and id(b) not in codes}
    for name, module in base.named_modules():
        without_own = next(module.parameters(recurse=False), None) is None and not isinstance(module, PackedLinear)
        if (without_own or name in owners) and not is_adapter_parameter(name + "."):
            base._init_weights(module)
    for parameter in parameters:
        del parameter._is_hf_initialized


def _unset(buffer: Tensor) -> float | int | bool:
    """A value that no written buffer holds."""
    if buffer.is_floating_point() or buffer.is_complex():
        return float("nan")
    return True if buffer.dtype == torch.bool else torch.iinfo(buffer.dtype).min


def _check_buffers(base: Any) -> None:
    codes = {id(b) for m in _packed(base).values() for b in m.buffers(recurse=False)}
    for name, buffer in base.named_buffers():
        if is_adapter_parameter(name) or id(buffer) in codes:
            continue
        if buffer.is_meta or buffer.numel() == 0:
            broken = buffer.is_meta
        elif buffer.is_floating_point() or buffer.is_complex():
            broken = bool(torch.isnan(buffer).any())
        else:
            broken = buffer.dtype != torch.bool and bool((buffer == _unset(buffer)).any())
        if broken:
            raise ModelError(
                type(base).__name__,
                f"buffer {name!r} is not in the checkpoint and its class does not compute it",
                wanted="a model whose buffers can be made again",
            )


def _check_tied(base: Any, source: ModelSource, entries: list[_Entry]) -> None:
    """Tied weights that the checkpoint stores twice must be equal: the model keeps one."""
    names = {e.target: e.sources[0] for e in entries if e.converter is None}
    for name, others in tied_names(base).items():
        for other in others:
            if (
                name < other
                and name in names
                and other in names
                and not _equal(source.reader, names[name], names[other])
            ):
                raise ModelError(
                    str(source.path),
                    f"config.json ties {name} to {other}, but the checkpoint holds two different tensors",
                    do="set tie_word_embeddings to false in config.json if they are meant to differ",
                )


def _equal(reader: TensorReader, first: str, second: str) -> bool:
    rows, *rest = reader.shape(first)
    if reader.shape(second) != (rows, *rest):
        return False
    parts = [(slice(s, min(s + _ROWS, rows)), *(slice(0, n) for n in rest)) for s in range(0, rows, _ROWS)]
    return all(torch.equal(reader.read(first, p), reader.read(second, p)) for p in parts)
