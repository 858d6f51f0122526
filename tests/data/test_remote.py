"""Data from web servers, stores like those of S3, Google and Azure, and the hub: the right bytes or a clear error under every fault, a cache that keeps its limit."""

from __future__ import annotations

import fcntl
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rft import _native
from rft.config.data import DataConfig, SourceConfig
from rft.config.load import load_config
from rft.data.prepare import prepare
from rft.data.sources import Caches, expand
from rft.errors import ConfigError, DataError
from support.data import some_chats, tiny_files, write_rows, write_tiny_tokenizer
from support.server import serving

MIB = 1 << 20
BIG = random.Random(3).randbytes(16 * MIB + 12345)
"""Three ranges of 8 MiB."""


@pytest.fixture
def server(monkeypatch):
    with serving() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        monkeypatch.setenv("GOOGLE_BASE_URL", server.url)
        monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")
        monkeypatch.setenv("AZURE_STORAGE_USE_EMULATOR", "true")
        monkeypatch.setenv("AZURITE_BLOB_STORAGE_URL", server.url)
        yield server


def fetch(tmp_path, *urls, limit=1 << 40):
    return [Path(name) for name in _native.fetch_remote(list(urls), str(tmp_path / "cache"), limit)]


STORES = ["https", "s3", "gs", "az"]


def url_of(server, store, path):
    return server.url + path if store == "https" else f"{store}:/{path}"


# ---- the right bytes


@pytest.mark.parametrize("store", STORES)
def test_file_comes_whole_once_and_then_from_the_cache(server, tmp_path, store):
    server.objects["/bucket/a.bin"] = BIG
    (file,) = fetch(tmp_path, url_of(server, store, "/bucket/a.bin"))
    assert file.read_bytes() == BIG
    assert file.name.endswith("-a.bin")
    assert sorted(server.gets("/bucket/a.bin"))[0].startswith("bytes=0-")
    assert len(server.gets("/bucket/a.bin")) == 3
    assert fetch(tmp_path, url_of(server, store, "/bucket/a.bin")) == [file]
    assert len(server.gets("/bucket/a.bin")) == 3


