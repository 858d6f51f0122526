"""Quantised bases kept on disk: the same bits without reading the checkpoint's linears; damaged, changed or too large ones are quantised again."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rft.checkpoint import base_cache
from rft.checkpoint.base_cache import BaseCache, content_of
from rft.config.model import ModelConfig
from rft.models.load import build_meta, materialise
from rft.models.source import ModelSource, find_model
from rft.quant.packed import PackedLinear, place
from rft.training.step import train_step
from support.data import write_tiny_tokenizer
from support.model_run import model_run, random_packs
from support.tiny import tiny_llama

CPU = torch.device("cpu")


@pytest.fixture
def model_dir(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(base_cache, "LEAST_BYTES", 0)
    tiny_llama(tmp_path / "model", vocab_size=400, layers=2, tied=True)
    return write_tiny_tokenizer(tmp_path / "model")


def bases(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "rft" / "bases").glob("*"))


class Watched:
    """A reader that notes which linears are read."""

    def __init__(self, inner):
        self.inner, self.asked = inner, []

    def names(self):
        return self.inner.names()

    def shape(self, name):
        return self.inner.shape(name)

    def read(self, name, part=None):
        self.asked += [name] if "proj" in name else []
        return self.inner.read(name, part)


def load(
    folder: Path, kind: str = "nf4", limit_gb: float = 1.0
) -> tuple[dict[str, torch.Tensor], BaseCache | None, str, int]:
    """(codes by name, the cache, what it said, how many linears were read from the checkpoint)."""
    source = find_model(ModelConfig(path=str(folder)))
    watched = Watched(source.reader)
    source = dataclasses.replace(source, reader=watched)
    model = build_meta(source, ModelConfig(path=str(folder)), torch.float32).requires_grad_(False)
    cache = BaseCache.of(source, place(model, list(model.model.layers), kind), CPU, limit_gb)
    materialise(model, source, "cpu", codes=cache.codes if cache else None)
    said = cache.finish(model.rft_packing_error, keep=True) if cache else ""
    codes = {
        n: b.clone()
        for n, b in model.named_buffers()
        if n.rpartition(".")[2] in ("codes", "scales", "nested", "offset", "largest")
    }
    return codes, cache, said, len(watched.asked)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_the_second_load_reads_codes_alone_and_holds_the_same_bits(model_dir, tmp_path, kind):
    first, made, said, read = load(model_dir, kind)
    assert (read, len(bases(tmp_path))) == (14, 1)
    assert "kept for the next run" in said
    second, kept, said, read = load(model_dir, kind)
    assert read == 0
    assert said.startswith("codes from the cache")
    assert same(first, second)
    assert kept.error == made.error > 0
    assert set(load_file(bases(tmp_path)[0])) == {f"{name}" for name in _file_names(first)}
    other, _, _, read = load(model_dir, "int8" if kind == "nf4" else "nf4")
    assert (read, len(bases(tmp_path))) == (14, 2)
    assert not same(first, other)


def _file_names(codes: dict[str, torch.Tensor]) -> list[str]:
    return [f"{name.rpartition('.')[0]}.weight.{name.rpartition('.')[2]}" for name in codes]


@pytest.mark.parametrize("damage", ["a bit", "two halves", "cut", "emptied", "another base", "an endless number"])
def test_a_damaged_file_is_told_and_replaced_and_changes_nothing(model_dir, tmp_path, capsys, damage):
    first, *_ = load(model_dir)
    (file,) = bases(tmp_path)
    whole = file.read_bytes()
    if damage == "a bit":
        changed = bytearray(whole)
        changed[-5] ^= 1
        file.write_bytes(changed)
    elif damage == "two halves":  # of one tensor's bytes, which add up to the same
        tensors = load_file(file)
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata()
        codes = tensors["model.layers.0.mlp.gate_proj.weight.codes"].view(-1)
        half = codes.numel() // 2
        assert not torch.equal(codes[:half], codes[half:])
        tensors["model.layers.0.mlp.gate_proj.weight.codes"] = torch.cat([codes[half:], codes[:half]])
        save_file(tensors, file, metadata=metadata)
    elif damage == "an endless number":
        save_file(load_file(file), file, metadata={"rft": '{"sums": {}, "error": 1' + "0" * 400 + "}"})
    elif damage == "another base":
        tensors = {name: torch.zeros_like(tensor) for name, tensor in load_file(file).items()}
        save_file(tensors, file, metadata={"rft": '{"sums": {}, "error": 0.1}'})
    else:
        file.write_bytes(whole[: len(whole) // 2 if damage == "cut" else 0])
    again, _, said, read = load(model_dir)
    assert same(first, again)
    assert read > 0
    assert "quantised while reading" in said
    assert capsys.readouterr().err.count("is damaged") == 1
    assert load(model_dir)[3] == 0


def test_the_name_follows_the_checkpoints_content_wherever_it_lies(model_dir, tmp_path):
    load(model_dir)
    shutil.copytree(model_dir, tmp_path / "copy")  # with its times
    assert load(tmp_path / "copy")[3] == 0
    weights = tmp_path / "copy" / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] += 1
    stat = weights.stat()
    save_file(tensors, weights, metadata={"format": "pt"})
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # the same size and time: content decides
    assert load(tmp_path / "copy")[3] == 14
    assert len(bases(tmp_path)) == 2


def test_files_of_the_hub_are_known_by_their_hash_and_large_ones_by_pages(tmp_path):
    blob = tmp_path / "blobs" / ("ab" * 32)
    blob.parent.mkdir()
    blob.write_bytes(b"x" * 10)
    link = tmp_path / "model.safetensors"
    link.symlink_to(blob)
    assert content_of(link) == ["ab" * 32, 10]
    large = tmp_path / "large"
    data = bytearray(3 << 20)
    large.write_bytes(data)
    os.utime(large, ns=(0, 0))
    before = content_of(large)
    data[-1] = 1
    large.write_bytes(data)
    os.utime(large, ns=(0, 0))
    assert content_of(large) != before
    os.utime(large, ns=(0, 1))
    assert content_of(large)[0] != before[0]
    assert content_of(large)[2] == 1


def test_the_folder_stays_within_its_limit_and_forgets_what_was_used_longest_ago(model_dir, tmp_path):
    load(model_dir)
    (oldest,) = bases(tmp_path)
    size = oldest.stat().st_size
    (oldest.parent / ".dead.1.tmp").write_bytes(b"cut off")
    os.utime(oldest.parent / ".dead.1.tmp", (0, 0))
    (oldest.parent / ".alive.1.tmp").write_bytes(b"being written")
    load(model_dir, "int8")
    newer = next(file for file in bases(tmp_path) if file.suffix == ".safetensors" and file != oldest)
    assert not (oldest.parent / ".dead.1.tmp").exists()
    assert (oldest.parent / ".alive.1.tmp").exists()
    os.utime(newer, (1, 1))
    load(model_dir)  # a hit: the older one is now the one used last
    tiny_llama(tmp_path / "other", vocab_size=400, layers=1)
    write_tiny_tokenizer(tmp_path / "other")
    *_, said, _ = load(tmp_path / "other", limit_gb=(oldest.stat().st_size * 1.6) / 1e9)
    assert "1 used longest ago removed" in said
    assert oldest.exists()
    assert not newer.exists()
    *_, said, _ = load(tmp_path / "other", "int8", limit_gb=size / 1e12)
    assert "not kept" in said
    assert "model.cache_gb" in said
    assert load(model_dir, limit_gb=0.0)[1] is None


def test_a_folder_that_cannot_be_written_costs_a_line_and_not_the_run(model_dir, tmp_path):
    (tmp_path / "cache" / "rft").mkdir(parents=True)
    (tmp_path / "cache" / "rft" / "bases").write_text("a file")
    codes, _, said, _ = load(model_dir)
    assert "not kept" in said
    assert codes


def test_a_run_from_the_cache_makes_the_same_steps_and_its_receipt_says_so(model_dir, tmp_path, capsys):
    packs = random_packs(2, seq_len=24)
    losses, how = [], []
    for number in range(2):
        run = model_run(model_dir, tmp_path / str(number), packs, packs_per_step=2, model={"base_weights": "nf4"})
        losses.append(float(train_step(run, packs).terms["next_token"]))
        (applied,) = [a for a in run.receipts["applied"] if a["what"] == "nf4 base"]
        how.append((applied["how"], applied["checked"]))
    assert losses[0] == losses[1]
    assert "kept for the next run" in how[0][0]
    assert "codes from the cache" in how[1][0]
    assert how[0][1] == how[1][1]
    told = capsys.readouterr().out
    assert "base     nf4, quantised while reading" in told
    assert "base     nf4, codes from the cache" in told


def test_small_bases_and_checkpoints_that_hold_codes_are_not_kept(model_dir, monkeypatch):
    source = find_model(ModelConfig(path=str(model_dir)))
    monkeypatch.setattr(base_cache, "LEAST_BYTES", 1 << 20)
    assert cache_of(source) is None
    monkeypatch.setattr(base_cache, "LEAST_BYTES", 0)
    assert cache_of(source) is not None
    source.reader.packed = lambda name: None
    assert cache_of(source) is None


def cache_of(source: ModelSource) -> BaseCache | None:
    model = build_meta(source, ModelConfig(path=str(source.path)), torch.float32).requires_grad_(False)
    placed = place(model, list(model.model.layers), "nf4")
    assert all(isinstance(linear, PackedLinear) for linear in placed.linears.values())
    return BaseCache.of(source, placed, CPU, 1.0)


def test_no_base_is_given_up_for_one_that_has_no_room_all_the_same(model_dir, tmp_path, monkeypatch):
    load(model_dir)
    (kept,) = bases(tmp_path)
    full = SimpleNamespace(free=0)
    monkeypatch.setattr(base_cache.shutil, "disk_usage", lambda folder: full)
    *_, said, _ = load(model_dir, "int8", limit_gb=kept.stat().st_size * 2.1 / 1e9)
    assert "not kept" in said
    assert kept.exists()


def test_a_lower_bound_holds_when_a_base_is_read_too(model_dir, tmp_path):
    load(model_dir, "int8")
    (older,) = bases(tmp_path)
    load(model_dir)
    (newer,) = (file for file in bases(tmp_path) if file != older)
    load(model_dir, limit_gb=newer.stat().st_size * 1.1 / 1e9)
    assert bases(tmp_path) == [newer]
