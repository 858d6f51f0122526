"""An adapter into its base weights, tensor by tensor: memory is bounded by one block of rows, never by the model.

The base is read from its own files, in the type in which it was published (a GGUF file: de-quantised). The sum is made
in fp32 and rounded once, so the merged weights are nearer to the live adapter than a sum in bf16.
"""

from __future__ import annotations

import errno
import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from rft.checkpoint.adapter_file import AdapterFile, Edit, read_adapter
from rft.checkpoint.files import TensorSource, sync_folder
from rft.checkpoint.shards import SHARD_BYTES, write_shards
from rft.config.model import ModelConfig
from rft.errors import ConfigError, ModelError, unusable_folder
from rft.models.backbone import decoder_layers
from rft.models.bitsandbytes_files import BitsandbytesReader, RoundedReader
from rft.models.load import build_meta, mean_row, plan_load
from rft.models.rope import config_entries
from rft.models.source import ModelSource, checkpoint_dtype, find_model
from rft.quant.packed import place

BLOCK_ELEMENTS = 16 * 2**20
"""Elements of a tensor that are in memory at one time: 64 MiB in fp32, where larger blocks are no faster."""

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)


@dataclass(frozen=True)
class Merged:
    """What a merge did."""

    out: Path
    base: str
    num_tensors: int
    num_changed: int
    num_bytes: int
    untied: bool
    seconds: float
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Names:
    """Names of the live model's parameters, and which of them the files hold under which name."""

    live: set[str]
    files: dict[str, str]
    embedding: str
    head: str
    tied: bool
    linears: set[str]
    """File names of the linears that a base in fewer bits holds in them."""


def merge(
    adapter: Path,
    out: Path,
    *,
    base: ModelConfig | None = None,
    dtype: torch.dtype | None = None,
    through: Literal["nf4", "int8"] | None = None,
    shard_bytes: int = SHARD_BYTES,
    on_tensor: Callable[[int, int, str], None] | None = None,
) -> Merged:
    """Write base + adapter as a model directory that transformers loads.

    adapter: folder in PEFT's format. base: where the base model is; default what the adapter names.
    through: merge into what a base held in so few bits stands for, instead of the original weights.
    dtype: type of the result; default the base's own (bf16 for a GGUF file). on_tensor(done, of, name): progress.
    The result is complete or not there: it is written beside `out` and renamed.
    Raises ModelError where adapter and base do not belong together, ConfigError where `out` is taken.
    """
    began = time.monotonic()
    if out.exists() and any(out.iterdir() if out.is_dir() else [out]):
        raise ConfigError(str(out), "exists and is not empty", do="give another folder with --out, or remove it")
    file = read_adapter(adapter)
    if base is None and not file.base:
        raise ModelError(str(adapter), "does not name its base model", do="give it with --base")
    config = base or ModelConfig(path=file.base)
    source = find_model(config)
    names = _names(source, config)
    if through is not None:
        source = replace(source, reader=RoundedReader(source.reader, names.linears, through))
    tokens = _num_tokens(adapter)
    edits = _edits_by_file(file, names, source, tokens)
    untied = _untie(edits, file, names)
    target = dtype or (torch.bfloat16 if source.kind == "gguf" else checkpoint_dtype(source))
    dequantised = source.kind == "gguf" or isinstance(source.reader, BitsandbytesReader)
    keep_dtype = dtype is None and not dequantised
    sources = _sources(source, edits, names, target, tokens, keep_dtype=keep_dtype, on_tensor=on_tensor)
    num_bytes = sum(tensor.bytes for tensor in sources)
    with _complete_or_absent(out, num_bytes) as work:
        write_shards(work, sources, limit=shard_bytes)
        vocab_size = next(t.shape[0] for t in sources if t.name == names.files[names.embedding])
        _write_config(work, source, target, vocab_size=vocab_size, tied=names.tied and not untied)
        notes = _copy_beside(work, adapter, source, config)
    added = vocab_size - source.reader.shape(names.files[names.embedding])[0]
    if added and not edits.keys() & {names.files[names.embedding]}:
        notes.append(
            f"{added:,} rows added for tokens that the base has none for: they are the mean of its rows, as in training"
        )
    kind = "GGUF" if source.kind == "gguf" else "bitsandbytes"
    if through is not None:
        notes.append(
            f"into the {through} base that the adapter was trained over, de-quantised: {len(names.linears)} linears"
        )
    described = f"{source.base_id}, {f'de-quantised {kind} weights' if dequantised else 'original weights'}"
    return Merged(
        out=out,
        base=described,
        num_tensors=len(sources),
        num_changed=sum(tensor.name in edits for tensor in sources),
        num_bytes=num_bytes,
        untied=untied,
        seconds=time.monotonic() - began,
        notes=notes,
    )


