"""A checkpoint is complete or invisible, and every byte of it is checked before a value is used."""

from __future__ import annotations

import errno
import json
import pickle
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rft.checkpoint import files
from rft.checkpoint.load import find_latest, load_tensors, open_checkpoint, read_tensors
from rft.checkpoint.save import Mark, rotate, save_checkpoint
from rft.errors import CheckpointError

DOCUMENTS = {"state.json": {"step": 0}, "config.json": {"lr": 1e-4}, "versions.json": {"torch": "2"}}


def model_tensors(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model.a.weight": torch.randn(7, 5, generator=generator),
        "model.b.weight": torch.randn(33, generator=generator).bfloat16(),
        "model.count": torch.tensor(seed),
    }


def optimizer_tensors(seed: int = 0) -> dict[str, Tensor]:
    named = {f"model.a.weight::{key}": torch.full((7, 5), seed + 0.1) for key in ("exp_avg", "exp_avg_sq")}
    return {**named, "model.a.weight::step": torch.tensor(float(seed))}


def save(root: Path, step: int, *, run_id: str = "run", eval_loss: float | None = None) -> Path:
    return save_checkpoint(
        root,
        Mark(step, run_id, eval_loss),
        model=model_tensors(step),
        optimizer=optimizer_tensors(step),
        documents={**DOCUMENTS, "state.json": {"step": step}},
        rank_document={"rank": 0},
    )


def assert_holds(path: Path, step: int) -> None:
    checkpoint = open_checkpoint(path)
    for part, expected in (("model", model_tensors(step)), ("optimizer", optimizer_tensors(step))):
        found = read_tensors(checkpoint, part)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor), name


@pytest.fixture
def run_dir(tmp_path) -> Path:
    """A run with complete checkpoints of steps 10 and 20."""
    for step in (10, 20):
        save(tmp_path / "checkpoints", step)
    return tmp_path


def names_of(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())


FILES = [
    "complete.json", "config.json", "model/tensors-00001-of-00001.safetensors",
    "optimizer/tensors-00001-of-00001.safetensors", "rng/rank-00001.json", "state.json", "versions.json",
]  # fmt: skip


def test_what_is_saved_comes_back_bit_for_bit(run_dir):
    assert names_of(run_dir / "checkpoints" / "step-20") == FILES
    found = find_latest(run_dir)
    assert (found.step, found.state, found.rank_document(0), found.rank_document(1)) == (
        20,
        {"step": 20},
        {"rank": 0},
        None,
    )
    assert found.skipped == ()
    assert_holds(found.path, 20)
    into = {name: torch.zeros_like(tensor) for name, tensor in model_tensors().items()}
    load_tensors(found, "model", into)
    assert all(torch.equal(into[name], tensor) for name, tensor in model_tensors(20).items())


# ---- cut off, killed, full (BO-31)


def test_a_save_that_was_killed_is_invisible_and_is_written_again(run_dir):
    root = run_dir / "checkpoints"
    (root / "step-20").rename(root / ".step-20.saving")  # where a kill before the rename leaves it
    (root / ".step-20.saving" / "complete.json").unlink()
    assert find_latest(run_dir).step == 10
    assert (root / ".step-20.saving").exists()  # someone who only looks removes nothing
    assert_holds(save(root, 20), 20)
    assert sorted(path.name for path in root.iterdir()) == ["step-10", "step-20"]


def test_a_folder_without_its_mark_is_passed_over_with_the_reason(run_dir):
    (run_dir / "checkpoints" / "step-20" / "complete.json").unlink()
    found = find_latest(run_dir)
    assert found.step == 10
    assert found.skipped == ("step-20: it has no complete.json, so its save never ended",)
    assert_holds(save(run_dir / "checkpoints", 20), 20)


