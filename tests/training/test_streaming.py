"""Training while the data is prepared: the prepared set's losses, on one rank and two, through kill -9, with sources that fail."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import rft.data
from rft.checkpoint.load import find_latest
from rft.config.load import load_config
from rft.data.streaming import StreamLoader
from rft.errors import DataError, RftError
from rft.training.api import train_config
from support.command import Command, metrics, wait_for_step, write_project
from support.command import rft as run_rft
from support.data import some_chats, write_rows

RUN = Path("runs") / "chat"
WINDOW = 2_000  # bytes of ids: some 12 windows of the rows below
PROGRAM = (
    sys.executable,
    "-P",
    "-c",
    f"import sys, rft.data.prepare as p; p.SHARD_BYTES = {WINDOW}; from rft.__main__ import main; sys.exit(main())",
)
"""`rft` with small windows."""


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr("rft.data.prepare.SHARD_BYTES", WINDOW)
    monkeypatch.setattr("rft.data.streaming.FIRST_WAIT", 0.01)


def project(folder: Path, steps: int, *, rows: int = 48, more: str = "", dropout: float = 0.1) -> Path:
    """Two data sets of different size; the second one with a weight and loss weights in some rows."""
    config = write_project(
        folder,
        some_chats(rows),
        data=f'shuffle = "window"\n{more}',
        train=f"max_steps = {steps}",
        adapter=f"r = 4\ndropout = {dropout}",
        checkpoint="save_every_steps = 7",
    )
    chats = some_chats(rows // 4)
    random.Random(3).shuffle(chats)
    write_rows(
        folder / "more.jsonl", [row | ({"loss_weight": 0.5} if i % 3 == 0 else {}) for i, row in enumerate(chats)]
    )
    text = config.read_text().replace(
        '[[data.train]]\npath = "train.jsonl"\n',
        '[[data.train]]\npath = "train.jsonl"\n\n[[data.train]]\npath = "more.jsonl"\nweight = 1.5\n',
    )
    config.write_text(text)
    return config


def swapped(row: dict) -> dict:
    """A chat of the same length with other letters."""
    return {"messages": [{**message, "content": message["content"].swapcase()} for message in row["messages"]]}


def numbers(run_dir: Path) -> list[tuple]:
    return [(line["step"], line["loss"], line["grad_norm"], line["tokens"]) for line in metrics(run_dir)]


def trained(config: Path, out: str, *sets: str) -> Path:
    run_dir = config.parent / out
    train_config(load_config(config, [f"train.out={run_dir}", *sets]), device="cpu")
    return run_dir


def trained_by_command(config: Path, out: str) -> Path:
    """In a process like the one that was killed."""
    status, output = Command(
        "train", config, "--set", f"train.out={out}", cwd=config.parent, program=PROGRAM
    ).end()  # fmt: skip
    assert status == 0, output
    return config.parent / out


def test_a_stream_trains_to_the_losses_of_the_prepared_set_through_two_epochs(tmp_path):
    config = project(tmp_path, 95)
    prepared = trained(config, "prepared")
    streamed = trained(config, "streamed", "data.streaming=true")
    expected = numbers(prepared)
    assert numbers(streamed) == expected
    epochs = [line["epoch"] for line in metrics(streamed)]
    assert epochs == sorted(epochs)
    assert 1 < epochs[-1] < 2.1, "an epoch and a part of the next"
    data = json.loads((streamed / "data.json").read_text())["train"]
    assert data["read"] == data["kept"] + sum(data["dropped"].values())
    assert data["since_start"]["windows"] > 2
    assert data["read"] > 0
    assert list((tmp_path / "sets" / "streams").iterdir()) == [], "nothing of the stream is left"


def test_killed_at_once_and_started_again_the_stream_goes_on_with_the_same_steps(tmp_path):
    config = project(tmp_path, 60, more="streaming = true")
    torch.set_num_threads(1)  # as the process that is killed has: sums are added in the same order
    straight = numbers(trained(config, "straight"))
    command = Command("train", config, cwd=tmp_path, program=PROGRAM)
    wait_for_step(tmp_path / RUN, 30, command)
    command.kill()
    left = list((tmp_path / "sets" / "streams").iterdir())
    assert left, "windows that the killed process made"
    shutil.rmtree(tmp_path / "sets")  # a position needs nothing but the data
    trained_by_command(config, str(RUN))
    assert numbers(tmp_path / RUN)[-30:] == straight[-30:]
    assert {line[0]: line for line in numbers(tmp_path / RUN)} == {line[0]: line for line in straight}


def test_changed_rows_are_refused_when_a_stream_goes_on(tmp_path):
    config = project(tmp_path, 20, more="streaming = true")
    trained(config, str(RUN))
    (tmp_path / RUN / "summary.json").unlink()
    shutil.rmtree(tmp_path / RUN / "checkpoints" / "step-20")
    rows = (tmp_path / "train.jsonl").read_text()
    write_rows(tmp_path / "train.jsonl", [swapped(json.loads(line)) for line in rows.splitlines()])
    assert len((tmp_path / "train.jsonl").read_text()) == len(rows)
    with pytest.raises(DataError, match="not those that were trained on"):
        trained(config, str(RUN))
    (tmp_path / "train.jsonl").write_text(rows + rows.splitlines()[0] + "\n")
    with pytest.raises(RftError, match="changed since step-14"):
        trained(config, str(RUN))


def test_a_row_that_is_wrong_stops_the_run_after_a_checkpoint(tmp_path):
    config = project(tmp_path, 500, more="streaming = true")
    lines = (tmp_path / "train.jsonl").read_text().splitlines()
    lines[40] = '{"messages": 7}'
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"train\.jsonl:41"):
        trained(config, str(RUN))
    done = metrics(tmp_path / RUN)[-1]["step"]
    assert done > 20
    saved = find_latest(tmp_path / RUN)
    assert saved.step == done


def test_a_source_that_goes_away_is_tried_again_and_then_told_after_a_checkpoint(tmp_path, monkeypatch):
    config = project(tmp_path, 75, more="streaming = true")
    config.write_text(config.read_text().replace('path = "more.jsonl"', 'path = "parts/*.jsonl"'))
    (tmp_path / "parts").mkdir()
    for part in range(3):
        write_rows(tmp_path / "parts" / f"{part}.jsonl", some_chats(12)[4 * part : 4 * part + 4])
    begin = StreamLoader._begin

    def begin_without_it(self, *arguments):
        (tmp_path / "parts" / "2.jsonl").unlink(missing_ok=True)  # listed, and gone when its turn comes
        return begin(self, *arguments)

    monkeypatch.setattr(StreamLoader, "_begin", begin_without_it)
    with pytest.raises(RftError, match=r"2\.jsonl: no such file"):
        trained(config, str(RUN))
    done = metrics(tmp_path / RUN)[-1]["step"]
    assert done > 10
    assert find_latest(tmp_path / RUN).step == done
    monkeypatch.undo()
    monkeypatch.setattr("rft.data.prepare.SHARD_BYTES", WINDOW)
    write_rows(tmp_path / "parts" / "2.jsonl", some_chats(12)[8:])
    trained(config, str(RUN))
    assert metrics(tmp_path / RUN)[-1]["step"] == 75


@pytest.mark.slow
def test_two_ranks_read_one_stream_and_make_the_steps_of_one(tmp_path):
    config = project(tmp_path, 24, more="streaming = true", dropout=0.0)  # ranks would drop other places
    alone = numbers(trained(config, "alone"))
    environment = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    ranks = [
        subprocess.Popen(
            [*PROGRAM, "train", config, "--set", "train.accumulate=1"],
            cwd=tmp_path,
            env={**os.environ, **environment, "RANK": rank, "LOCAL_RANK": rank, "CUDA_VISIBLE_DEVICES": ""},
        )
        for rank in ("0", "1")
    ]
    assert [rank.wait(timeout=200) for rank in ranks] == [0, 0]
    together = numbers(tmp_path / RUN)
    assert [line[3] for line in together] == [line[3] for line in alone]
    for ours, theirs in zip(together, alone, strict=True):
        assert ours[1] == pytest.approx(theirs[1], rel=1e-3)


@pytest.mark.slow
def test_fifty_megabytes_stream_through_training_with_the_losses_of_the_prepared_set(tmp_path, monkeypatch):
    monkeypatch.setattr("rft.data.prepare.SHARD_BYTES", 4_000_000)
    config = project(tmp_path, 30)
    words = [row["messages"][1]["content"] for row in some_chats(500)]
    draw = random.Random(1)
    with (tmp_path / "train.jsonl").open("w") as rows:
        while rows.tell() < 50_000_000:
            turns = [{"role": role, "content": " ".join(draw.choices(words, k=60))} for role in ("user", "assistant")]
            rows.write(json.dumps({"messages": turns}) + "\n")
    sets = ["data.seq_len=512", "train.accumulate=1"]
    streamed = trained(config, "streamed", *sets, "data.streaming=true")
    assert numbers(streamed) == numbers(trained(config, "prepared", *sets))
    assert numbers(streamed)[-1][0] == 30
    # Every batch of the epoch, without the model: the same as of the prepared set.
    asked = {"seq_len": 4096, "micro_batch": 4, "seed": 0, "arrays": "numpy"}
    store = json.loads((tmp_path / "prepared" / "data.json").read_text())["train"]["store"]
    whole = rft.data.open(store, shuffle="window", **asked)
    stream = rft.data.open(config, streaming=True, **asked)
    pairs = enumerate(zip(stream.epoch(0), whole.epoch(0), strict=True), start=1)
    for number, (ours, theirs) in pairs:
        last = number
        assert np.array_equal(ours.input_ids, theirs.input_ids)
        assert np.array_equal(ours.labels, theirs.labels)
    assert last == whole.batches_in_epoch(0) > 100
    stream.close()


def test_an_open_stream_goes_on_from_its_state_on_another_number_of_ranks(tmp_path):
    config = project(tmp_path, 10)

    def opened(**options):
        return rft.data.open(config, streaming=True, **{"seq_len": 64, "seed": 3, **options})

    stream, batches, state = opened(micro_batch=2), [], {}
    for number, batch in enumerate(stream.epoch(0), start=1):
        batches.append(batch)
        if number == 20:
            state = json.loads(json.dumps(stream.state(0, number)))
    stream.close()
    assert state["cursor"]["window"] > 1
    assert len(batches) > 60
    ranks = [opened(rank=rank, world_size=2) for rank in (0, 1)]
    dealt = zip(*(rank.resume(state) for rank in ranks), strict=True)
    for whole, parts in zip(batches[20:], dealt, strict=True):
        packs = sorted(whole.input_ids.view(2, 64).tolist())
        assert packs == sorted(part.input_ids[0].tolist() for part in parts)
    with pytest.raises(DataError, match="other packs"):
        next(opened(seq_len=128).resume(state))
    for rank in ranks:
        rank.close()
    for odd in ({}, None, {**state, "packs": -1}, {**state, "epoch": 0.5}, {**state, "cursor": "window 3"}):
        with pytest.raises(ValueError, match=r"state|packs|epoch|cursor"):
            next(stream.resume(odd))
    with pytest.raises(ValueError, match="batches = -1"):
        stream.state(0, -1)
    for option in ({"pad_id": 10**6}, {"rank": 2}, {"micro_batch": 0}):
        with pytest.raises(ValueError, match=next(iter(option))):
            opened(**option)


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


@pytest.mark.parametrize(
    ("sets", "word"),
    [
        (["data.streaming=true", "data.shuffle=full", "train.max_steps=5"], "data.shuffle"),
        (["data.streaming=true", "data.shuffle=window"], "train.max_steps"),
    ],
)
def test_what_streaming_needs_is_said(tmp_path, sets, word):
    config = write_project(tmp_path)
    code, out = run_rft("train", config, *[part for entry in sets for part in ("--set", entry)], cwd=tmp_path)
    assert code == 2
    assert word in out
    code, out = run_rft("prepare", project(tmp_path, 5, more="streaming = true"), cwd=tmp_path)
    assert code == 2
    assert "data.streaming=false" in out
