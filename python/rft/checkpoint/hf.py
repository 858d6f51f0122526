"""`final/`: the adapter in PEFT's format, or the model as safetensors, with tokenizer, template, generation config and card.

A sharded model is written tensor by tensor: no rank ever holds the whole of it.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from rft import __version__
from rft.adapters.files import save_adapter
from rft.checkpoint.files import (
    TensorSource,
    check_room,
    sync_file,
    sync_tree,
    write_bytes,
    write_json,
    write_tensors,
    writing,
)
from rft.checkpoint.save import replace_folder
from rft.models.source import checkpoint_dtype
from rft.parallel.collectives import barrier
from rft.parallel.fsdp import whole

if TYPE_CHECKING:
    from rft.models.source import ModelSource
    from rft.models.tokenizer import TokenizerFiles

FILE_BYTES = 5 * 10**9  # as transformers splits
PREFIX = "model."  # the trainee's name for the model
WHAT = "final/"


def save_final(
    folder: Path,
    *,
    model: Any,
    source: ModelSource,
    tokenizer: TokenizerFiles,
    config: dict[str, Any],
    masters: dict[str, Tensor],
    rank: int = 0,
    world_size: int = 1,
    group: dist.ProcessGroup | None = None,
    template: str | None = None,
) -> None:
    """Write `folder` so that it is complete or as it was before; called by every rank, rank 0 writes.

    masters: trained tensors by name in the trainee ("model." and the name in `model`), in the type that they are kept in:
    an adapter is saved in that type, a model in the type of its checkpoint. template: the one that was trained with.
    Raises CheckpointError where it cannot be written, or an adapter without numbers would be.
    """
    work = folder.with_name(f".{folder.name}.saving")
    writes = rank == 0
    with writing(folder, WHAT):
        if writes:
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir(parents=True)
        if hasattr(model, "peft_config"):
            _save_adapter(work, model, masters, base_id=source.base_id, write=writes)
            if (
                writes and source.rope
            ):  # an adapter's own file has no place for it: engines are given the base's config as trained with
                source.config.save_pretrained(work)
        else:
            save_model(work, model, masters, dtype=checkpoint_dtype(source), write=writes)
            if writes:
                _copy_code(source, work)
        if writes:
            tokenizer.save(work, template)
            _save_generation_config(source, model, work)
            write_bytes(work / "README.md", model_card(source, config).encode())
            for path in work.rglob("*"):
                if path.is_file():
                    sync_file(path)
            sync_tree(work)
            replace_folder(work, folder)
    barrier(group)


def _save_adapter(folder: Path, model: Any, masters: dict[str, Tensor], *, base_id: str, write: bool) -> None:
    name_of = {id(p): name for name, p in model.named_parameters(remove_duplicate=False)}

    def gather(parameter: Tensor) -> Tensor:
        name = PREFIX + name_of.get(id(parameter), "")
        return whole(masters.get(name, parameter))

    save_adapter(model, folder, gather=gather, write=write, base_id=base_id)


# ---- a whole model


@dataclass(frozen=True)
class _Group:
    """Tensors of the model that become tensors of the checkpoint together: one to one, but for fused weights."""

    names: tuple[str, ...]
    outputs: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]


def save_model(folder: Path, model: Any, masters: dict[str, Tensor], *, dtype: torch.dtype, write: bool) -> None:
    """config.json and model*.safetensors under the names that `transformers` gives a checkpoint of this architecture.

    One group of tensors is gathered, converted and written at a time, by all ranks in one order. Tied weights are saved once.
    """
    state = _unique_state(model)
    kept = {name: dtype if tensor.is_floating_point() else tensor.dtype for name, tensor in state.items()}
    groups = _group(model, state, kept)
    files = _split(groups)
    if write:
        check_room(folder, sum(_bytes(group) for group in groups), WHAT)
    weight_map = {}
    for number, members in enumerate(files, start=1):
        name = "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        values = _values(model, members, state, kept, masters)
        if write:
            write_tensors(folder / name, list(_sources(members, values)), {"format": "pt"})
            weight_map.update({output[0]: name for group in members for output in group.outputs})
        else:
            for _ in values:  # takes part in gathering
                pass
    if not write:
        return
    if len(files) > 1:
        total = sum(_bytes(group) for group in groups)
        write_json(
            folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
        )
    config = copy.deepcopy(model.config)
    config.architectures, config.dtype = [_plain_class(model)], dtype
    config.save_pretrained(folder)


def _plain_class(model: Any) -> str:
    """Name of the architecture's class: FSDP2 puts a class of its own in front."""
    return type(model).__name__.removeprefix("FSDP")


def _unique_state(model: Any) -> dict[str, Tensor]:
    """Names and tensors of the state dict, tied ones once (under the first name: the input embedding's)."""
    seen: set[int] = set()
    unique = {}
    owners = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    for name in model.state_dict():
        tensor = owners[name]
        if id(tensor) not in seen:
            seen.add(id(tensor))
            unique[name] = tensor
    return unique