@pytest.mark.parametrize("name", [name for name in FILES if name != "complete.json"])
def test_a_file_that_was_cut_off_changed_or_lost_is_found_before_a_value_is_used(run_dir, name):
    path = run_dir / "checkpoints" / "step-20" / name
    whole = path.read_bytes()
    flipped = whole[:-1] + bytes([whole[-1] ^ 1])
    for content, reason in (
        (whole[:-1], "is cut off"),
        (flipped, "was changed"),
        (whole + b" ", "was changed"),
        (None, "is missing"),
    ):
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        found = find_latest(run_dir)
        assert found.step == 10
        assert name in found.skipped[0]
        assert reason in found.skipped[0]
        with pytest.raises(CheckpointError, match=reason):
            open_checkpoint(path.parents[len(Path(name).parts) - 1])


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_over_in_silence(run_dir):
    for step in (10, 20):
        (run_dir / "checkpoints" / f"step-{step}" / "state.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"no checkpoint here is complete: step-20: state.json is missing; step-10"
    ):
        find_latest(run_dir)


def test_a_full_disk_is_named_and_leaves_the_earlier_checkpoint_as_it_was(run_dir, monkeypatch):
    def full(file) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "_sync", full)
    before = {name: (run_dir / "checkpoints" / "step-20" / name).read_bytes() for name in FILES}
    for step in (20, 30):  # also where it would replace a complete one
        with pytest.raises(CheckpointError, match="the disk is full"):
            save(run_dir / "checkpoints", step)
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["step-10", "step-20"]
    assert before == {name: (run_dir / "checkpoints" / "step-20" / name).read_bytes() for name in FILES}


def test_a_checkpoint_that_cannot_fit_is_refused_before_anything_is_written(run_dir, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2**30, 2**30 - 1000, 1000))
    with pytest.raises(CheckpointError, match=r"the disk is full: the checkpoint needs .* GiB, and .* are free"):
        save(run_dir / "checkpoints", 30)
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["step-10", "step-20"]


FILL_A_REAL_DISK = """
    import os, shutil, sys
    sys.path[:0] = [{tests!r}, {folder!r}]
    import test_save_load as t
    from rft.errors import CheckpointError
    import rft.checkpoint.save
    rft.checkpoint.save.check_room = lambda *a, **k: None  # to see the write itself fail
    root = t.Path({disk!r}) / "checkpoints"
    t.save(root, 10)
    (root.parent / "filler").write_bytes(b"x" * (shutil.disk_usage(root).free - 4096))
    try:
        t.save(root, 20)
    except CheckpointError as error:
        print(error)
    t.assert_holds(root / "step-10", 10)
    print(sorted(os.listdir(root)))
    (root.parent / "filler").unlink()
    t.assert_holds(t.save(root, 20), 20)
"""


def test_a_disk_that_really_is_full_is_named_and_the_save_works_once_there_is_room(tmp_path):
    here = Path(__file__)
    script = textwrap.dedent(FILL_A_REAL_DISK).format(
        tests=str(here.parents[1]), folder=str(here.parent), disk=str(tmp_path)
    )
    mount = f'mount -t tmpfs -o size=256k tmpfs {tmp_path} && exec {sys.executable} -P -c "$0"'
    inside = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if (
        not shutil.which("unshare")
        or subprocess.run([*inside, f"mount -t tmpfs tmpfs {tmp_path}"], capture_output=True).returncode
    ):
        pytest.skip("needs user namespaces, to mount a small disk")
    done = subprocess.run([*inside, mount, script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "the disk is full" in done.stdout
    assert "['step-10']" in done.stdout


@pytest.mark.parametrize("mark", ["{", "[]", "{}", ""])
def test_a_damaged_mark_is_passed_over_like_any_other_damage(run_dir, mark):
    (run_dir / "checkpoints" / "step-20" / "complete.json").write_text(mark)
    found = find_latest(run_dir)
    assert found.path.name == "step-10"
    assert "complete.json" in found.skipped[0]


def test_a_record_that_is_none_is_damage(run_dir):
    path = run_dir / "checkpoints" / "step-20" / "complete.json"
    for record in (3, None, {}, {"bytes": "3", "sha256": "x"}, {"bytes": 3}):
        mark = json.loads(path.read_text())
        mark["files"]["state.json"] = record
        path.write_text(json.dumps(mark))
        assert "does not say what state.json was" in find_latest(run_dir).skipped[0]


@pytest.mark.parametrize("version", [2, None, "1"])
def test_a_checkpoint_of_another_format_stops_the_run_instead_of_losing_its_steps(run_dir, version):
    path = run_dir / "checkpoints" / "step-20" / "complete.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": version}))
    with pytest.raises(CheckpointError, match="has format version") as raised:
        find_latest(run_dir)  # step-10 is complete, and older
    assert raised.value.where == str(path)
    assert raised.value.wanted == "version 1"