@contextmanager
def _complete_or_absent(out: Path, needed: int) -> Iterator[Path]:
    """A folder to write into that becomes `out` at the end. Raises RftError where `needed` bytes have no room, ConfigError where it may not be made."""
    work = out.with_name(f".{out.name}.saving")
    place = next(folder for folder in out.absolute().parents if folder.is_dir())
    usage = shutil.disk_usage(place)
    free = usage.free
    try:
        if usage.total and free < needed:  # /proc and its like have no size at all, and say something else below
            raise OSError(
                errno.ENOSPC, f"the disk is full: {needed / 2**30:.2f} GiB are needed, {free / 2**30:.2f} GiB are free"
            )
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        yield work
        if out.is_dir():
            out.rmdir()  # it is empty
        work.replace(out)
        sync_folder(out.parent)
    except OSError as error:
        raise unusable_folder("--out", out, error) from None
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _names(source: ModelSource, config: ModelConfig) -> _Names:
    """Build the model on meta to learn its names and which file tensor each has; nothing is loaded."""
    model = build_meta(source, config, torch.float32)
    live = {name for name, _ in model.named_parameters(remove_duplicate=False)} | set(model.state_dict())
    # tensors that transformers converts (fused experts) have no single file tensor: copied as they are, never edited
    files = {entry.target: entry.sources[0] for entry in plan_load(model, source) if entry.converter is None}
    packed = place(model.requires_grad_(False), list(decoder_layers(model)), "nf4").linears
    linears = {files[f"{name}.weight"] for name in packed if f"{name}.weight" in files}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    name_of = {id(module): f"{name}.weight" for name, module in model.named_modules()}
    return _Names(
        live=live,
        files=files,
        embedding=name_of[id(embedding)],
        head=name_of[id(head)] if head is not None else "",
        tied=bool(source.config.get_text_config().tie_word_embeddings),
        linears=linears,
    )


def linear_files(source: ModelSource, config: ModelConfig) -> set[str]:
    """Names in the files of the linears that a base in fewer bits holds in them."""
    return _names(source, config).linears


def _num_tokens(adapter: Path) -> int:
    """Rows that the tokenizer beside the adapter needs: where the base has fewer, training went on with more. 0 without one."""
    if not (adapter / "tokenizer.json").is_file():
        return 0
    from rft.models.tokenizer import load_tokenizer

    return load_tokenizer(ModelConfig(path=str(adapter))).vocab_size


def _edits_by_file(file: AdapterFile, names: _Names, source: ModelSource, tokens: int) -> dict[str, Edit]:
    """The adapter's edits under the names of the files, checked against the base's shapes."""
    edits: dict[str, Edit] = {}
    for live, edit in file.edits.items():
        if live not in names.live:
            raise ModelError(
                str(file.path),
                f"changes {live}, which {source.base_id} does not have",
                wanted="the base model that the adapter was trained on",
                do="give it with --base",
            )
        tied_head = names.tied and live == names.head
        if live not in names.files and not tied_head:
            raise ModelError(str(source.path), f"stores no tensor for {live}", do="merge with PEFT and save_pretrained")
        stored = names.files.get(live, names.files[names.embedding] if tied_head else "")
        shape = source.reader.shape(stored)
        if live in (names.embedding, names.head):
            shape = (max(shape[0], tokens), *shape[1:])
        _check_shapes(live, edit, shape, file.path)
        edits[names.files.get(live, live)] = edit
    return edits