def cut(request, content):
    """The connection ends in the middle of the body."""
    start, end = request.range(len(content))
    headers = {"Content-Range": f"bytes {start}-{end - 1}/{len(content)}"}
    request.reply(206, content[start : (start + end) // 2], headers, length=end - start)


def unavailable(request, content):
    request.reply(503, b"later")


def short(request, content):
    """A whole answer, but to a shorter range than was asked for."""
    start, end = request.range(len(content))
    request.reply(206, content[start : end - 7], {"Content-Range": f"bytes {start}-{end - 8}/{len(content)}"})


def another_length(request, content):
    """An answer that says that the file has another length."""
    start, end = request.range(len(content))
    request.reply(206, content[start:end], {"Content-Range": f"bytes {start}-{end - 1}/{len(content) + 5}"})


def hang_up(request, content):
    request.close_connection = True
    request.connection.close()


FAULTS = (cut, unavailable, short, another_length, hang_up)


@pytest.mark.parametrize("store", ["https", *(pytest.param(store, marks=pytest.mark.slow) for store in STORES[1:])])
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_that_passes_changes_nothing(server, tmp_path, store, fault):
    server.objects["/bucket/a.bin"] = BIG
    server.faults = [fault, fault]
    (file,) = fetch(tmp_path, url_of(server, store, "/bucket/a.bin"))
    assert file.read_bytes() == BIG
    assert not server.faults


@pytest.mark.parametrize("store", STORES)
def test_file_that_changes_meanwhile_comes_in_its_new_state_as_a_whole(server, tmp_path, store):
    server.objects["/bucket/a.bin"] = BIG
    new = BIG[::-1]

    def expire(request, content):
        server.objects["/bucket/a.bin"] = new
        request.reply(412, b"")

    server.faults = [expire]
    (file,) = fetch(tmp_path, url_of(server, store, "/bucket/a.bin"))
    assert file.read_bytes() == new
    server.objects["/bucket/a.bin"] = BIG[:-1]
    (other,) = fetch(tmp_path, url_of(server, store, "/bucket/a.bin"))
    assert other.read_bytes() == BIG[:-1]


def test_file_that_never_rests_is_an_error(server, tmp_path):
    server.objects["/a.bin"] = b"0" * 100

    def expire(request, content):
        server.objects["/a.bin"] += b"1"
        request.reply(412, b"")

    server.faults = [expire] * 10
    with pytest.raises(_native.NativeError) as raised:
        fetch(tmp_path, server.url + "/a.bin")
    assert "changed 3 times" in raised.value.problem


def test_fault_that_stays_is_an_error_and_what_came_is_kept(server, tmp_path):
    server.objects["/a.bin"] = BIG
    url = server.url + "/a.bin"

    def second_range_fails(request, content):
        start, end = request.range(len(content))
        if start:
            return short(request, content)
        request.reply(206, content[start:end], {"Content-Range": f"bytes {start}-{end - 1}/{len(content)}"})

    server.faults = [second_range_fails] * 30
    with pytest.raises(_native.NativeError) as raised:
        fetch(tmp_path, url)
    assert raised.value.where == url
    assert "from byte 8388608 on, in 5 attempts" in raised.value.problem
    assert not [path for path in (tmp_path / "cache").iterdir() if path.suffix == ".bin"], "nothing half there is used"
    server.faults.clear()
    before = len(server.requests)
    (file,) = fetch(tmp_path, url)
    assert file.read_bytes() == BIG
    assert not [given for _, _, given in server.requests[before:] if given.startswith("bytes=0-")]


def test_damaged_cached_file_is_fetched_again(server, tmp_path):
    server.objects["/a.bin"] = b"content" * 100
    (file,) = fetch(tmp_path, server.url + "/a.bin")
    file.write_bytes(file.read_bytes()[:-1] + b"X")
    (again,) = fetch(tmp_path, server.url + "/a.bin")
    assert (again, again.read_bytes()) == (file, server.objects["/a.bin"])


def test_server_without_etags_is_told_apart_by_time_and_length(server, tmp_path):
    server.etags = False
    server.objects["/a.bin"] = BIG
    (file,) = fetch(tmp_path, server.url + "/a.bin")
    assert file.read_bytes() == BIG


def test_listing_is_the_first_thing_that_a_process_asks_of_a_store(server):
    server.objects["/bucket/d/1.jsonl"] = b"{}"
    command = "from rft import _native; print(_native.list_remote('s3://bucket/d/'))"
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", command],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert (done.stdout.strip(), done.stderr) == ("[('s3://bucket/d/1.jsonl', 2)]", "")


def test_file_that_is_being_read_keeps_its_room(server, tmp_path):
    for name in "abc":
        server.objects[f"/{name}"] = bytes(1000)
    a, b = (fetch(tmp_path, f"{server.url}/{name}", limit=2500)[0] for name in "ab")
    with a.open() as reading:
        fcntl.flock(reading, fcntl.LOCK_SH)
        fetch(tmp_path, server.url + "/c", limit=2500)
        assert (a.exists(), b.exists()) == (True, False), "a was used longest ago"
        with pytest.raises(_native.NativeError) as raised:
            fetch(tmp_path, server.url + "/b", limit=1500)
    assert "those that are being read: 1 with" in raised.value.problem
    assert "data.cache_gb" in raised.value.do
    fetch(tmp_path, server.url + "/b", limit=1500)
    assert not a.exists()


def test_stream_of_more_data_sets_than_the_cache_holds_files_is_told(server, tmp_path):
    import rft.data

    rows = write_rows(tmp_path / "rows.jsonl", some_chats(2000)).read_bytes()
    paths = [f"{server.url}/{number}.jsonl" for number in range(3)]
    server.objects |= {f"/{number}.jsonl": rows for number in range(3)}
    write_tiny_tokenizer(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text("{}")

    def read(room):
        data = {
            "train": [{"path": path} for path in paths],
            "store": str(tmp_path / f"sets-{room}"),
            "cache_gb": room * len(rows) / 1e9,
        }
        config = {"model": {"path": str(tmp_path / "model")}, "data": data}
        stream = rft.data.open(config, streaming=True, seq_len=64, arrays="numpy")
        try:
            return sum(batch.num_tokens for batch in stream.epoch(0))
        finally:
            stream.close()

    assert read(3.5) > 0
    with pytest.raises(DataError) as raised:
        read(2.5)
    assert "that are being read" in raised.value.problem
    assert "data.cache_gb" in raised.value.do


def test_cache_keeps_its_limit_and_gives_up_what_was_used_longest_ago(server, tmp_path):
    for name in "abc":
        server.objects[f"/{name}"] = name.encode() * 1000
    a, b = (fetch(tmp_path, f"{server.url}/{name}", limit=2500)[0] for name in "ab")
    fetch(tmp_path, server.url + "/a", limit=2500)  # used again: now b is the oldest
    (c,) = fetch(tmp_path, server.url + "/c", limit=2500)
    assert [a.exists(), b.exists(), c.exists()] == [True, False, True]
    with pytest.raises(_native.NativeError) as raised:
        fetch(tmp_path, *(f"{server.url}/{name}" for name in "abc"), limit=2500)
    assert "the cache may take" in raised.value.problem
    assert "data.cache_gb" in raised.value.do


def test_names_that_look_like_our_own_count_and_go_like_others(server, tmp_path):
    names = ["a.json", "b.lock", "c.part"]
    for name in names:
        server.objects[f"/{name}"] = name.encode() * 1000
    files = [fetch(tmp_path, f"{server.url}/{name}", limit=13_000)[0] for name in names]
    assert [file.exists() for file in files] == [False, True, True], "6,000 bytes each: two fit"
    for file, name in zip(files[1:], names[1:], strict=True):
        assert file.read_bytes() == server.objects[f"/{name}"]
        (again,) = fetch(tmp_path, f"{server.url}/{name}", limit=13_000)
        assert again == file


@pytest.mark.parametrize("store", STORES)
def test_file_that_is_not_there_is_told_by_its_url(server, tmp_path, store):
    url = url_of(server, store, "/bucket/none.jsonl")
    with pytest.raises(_native.NativeError) as raised:
        fetch(tmp_path, url)
    assert (raised.value.where, raised.value.problem) == (url, "there is no such file")


# ---- as paths of a config


def names(tmp_path, path):
    return [file.name for file in expand([SourceConfig(path=path)], "data.train", Caches(tmp_path / "sets"))]


@pytest.mark.parametrize("store", STORES[1:])
def test_globs_and_folders_of_stores_give_their_files(server, tmp_path, store):
    for key in ("d/2.jsonl", "d/1.jsonl", "d/deep/3.jsonl", "d/README.md", "d/.x/4.jsonl", "other.jsonl"):
        server.objects[f"/bucket/{key}"] = b'{"text": "x"}'
    bucket = f"{store}://bucket"
    assert names(tmp_path, f"{bucket}/d/*.jsonl") == [f"{bucket}/d/1.jsonl", f"{bucket}/d/2.jsonl"]
    assert names(tmp_path, f"{bucket}/d/") == [f"{bucket}/d/{key}" for key in ("1.jsonl", "2.jsonl", "deep/3.jsonl")]
    assert names(tmp_path, f"{bucket}/d/[!1].jsonl") == [f"{bucket}/d/2.jsonl"]
    assert len(names(tmp_path, f"{bucket}/**/*.jsonl")) == 5
    with pytest.raises(DataError, match="matches none of the 5 files"):
        names(tmp_path, f"{bucket}/d/*.csv")


def test_rows_from_afar_are_prepared_like_those_at_hand(server, tmp_path):
    files = tiny_files(tmp_path / "tokenizer")
    local = write_rows(tmp_path / "rows.jsonl", some_chats(20))
    server.objects["/bucket/rows.jsonl"] = local.read_bytes()
    server.objects["/bucket/bad.jsonl"] = b'{"text": 1}'

    def run(path):
        return prepare(DataConfig(train=[SourceConfig(path=path)], store=str(tmp_path / "sets")), files)

    wanted = run(str(local)).report["train"]["key"]
    for path in (url_of(server, store, "/bucket/rows.jsonl") for store in STORES):
        assert run(path).report["train"]["key"] == wanted, "the same data elsewhere is the same data"
    with pytest.raises(DataError) as raised:
        run("s3://bucket/bad.jsonl")
    assert raised.value.where.startswith("s3://bucket/bad.jsonl:1")


def test_scheme_that_is_not_known_is_refused_with_the_config(tmp_path):
    with pytest.raises(ConfigError, match="kind that is not read") as raised:
        load_config({"model": {"path": "org/model"}, "data": {"train": [{"path": "ftp://host/x.jsonl"}]}})
    assert "s3://" in raised.value.wanted


# ---- the hub


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """{repository: files}; a file's content is its name."""
    import huggingface_hub
    from huggingface_hub.errors import RepositoryNotFoundError

    repositories: dict[str, list[str]] = {}

    def dataset_info(self, repo_id, *, revision):
        if repo_id not in repositories:
            raise RepositoryNotFoundError(
                "404", response=type("R", (), {"headers": {}, "request": None, "status_code": 404})()
            )
        return SimpleNamespace(
            siblings=[SimpleNamespace(rfilename=name) for name in repositories[repo_id]], sha=revision
        )

    def download(repo_id, filename, *, repo_type, revision):
        path = tmp_path / "hub" / f"{revision}" / filename
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(filename)
        return str(path)

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return repositories


def hub_names(tmp_path, path):
    found = expand([SourceConfig(path=path)], "data.train", Caches(tmp_path / "sets"))
    return [file.path.relative_to(tmp_path / "hub").as_posix() for file in found]


def test_data_set_of_the_hub_gives_its_train_split_or_a_pattern(tmp_path, hub):
    hub["org/set"] = [
        "README.md",
        "dataset_infos.json",
        ".gitattributes",
        *(f"data/{s}-0000{n}.parquet" for s in ("train", "test") for n in (1, 0)),
    ]
    hub["org/plain"] = ["b.jsonl", "a.jsonl"]
    assert hub_names(tmp_path, "hf://datasets/org/set") == [
        "None/data/train-00000.parquet",
        "None/data/train-00001.parquet",
    ]
    assert hub_names(tmp_path, "hf://datasets/org/set@v1/data/test-*1.parquet") == ["v1/data/test-00001.parquet"]
    assert hub_names(tmp_path, "hf://datasets/org/plain") == ["None/a.jsonl", "None/b.jsonl"]


@pytest.mark.parametrize(
    ("files", "path", "problem"),
    [
        (["main/train-0.parquet", "socratic/train-0.parquet"], "org/set", "several parts: main, socratic"),
        (["test.jsonl", "validation.jsonl"], "org/set", "no train split"),
        (["train.jsonl"], "org/set/data/*", "matches none of the 1 file of"),
        (["train.jsonl"], "org/none", "has no data set 'org/none'"),
        (["train.jsonl"], "set", "names no data set"),
    ],
)
def test_what_the_hub_does_not_give_is_told(tmp_path, hub, files, path, problem):
    hub["org/set"] = files
    with pytest.raises(DataError, match=problem) as raised:
        hub_names(tmp_path, f"hf://datasets/{path}")
    assert raised.value.where == "data.train.0.path"


def test_mistyped_local_path_is_told_as_such_and_how_the_hub_is_meant(tmp_path):
    write_rows(tmp_path / "data/train.jsonl", [{"text": "x"}])
    with pytest.raises(ConfigError) as raised:
        load_config({"model": {"path": "org/model"}, "data": {"train": [{"path": str(tmp_path / "data/trian.jsonl")}]}})
    assert "train.jsonl" in raised.value.do
    with pytest.raises(ConfigError) as raised:
        load_config({"model": {"path": "org/model"}, "data": {"train": [{"path": "openai/gsm8k"}]}})
    assert "hf://datasets/openai/gsm8k" in raised.value.do


@pytest.fixture
def unreachable_hub(tmp_path, monkeypatch):
    """The hub client without a network, over a cache that holds two files of org/set."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import OfflineModeIsEnabled

    commit = "0123456789abcdef0123456789abcdef01234567"
    folder = tmp_path / "hub" / "datasets--org--set"
    for name in ("data/train-0.jsonl", "data/test-0.jsonl"):
        path = folder / "snapshots" / commit / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"text": "a"}\n')
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    def no_network(self, repo_id, *, revision):
        raise OfflineModeIsEnabled("Cannot reach https://huggingface.co: offline mode is enabled.")

    monkeypatch.setattr(HfApi, "dataset_info", no_network)
    return folder / "snapshots" / commit


def test_without_a_network_a_data_set_is_read_from_the_hub_s_cache_and_it_is_said(tmp_path, unreachable_hub, capsys):
    for path in ("hf://datasets/org/set", "hf://datasets/org/set@main/data/train*"):
        found = expand([SourceConfig(path=path)], "data.train", Caches(tmp_path / "sets"))
        assert [file.path for file in found] == [unreachable_hub / "data" / "train-0.jsonl"]
        told = capsys.readouterr().err
        assert "HF_HUB_OFFLINE is set; read from the local cache, which holds 1 file of commit 0123456" in told


def test_without_a_network_what_the_cache_does_not_hold_is_an_error(tmp_path, unreachable_hub):
    for path in ("hf://datasets/org/other", "hf://datasets/org/set@v2"):
        with pytest.raises(DataError, match="the hub cannot be reached"):
            expand([SourceConfig(path=path)], "data.train", Caches(tmp_path / "sets"))