# ---- nothing is unpickled (BO-42)


class Bomb:
    """What an attacker writes: reading it makes a file."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("protocol", [0, 2, 5])
@pytest.mark.parametrize("name", FILES)
def test_a_pickle_in_place_of_any_file_is_refused_by_name_and_not_run(run_dir, name, protocol, tmp_path):
    marker = tmp_path / "marker"
    path = run_dir / "checkpoints" / "step-20" / name
    path.write_bytes(pickle.dumps(Bomb(marker), protocol=protocol))
    if protocol == 0 and name != "complete.json":  # text: no sign of a pickle, but not the bytes that were written
        assert name in find_latest(run_dir).skipped[0]
    else:
        with pytest.raises(CheckpointError, match=name):
            find_latest(run_dir)
    with pytest.raises(CheckpointError, match=name):
        open_checkpoint(run_dir / "checkpoints" / "step-20")
    assert not marker.exists()


def test_torch_save_files_and_files_that_were_not_saved_are_refused(run_dir):
    state = run_dir / "checkpoints" / "step-20" / "state.json"
    written = state.read_bytes()
    torch.save({"step": 20}, state)
    with pytest.raises(CheckpointError, match=r"state.json: the file holds a pickle"):
        find_latest(run_dir)
    state.write_bytes(written)
    extra = state.parent / "model" / "more.safetensors"
    shutil.copy(state.parent / FILES[2], extra)
    with pytest.raises(CheckpointError, match=r"more.safetensors: is a file that this checkpoint was not saved with"):
        find_latest(run_dir)


def test_a_mark_cannot_name_files_outside_the_checkpoint(run_dir):
    path = run_dir / "checkpoints" / "step-20" / "complete.json"
    mark = json.loads(path.read_text())
    mark["files"]["../step-10/state.json"] = mark["files"]["state.json"]
    path.write_text(json.dumps(mark))
    with pytest.raises(CheckpointError, match="names a file outside the checkpoint"):
        find_latest(run_dir)


# ---- what does not fit


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: t.pop("model.count"), "has model.count, which this config does not train"),
        (lambda t: t.update(more=torch.zeros(1)), "lacks more"),
        (
            lambda t: t.update({"model.a.weight": torch.zeros(5, 7)}),
            r"is torch.float32 \[7, 5\], this model's is torch.float32 \[5, 7\]",
        ),
        (lambda t: t.update({"model.a.weight": torch.zeros(7, 5).bfloat16()}), "this model's is torch.bfloat16"),
    ],
    ids=["surplus", "lacking", "shape", "type"],
)
def test_other_tensors_than_the_saved_ones_are_refused_and_left_as_they_were(run_dir, change, told):
    into = model_tensors()
    change(into)
    before = {name: tensor.clone() for name, tensor in into.items()}
    with pytest.raises(CheckpointError, match=told):
        load_tensors(find_latest(run_dir), "model", into)
    assert all(torch.equal(into[name], before[name]) for name in into)


# ---- rotation


def steps_in(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in root.glob("step-*"))


def test_the_newest_and_the_best_stay_and_nothing_of_another_run_goes(tmp_path):
    save(tmp_path, 2, run_id="another run")
    (tmp_path / "step-3").mkdir()  # not complete, so not known to be ours
    (tmp_path / "step-4-mine").mkdir()
    losses = {5: 5.0, 10: 3.0, 15: None, 20: 4.0, 25: float("nan"), 30: 9.0}
    for step, loss in losses.items():
        save(tmp_path, step, eval_loss=loss)
        rotate(tmp_path, "run", keep_last=2, keep_best=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-10",
        "step-2",
        "step-25",
        "step-3",
        "step-30",
        "step-4-mine",
    ]


def test_without_keep_best_only_the_newest_stay(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step, eval_loss=float(step))
        rotate(tmp_path, "run", keep_last=1, keep_best=0)
    assert steps_in(tmp_path) == [3]
    assert_holds(tmp_path / "step-3", 3)