def _check_shapes(name: str, edit: Edit, base: tuple[int, ...], where: Path) -> None:
    if (edit.A is None) != (edit.B is None):
        raise ModelError(str(where), f"holds only one of lora_A and lora_B for {name}")
    shape = tuple(edit.replacement.shape) if edit.replacement is not None else base
    if edit.A is not None and edit.B is not None:
        update = (edit.B.shape[0], edit.A.shape[1])
        # the shape decides where it can: adapters do not always say that their layer stores its weight transposed
        if update != update[::-1]:
            edit.transposed = update[::-1] == shape
        if (update[::-1] if edit.transposed else update) != shape:
            raise ModelError(
                str(where),
                f"{name} is {' x '.join(map(str, shape))} in the base, the adapter's update is {' x '.join(map(str, update))}",
                wanted="the base model that the adapter was trained on",
                do="give it with --base",
            )
        if edit.magnitude is not None and edit.transposed:
            raise ModelError(str(where), f"DoRA on {name}, which is stored transposed", do="merge with PEFT")
    if shape[1:] != base[1:]:
        raise ModelError(str(where), f"{name} is {shape} in the adapter and {base} in the base")


def _untie(edits: dict[str, Edit], file: AdapterFile, names: _Names) -> bool:
    """Give the output head a tensor of its own where the adapter made it differ from the embedding (BO-26).

    Trained token rows are shared by both, as PEFT does it for tied models; a head saved equal to the embedding stays tied.
    """
    if not names.tied or not names.head:
        return False
    embedding_key = names.files[names.embedding]
    head_key = names.files.get(names.head, names.head)
    embedding, head = edits.get(embedding_key), edits.get(head_key)
    if head is not None and embedding is not None and _same(embedding, head):
        del edits[head_key]
        return False
    if head is None and (embedding is None or _only_token_rows(embedding)):
        return False
    edits.setdefault(head_key, Edit())
    return True


def _same(a: Edit, b: Edit) -> bool:
    """Whether two edits make equal tensors out of equal ones."""
    if a.replacement is not None and b.replacement is not None:
        return (
            a.A is None
            and b.A is None
            and torch.equal(a.replacement, b.replacement)
            and not (a.token_rows or b.token_rows)
        )
    return _only_token_rows(a) and _only_token_rows(b) and _equal_rows(a.token_rows, b.token_rows)


def _only_token_rows(edit: Edit) -> bool:
    return edit.A is None and edit.replacement is None and edit.magnitude is None


def _equal_rows(a: dict[int, Tensor], b: dict[int, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[index], b[index]) for index in a)


def _sources(
    source: ModelSource,
    edits: dict[str, Edit],
    names: _Names,
    target: torch.dtype,
    tokens: int,
    *,
    keep_dtype: bool,
    on_tensor: Callable[[int, int, str], None] | None,
) -> list[TensorSource]:
    """Every tensor of the result: the base's own, in its order, and the head where it now has one of its own."""
    head_key, embedding_key = names.files.get(names.head, names.head), names.files[names.embedding]
    stored = source.reader.names()
    # a tied checkpoint may hold the head as well: a copy that nobody reads, and stale once the embedding changes
    kept = [n for n in stored if not (names.tied and n == head_key and head_key not in edits)]
    if head_key in edits and head_key not in kept:
        kept.append(head_key)
    base_names = {name: name if name in stored else embedding_key for name in kept}
    shapes = {name: list(source.reader.shape(base_names[name])) for name in kept}
    for name in kept:
        if name in edits:
            shapes[name][0] = edits[name].num_rows(shapes[name][0])
    vocabulary = [n for n in (head_key, embedding_key) if n in shapes]
    for name in vocabulary:
        shapes[name][0] = max(tokens, *(shapes[n][0] for n in vocabulary))
    sources = []
    for number, name in enumerate(kept, 1):
        dtype = _stored_dtype(source, base_names[name])
        rows = _Rows(
            source=source,
            base_name=base_names[name],
            shape=tuple(shapes[name]),
            dtype=target if dtype.is_floating_point and not keep_dtype else dtype,
            edit=edits.get(name),
            started=partial(on_tensor, number, len(kept), name) if on_tensor else None,
        )
        sources.append(TensorSource(name, rows.dtype, rows.shape, rows.blocks))
    return sources


