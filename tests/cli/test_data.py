"""`rft data` and `rft-data`: list, verify, export, remove prepared sets."""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from rft import _native, cli
from support.data import chat, prepare_rows, some_chats, tiny_files


@pytest.fixture
def store(tmp_path):
    """A store with one set of 60 chats, some of them weighted."""
    rows = [*some_chats(59), {**chat("weigh", "this"), "loss_weight": 0.5}]
    return Path(prepare_rows(tmp_path, rows, tiny_files(tmp_path / "tokenizer")).report["train"]["store"])


@pytest.fixture
def data(capsys):
    """Runs `rft data ...`: exit code, stdout, stderr."""

    def run(*arguments):
        code = cli.run(["data", *map(str, arguments)])
        told = capsys.readouterr()
        return code, told.out, told.err

    return run


# ---- usage


def test_help_names_the_commands_and_each_has_its_own(data):
    code, out, _ = data("--help")
    assert code == 0
    assert "Usage: rft data <COMMAND>" in out
    for name in ("ls", "verify", "export", "prune"):
        assert f"  {name} " in out
        code, help_text, _ = data(name, "--help")
        assert (code, f"Usage: rft data {name}" in help_text, "--json" in help_text) == (0, True, True)
    assert data()[0] == 2


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["prun"], "'prune'"),
        (["ls", "--jsn"], "'--json'"),
        (["verify", "nothing", "--store", "."], "no prepared set"),
        (["export", "x", "--to", "a.csv", "--store", "."], "no prepared set"),
        (["ls", "--store", "nowhere"], "does not exist"),
        (["prune", "--max-size", "5X"], "use K, M, G or T"),
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_with_2_and_says_what_is_wanted(data, arguments, told):
    code, out, err = data(*arguments)
    assert (code, out) == (2, "")
    assert told in err


# ---- verify


def test_verify_says_ok_or_which_part_of_which_file_is_damaged(data, store):
    code, out, _ = data("verify", store)
    assert code == 0
    assert out.startswith(f"ok       {store}: 60 documents")
    assert data("verify", store.name[:8], "--store", store.parent)[1] == out
    shard = store / "data-00000.rft"
    content = bytearray(shard.read_bytes())
    content[4100] ^= 1
    shard.write_bytes(content)
    code, out, _ = data("verify", store)
    assert code == 1
    assert f"damaged  {shard}: section tokens is not what was written" in out
    code, out, _ = data("verify", store, "--json")
    (told,) = json.loads(out)
    assert (code, told["ok"], told["problems"][0]["file"]) == (1, False, str(shard))


def test_verify_finds_every_flip_and_every_truncation(data, store):
    pick = random.Random(0)
    files = sorted(store.iterdir())
    for _ in range(60):
        file = pick.choice(files)
        good = file.read_bytes()
        at = pick.randrange(len(good))
        with file.open("r+b") as stream:
            stream.seek(at)
            stream.write(bytes([good[at] ^ 1 << pick.randrange(8)]))
            stream.flush()
            assert data("verify", store)[0] == 1, f"{file.name} at {at}"
            stream.truncate(at)
            assert data("verify", store)[0] == 1, f"{file.name} cut at {at}"
            stream.seek(at)
            stream.write(good[at:])
    assert data("verify", store)[0] == 0


@pytest.mark.parametrize("file", ["manifest.json", "data-00000.rft"])
def test_verify_of_a_whole_store_does_not_pass_over_a_damaged_set(data, store, file):
    (store / file).write_bytes((store / file).read_bytes()[:-1])
    code, out, _ = data("verify", "--store", store.parent)
    assert (code, out.startswith(f"damaged  {store / file}")) == (1, True)
    assert data("verify", "--store", store.parent, "--json")[0] == 1


# ---- ls and prune


def test_ls_shows_what_the_store_holds(data, store):
    code, out, _ = data("ls", "--store", store.parent)
    assert code == 0
    assert store.name[:12] in out
    assert "60 documents" in out
    assert "rows.jsonl" in out
    (told,) = json.loads(data("ls", "--store", store.parent, "--json")[1])
    manifest = json.loads((store / "manifest.json").read_text())
    assert (told["key"], told["state"]) == (store.name, "complete")
    assert (told["documents"], told["tokens"]) == (60, manifest["tokens"])
    assert told["bytes"] == sum(file.stat().st_size for file in store.iterdir())
    assert data("ls", "--store", store.parent / "known")[1] == "no prepared sets\n"


@pytest.fixture
def cluttered(store):
    """A store with one of everything that is of no use."""
    root = store.parent
    (root / "unfinished.part").mkdir()
    (root / "unfinished.part" / "data-00000.rft.tmp").write_bytes(b"x" * 100)
    (root / "written.part").mkdir()
    for name in ("older", "damaged"):
        shutil.copytree(store, root / name)
    (root / "older" / "manifest.json").write_bytes(_of_version_1(store))
    (root / "damaged" / "data-00000.rft").write_bytes(b"short")
    (root / "gone.tmp-77").mkdir()
    (root / "rows.tmp-new").mkdir()
    past = time.time() - 3 * 86400
    os.utime(root / "gone.tmp-77", (past, past))
    return root