def _group(model: Any, state: dict[str, Tensor], kept: dict[str, torch.dtype]) -> list[_Group]:
    """The finest grouping in which converting group by group gives what converting everything at once gives, found on meta."""
    meta = {name: torch.empty(tensor.shape, dtype=kept[name], device="meta") for name, tensor in state.items()}
    at_once = _described(_convert(model, meta))
    layer = re.compile(r"^.*?\.\d+\.")
    keys: list[Callable[[str], str]] = [
        lambda name: name,
        lambda name: found[0] if (found := layer.match(name)) else name,
        lambda name: "all",
    ]
    for key in keys:
        members: dict[str, dict[str, Tensor]] = {}
        for name, tensor in meta.items():
            members.setdefault(key(name), {})[name] = tensor
        groups = [_Group(tuple(part), _described(_convert(model, part))) for part in members.values()]
        if sorted(output for group in groups for output in group.outputs) == sorted(at_once):
            return groups
    raise AssertionError("converting everything at once is one of the groupings")


def _described(state: dict[str, Tensor]) -> tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]:
    return tuple((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items())


def _convert(model: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Back to the checkpoint's own names and shapes (fused experts apart again), as `transformers` would."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, dict(state))


def _values(
    model: Any, groups: list[_Group], state: dict[str, Tensor], kept: dict[str, torch.dtype], masters: dict[str, Tensor]
) -> Iterator[dict[str, Tensor]]:
    """The outputs of each group in turn, on the CPU."""
    for group in groups:
        parts = {name: whole(masters.get(PREFIX + name, state[name])).to(kept[name]) for name in group.names}
        yield {name: tensor.cpu() for name, tensor in _convert(model, parts).items()}


def _sources(groups: list[_Group], values: Iterator[dict[str, Tensor]]) -> Iterator[TensorSource]:
    """Sources that the writer asks for one after another, so that one group is in memory at a time."""
    current: dict[str, Tensor] = {}

    def fetch(name: str) -> Tensor:
        if name not in current:
            current.clear()
            current.update(next(values))
        return current.pop(name)

    for group in groups:
        for name, dtype, shape in group.outputs:
            yield TensorSource(name, dtype, shape, lambda name=name: fetch(name))  # type: ignore[misc]


def _bytes(group: _Group) -> int:
    return sum(TensorSource(*output, lambda: None).bytes for output in group.outputs)


def _split(groups: list[_Group]) -> list[list[_Group]]:
    files: list[list[_Group]] = []
    room = 0
    for group in groups:
        size = _bytes(group)
        if size > room or not files:
            files.append([])
            room = FILE_BYTES
        files[-1].append(group)
        room -= size
    return files


# ---- what comes with it


def _save_generation_config(source: ModelSource, model: Any, folder: Path) -> None:
    given = source.path / "generation_config.json"
    if given.is_file():
        write_bytes(folder / given.name, given.read_bytes())
    elif getattr(model, "generation_config", None) is not None:
        write_bytes(folder / given.name, model.generation_config.to_json_string().encode())


def _copy_code(source: ModelSource, folder: Path) -> None:
    """Python files that a model with its own code is loaded with."""
    if getattr(source.config, "auto_map", None) and source.path.is_dir():
        for path in source.path.glob("*.py"):
            write_bytes(folder / path.name, path.read_bytes())


def model_card(source: ModelSource, config: dict[str, Any]) -> str:
    """README.md: what it is, how it came about, how to load it."""
    adapter, base = config.get("adapter") or {}, source.base_id
    lora = adapter.get("name") == "lora"
    files = ", ".join(Path(entry["path"]).name for entry in config["data"]["train"])
    how = f"a LoRA adapter (r {adapter.get('r')}) for" if lora else "a full fine-tune of"
    head = {
        "base_model": base,
        "library_name": "peft" if lora else "transformers",
        "tags": ["rft", "lora" if lora else "full"],
    }
    front = "\n".join(f"{key}: {json.dumps(value)}" for key, value in head.items())
    return (
        f"---\n{front}\n---\n\n# {Path(base).name}, fine-tuned\n\n"
        f"This is {how} `{base}`, trained with rft {__version__} on {files}.\n"
        f"Options, data counts and what was applied are in the run directory (config.resolved.toml, data.json, receipts.json).\n\n"
        f"{_how_to_load(source, lora=lora)}"
    )


def _how_to_load(source: ModelSource, *, lora: bool) -> str:
    """Code that loads it. PEFT looks for the base where the adapter names it, and cannot put an adapter on a GGUF file."""
    if lora and source.kind == "gguf":
        return (
            "The base is a GGUF file, which PEFT cannot put an adapter on: merge first. `rft chat` and `rft eval` need no merge.\n\n"
            "```bash\nrft merge <run>    # the run directory, one above this folder; writes <run>/merged\n```\n\n"
            f"{_python('transformers', 'AutoModelForCausalLM', '<run>/merged')}"
        )
    if lora:
        local = (
            f"The base is read from `{source.base_id}`: where it lies elsewhere, set `base_model_name_or_path` in "
            "adapter_config.json, or merge with `rft merge <run> --base <base>`.\n\n"
        )
        scaled = (
            f"It was trained with scaled positions ({source.rope}). `config.json` here is the base's config with them: give it to what "
            "loads the base (`config=AutoConfig.from_pretrained(...)`), or merge, which writes it.\n\n"
        )
        notes = ("" if source.hub_id else local) + (scaled if source.rope else "")
        return notes + _python("peft", "AutoPeftModelForCausalLM", "<run>/final")
    return _python("transformers", "AutoModelForCausalLM", "<run>/final")


def _python(package: str, name: str, folder: str) -> str:
    return f'```python\nfrom {package} import {name}\n\nmodel = {name}.from_pretrained("{folder}")\n```\n'