def _stored_dtype(source: ModelSource, name: str) -> torch.dtype:
    """Type in which the reader gives a tensor, learned from its first row."""
    shape = source.reader.shape(name)
    first = tuple(slice(0, min(1, size) if dim == 0 else size) for dim, size in enumerate(shape))
    return source.reader.read(name, first or None).dtype


@dataclass(frozen=True)
class _Rows:
    """One tensor of the result, made a block of rows at a time."""

    source: ModelSource
    base_name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    edit: Edit | None
    started: Callable[[], None] | None

    def blocks(self) -> Iterator[Tensor]:
        if self.started:
            self.started()
        if not self.shape:
            yield self.source.reader.read(self.base_name).to(self.dtype)
            return
        step = max(1, BLOCK_ELEMENTS // max(1, torch.Size(self.shape[1:]).numel()))
        for start in range(0, self.shape[0], step):
            stop = min(self.shape[0], start + step)
            rows = self.edit.apply(start, stop, self.base) if self.edit is not None else self.base(start, stop)
            yield rows.to(self.dtype)

    def base(self, start: int, stop: int) -> Tensor:
        """Rows of the base. Those of added tokens that the adapter did not train are where rft starts them: at the mean."""
        num_rows, *rest = self.source.reader.shape(self.base_name)
        part = (slice(start, min(stop, num_rows)), *(slice(0, size) for size in rest))
        rows = self.source.reader.read(self.base_name, part) if start < num_rows else torch.zeros(0, *rest)
        missing = stop - start - rows.shape[0]
        if not missing:
            return rows
        mean = mean_row(self.source.reader, self.base_name).to(rows.dtype)
        return torch.cat([rows, mean.expand(missing, *rest)])


def _write_config(out: Path, source: ModelSource, dtype: torch.dtype, *, vocab_size: int, tied: bool) -> None:
    """config.json of the base with what the merge changed: type, vocabulary, whether the head is tied."""
    path = source.path / "config.json"
    raw: dict[str, Any] = (
        json.loads(path.read_text(encoding="utf-8"))
        if source.kind != "gguf"
        else json.loads(source.config.to_json_string())
    )
    if source.rope:
        for table in (raw.get("text_config"), raw):
            if isinstance(table, dict) and (table is raw or "max_position_embeddings" in table):
                table.pop("rope_scaling", None)
                table.update(config_entries(source.config))
                break
    raw.pop("torch_dtype", None)
    raw.pop("quantization_config", None)  # the result holds plain weights
    raw.pop("_name_or_path", None)
    raw["dtype"] = str(dtype).removeprefix("torch.")
    for table in (raw, raw.get("text_config")):
        if isinstance(table, dict) and (table is raw or "tie_word_embeddings" in table):
            table["tie_word_embeddings"] = tied
        if isinstance(table, dict) and "vocab_size" in table:
            table["vocab_size"] = vocab_size
    (out / "config.json").write_text(json.dumps(raw, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _copy_beside(out: Path, adapter: Path, source: ModelSource, config: ModelConfig) -> list[str]:
    """Tokenizer, template and generation config: those that the adapter was saved with, else the base's."""
    notes = []
    folder = source.path if source.kind != "gguf" else None
    tokenizer_home = adapter if (adapter / "tokenizer.json").is_file() else folder
    if tokenizer_home is not None:
        for name in _TOKENIZER_FILES:
            if (tokenizer_home / name).is_file():
                shutil.copyfile(tokenizer_home / name, out / name)
    else:
        from rft.models.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(config)
        tokenizer.save(out, tokenizer.template)
    for home in filter(None, (adapter, folder)):
        if (home / "generation_config.json").is_file():
            shutil.copyfile(home / "generation_config.json", out / "generation_config.json")
            break
    if tokenizer_home is not adapter:
        notes.append("tokenizer and chat template are the base's: the adapter folder holds none")
    return notes