def _of_version_1(store):
    from xxhash import xxh3_64_hexdigest

    text = (store / "manifest.json").read_bytes().replace(b'"format_version": 2', b'"format_version": 1', 1)
    body = text.rpartition(b',\n  "self_xxh3": "')[0]
    return body + b',\n  "self_xxh3": "' + xxh3_64_hexdigest(body).encode() + b'"\n}\n'


def test_prune_removes_what_is_of_no_use_and_nothing_else(data, store, cluttered):
    with (cluttered / "written.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, out, _ = data("prune", "--store", cluttered, "--dry-run")
        assert (code, len(list(cluttered.glob("*.part")))) == (0, 2)
        assert "would remove 4," in out
        code, out, _ = data("prune", "--store", cluttered)
        assert code == 0
        assert "removed 4," in out
        assert "kept (a process is writing it)" in out
    left = {path.name for path in cluttered.iterdir()} - {"known", "written.lock"}
    assert left == {store.name, "written.part", "rows.tmp-new"}
    assert data("verify", store)[0] == 0


def test_prune_by_age_and_size_takes_the_least_recently_used_first(data, store):
    root = store.parent
    for number, days in ((1, 1), (2, 30), (3, 10)):
        copy = root / f"{number}{store.name[1:]}"
        shutil.copytree(store, copy)
        at = time.time() - days * 86400
        os.utime(copy, (at, at))
    size = sum(file.stat().st_size for file in store.iterdir())
    told = json.loads(data("prune", "--store", root, "--max-size", str(2 * size), "--json", "--dry-run")[1])
    assert [Path(one["path"]).name[0] for one in told] == ["2", "3"]
    told = json.loads(data("prune", "--store", root, "--older-than", "5", "--json")[1])
    assert [Path(one["path"]).name[0] for one in told] == ["2", "3"]
    data("prune", "--store", root, f"1{store.name[1:]}")
    assert [path.name for path in root.iterdir() if path.is_dir() and path.name != "known"] == [store.name]


def test_sets_that_are_used_are_not_old(tmp_path, store):
    past = time.time() - 86400
    os.utime(store, (past, past))
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    again = prepare_rows(tmp_path, rows, tiny_files(tmp_path / "tokenizer"))
    assert again.report["train"]["reused"]
    assert time.time() - store.stat().st_mtime < 60


# ---- export


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_export_gives_ids_and_labels_as_datasets_reads_them(data, store, tmp_path, ending):
    pyarrow = pytest.importorskip("pyarrow")
    target = tmp_path / f"out.{ending}"
    code, out, _ = data("export", store, "--to", target)
    assert code == 0
    assert "60 documents" in out
    if ending == "parquet":
        table = pytest.importorskip("pyarrow.parquet").read_table(target)
    else:
        table = pyarrow.ipc.open_file(target).read_all()
    table.validate(full=True)
    assert [str(kind) for kind in table.schema.types] == [
        "list<item: int32 not null>",
        "list<item: int32 not null>",
        "list<item: float not null>",
        "string",
        "int64",
    ]
    native = _native.Store(str(store))
    rows = table.to_pylist()
    assert len(rows) == native.num_documents
    for index, row in enumerate(rows):
        ids, trained, weights = native.document(index)
        assert row["input_ids"] == ids.tolist()
        assert row["labels"] == [int(i) if bit else -100 for i, bit in zip(ids, trained, strict=True)]
        assert row["weights"] == weights.tolist()
        assert (row["source"], row["line"]) == native.origin(index)
    assert data("export", store, "--to", target)[0] == 2, "a file that is there"
    assert data("export", store, "--to", target, "--force", "--json")[0] == 0
    assert not list(tmp_path.glob("*.tmp-*"))


def test_export_of_a_damaged_set_writes_nothing(data, store, tmp_path):
    shard = store / "data-00000.rft"
    content = bytearray(shard.read_bytes())
    content[4100] ^= 1
    shard.write_bytes(content)
    code, _, err = data("export", store, "--to", tmp_path / "out.parquet")
    assert code == 2
    assert "damaged" in err
    assert not list(tmp_path.glob("out.*"))


def test_full_disk_while_exporting_is_told(store, tmp_path):
    import sys

    program = """
import resource, sys
from rft.cli import run
resource.setrlimit(resource.RLIMIT_FSIZE, (3_000, 3_000))
sys.exit(run(["data", "export", sys.argv[1], "--to", sys.argv[2]]))
"""
    arguments = [sys.executable, "-P", "-c", program, str(store), str(tmp_path / "out.arrow")]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "error  " in done.stderr
    assert "free some space" in done.stderr
    assert not list(tmp_path.glob("out.*"))
