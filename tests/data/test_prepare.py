"""Prepared sets: what makes a new one (BO-18), every row accounted for, and processes, kills and full disks in between."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rft.config.data import DataConfig, SourceConfig
from rft.config.model import ModelConfig
from rft.data.folder import SetFolder
from rft.data.prepare import describe, evidence, prepare, remarks, report_with_plan
from rft.errors import ConfigError, DataError, RftError
from rft.models.tokenizer import load_tokenizer
from support.data import CHATML, CHATML_TAGGED, chat, prepare_rows, some_chats, tiny_files, write_rows

ROOT = Path(__file__).parents[2]


@pytest.fixture
def files(tmp_path):
    return tiny_files(tmp_path / "tokenizer")


def config(tmp_path, *names, **keys):
    sources = [SourceConfig(path=str(tmp_path / name)) for name in names or ["a.jsonl"]]
    return DataConfig(train=sources, store=str(tmp_path / "sets"), **keys)


def part(prepared, name="train"):
    return prepared.report[name]


# ---- BO-18: what is a new set


@pytest.fixture
def two_sets(tmp_path, files):
    write_rows(tmp_path / "a.jsonl", [chat("one", "1"), chat("two", "2")])
    write_rows(tmp_path / "b.jsonl", [chat("one", "1"), chat("two", "2"), chat("three", "3")])
    return part(prepare(config(tmp_path), files))


def test_the_same_config_again_is_a_hit(tmp_path, files, two_sets):
    assert not two_sets["reused"]
    again = part(prepare(config(tmp_path), files))
    assert again["reused"]
    assert again["key"] == two_sets["key"]
    assert {**again, "reused": 0, "seconds": 0} == {**two_sets, "reused": 0, "seconds": 0}


def test_other_unicode_tables_are_another_set(tmp_path, files, two_sets):
    newer = load_tokenizer(ModelConfig(path=str(tmp_path / "tokenizer"), unicode=17))
    made = part(prepare(config(tmp_path), newer))
    assert not made["reused"]
    assert made["key"] != two_sets["key"]
    manifest = json.loads((SetFolder(str(tmp_path / "sets")).root / made["key"] / "manifest.json").read_text())
    assert manifest["inputs"]["unicode"] == "17.0.0"


def test_another_file_is_another_set_with_its_rows(tmp_path, files, two_sets):
    other = part(prepare(config(tmp_path, "b.jsonl"), files))
    assert (other["reused"], other["kept"]) == (False, 3)


@pytest.mark.parametrize(
    "keys", [{"train_on": "all"}, {"train_on": ["user"]}, {"control_tokens": "allow"}, {"template": "chatml"}], ids=str
)
def test_an_option_that_changes_the_set_makes_a_new_one(tmp_path, files, two_sets, keys):
    other = part(prepare(config(tmp_path, **keys), files))
    assert not other["reused"]
    assert other["key"] != two_sets["key"]


@pytest.mark.parametrize("keys", [{"seq_len": 7}, {"packing": "bfd"}, {"overlong": "drop"}], ids=str)
def test_how_documents_are_packed_makes_no_new_set(tmp_path, files, two_sets, keys):
    assert part(prepare(config(tmp_path, **keys), files))["key"] == two_sets["key"]


def test_template_and_tokenizer_are_part_of_the_key(tmp_path, two_sets):
    for number, options in enumerate(
        ({"template": CHATML_TAGGED}, {"template": "{# a note #}" + CHATML}, {"vocab_size": 399}, {"bos": True})
    ):
        other = part(prepare(config(tmp_path), tiny_files(tmp_path / f"other{number}", **options)))
        assert not other["reused"], options


def test_one_byte_changed_with_size_and_time_kept_is_noticed(tmp_path, files):
    path = write_rows(tmp_path / "a.jsonl", [chat("one", "1"), chat("two", "2")])
    past = time.time_ns() - 10_000_000_000
    os.utime(path, ns=(past, past))
    first = part(prepare(config(tmp_path), files))
    prepare(config(tmp_path), files)  # so that the shortcut by file identity has been taken
    content = path.read_bytes()
    path.write_bytes(content.replace(b"two", b"tw0"))
    os.utime(path, ns=(past, past))
    assert path.stat().st_size == len(content)
    second = part(prepare(config(tmp_path), files))
    assert (second["reused"], second["key"] != first["key"]) == (False, True)


def source(path, **keys):
    return {"path": str(path), "name": None, "format": "auto", "fields": {}, "roles": {}, "set": 0, **keys}


def test_content_is_not_read_again_where_nothing_about_the_file_changed(tmp_path, monkeypatch):
    folder = SetFolder(tmp_path / "sets")
    path = write_rows(tmp_path / "a.jsonl", [chat("one", "1")])
    monkeypatch.setattr("rft.data.folder._RACY_NS", 0)
    calls = []

    def compute(given):
        calls.append(given)
        return "hash"

    for _ in range(3):
        assert folder.known_hashes([source(path), source(path, set=1)], compute) == ["hash", "hash"]
    assert len(calls) == 1
    folder.known_hashes([source(path, format="text")], compute)
    os.utime(path)
    folder.known_hashes([source(path)], compute)
    assert len(calls) == 3


def test_file_written_just_now_is_not_trusted_by_its_time(tmp_path):
    folder = SetFolder(tmp_path / "sets")
    path = write_rows(tmp_path / "a.jsonl", [chat("one", "1")])
    hashes = iter("ab")
    assert [folder.known_hashes([source(path)], lambda _: next(hashes)) for _ in range(2)] == [["a"], ["b"]]


@pytest.fixture
def settled(tmp_path, files, monkeypatch):
    """Two files, prepared one by one, with notes of their hashes."""
    monkeypatch.setattr("rft.data.folder._RACY_NS", 0)
    write_rows(tmp_path / "a.jsonl", some_chats(30))
    write_rows(tmp_path / "b.jsonl", some_chats(20, seed=1))
    made = {name: part(prepare(config(tmp_path, name), files)) for name in ("a.jsonl", "b.jsonl")}
    notes = sorted((tmp_path / "sets" / "known").glob("file-*"))
    assert len(notes) == 2
    return made, notes


@pytest.mark.parametrize("harm", ["swap", "zeros", "empty", "one digit", "binary", "a folder"])
def test_notes_of_hashes_that_were_changed_by_hand_are_not_believed(tmp_path, files, settled, harm):
    made, (one, other) = settled
    first, second = one.read_bytes(), other.read_bytes()
    answer = json.loads(first)["answer"]
    harmed = {
        "swap": second,
        "zeros": b"0" * 32,
        "empty": b"",
        "one digit": first.replace(answer.encode(), bytes([answer.encode()[0] ^ 1]) + answer.encode()[1:]),
        "binary": bytes(range(128, 256)),
    }
    if harm == "a folder":
        one.unlink()
        one.mkdir()
        one.rmdir()
    else:
        one.write_bytes(harmed[harm])
    if harm == "swap":
        other.write_bytes(first)
    for name, before in made.items():
        again = part(prepare(config(tmp_path, name), files))
        assert (again["key"], again["kept"], again["reused"]) == (before["key"], before["kept"], True)
    assert sorted([one.read_bytes(), other.read_bytes()]) == sorted([first, second]), "they are mended"


def test_sets_that_changed_places_by_hand_are_not_taken_for_each_other(tmp_path, files):
    """Held-out rows would be trained on."""
    write_rows(tmp_path / "a.jsonl", some_chats(80))
    data = config(tmp_path, eval_fraction=0.3)
    first = prepare(data, files)
    train, held = Path(part(first)["store"]), Path(part(first, "eval")["store"])
    train.rename(tmp_path / "aside")
    held.rename(train)
    (tmp_path / "aside").rename(held)
    again = prepare(data, files)
    assert (part(again)["reused"], part(again, "eval")["reused"]) == (False, False)
    assert documents(again.train) == documents(first.train)
    assert documents(again.eval) == documents(first.eval)


def test_sets_of_an_older_format_are_told_and_made_anew(tmp_path, files, two_sets, capsys):
    older = tmp_path / "sets" / ("0" * 32)
    older.mkdir()
    (older / "manifest.json").write_text('{"format": "rft-store", "format_version": 1}')
    prepare(config(tmp_path, "b.jsonl"), files)
    told = " ".join(capsys.readouterr().out.split())
    assert "1 prepared set of another format version" in told
    assert "prune" in told
    prepare(config(tmp_path, "b.jsonl"), files)
    assert capsys.readouterr().out == ""


def test_order_of_files_and_rows_is_part_of_the_key(tmp_path, files, two_sets):
    forth = part(prepare(config(tmp_path, "a.jsonl", "b.jsonl"), files))
    back = part(prepare(config(tmp_path, "b.jsonl", "a.jsonl"), files))
    assert forth["key"] != back["key"]


def test_where_the_files_lie_is_no_part_of_the_key(tmp_path, files, two_sets):
    (tmp_path / "moved.jsonl").write_bytes((tmp_path / "a.jsonl").read_bytes())
    assert part(prepare(config(tmp_path, "moved.jsonl"), files))["key"] == two_sets["key"]


# ---- every row


def test_kept_and_dropped_rows_add_up_with_reasons_and_places(tmp_path, files):
    rows = [chat("a", "b"), {"messages": []}, {"messages": "text"}, chat("only the user"), chat("c", "d")]
    path = write_rows(tmp_path / "a.jsonl", rows)
    with path.open("a") as stream:
        stream.write('{"messages": [\n')
    report = part(prepare(config(tmp_path, on_error="skip"), files))
    assert report["read"] == 6
    assert report["kept"] == 2
    assert report["read"] == report["kept"] + sum(report["dropped"].values())
    places = json.dumps(report["dropped_examples"])
    assert all(f"a.jsonl:{line}" in places for line in (3, 6))


def test_bad_row_stops_with_file_line_and_what_to_do(tmp_path, files):
    write_rows(tmp_path / "a.jsonl", [chat("a", "b"), {"messages": [{"role": "asistant", "content": "x"}]}])
    with pytest.raises(DataError, match="asistant") as raised:
        prepare(config(tmp_path), files)
    assert "a.jsonl:2" in raised.value.where
    assert "assistant" in raised.value.wanted
    assert not list((tmp_path / "sets").glob("*.part"))


def test_base_model_without_a_template_names_the_built_in_ones(tmp_path):
    bare = tiny_files(tmp_path / "bare", template=None)
    write_rows(tmp_path / "a.jsonl", [chat("a", "b")])
    with pytest.raises(DataError) as raised:
        prepare(config(tmp_path), bare)
    text = str(raised.value)
    assert all(name in text for name in ("chatml", "llama3", "gemma", "plain", "data.template"))
    assert part(prepare(config(tmp_path, template="plain"), bare))["kept"] == 1


def test_base_model_without_a_template_takes_text(tmp_path):
    bare = tiny_files(tmp_path / "bare", template=None)
    write_rows(tmp_path / "a.jsonl", [{"text": "some text"}])
    assert part(prepare(config(tmp_path), bare))["kept"] == 1


def test_question_and_answer_are_not_guessed_but_mapped_by_the_lines_of_the_error(tmp_path, files):
    write_rows(tmp_path / "a.jsonl", [{"question": "2+2", "answer": "4"}])
    with pytest.raises(DataError) as raised:
        prepare(config(tmp_path), files)
    assert "[data.train.fields]" in str(raised.value)
    source = SourceConfig(path=str(tmp_path / "a.jsonl"), fields={"prompt": "question", "completion": "answer"})
    data = DataConfig(train=[source], store=str(tmp_path / "sets"))
    assert part(prepare(data, files))["sources"][0]["format"] == "prompt_completion"


# ---- held-out rows


def test_held_out_rows_are_the_rest_and_stay_held_out_when_rows_are_added(tmp_path, files):
    rows = some_chats(200)
    write_rows(tmp_path / "a.jsonl", rows)
    first = prepare(config(tmp_path, eval_fraction=0.2), files)
    held = documents(first.eval)
    assert 20 < len(held) < 60
    assert sorted(held + documents(first.train)) == sorted(documents(prepare(config(tmp_path), files).train))
    assert part(first)["kept"] + part(first, "eval")["kept"] == 200
    write_rows(tmp_path / "a.jsonl", [chat("new", "row"), *rows])
    more = documents(prepare(config(tmp_path, eval_fraction=0.2), files).eval)
    assert set(held) <= set(more)
    assert len(more) - len(held) in (0, 1)


def documents(store):
    return [tuple(store.document(index)[0].tolist()) for index in range(store.num_documents)]


def test_eval_sources_are_a_set_of_their_own(tmp_path, files):
    write_rows(tmp_path / "a.jsonl", [chat("one", "1")])
    write_rows(tmp_path / "e.jsonl", [chat("two", "2"), chat("three", "3")])
    made = prepare(config(tmp_path, eval=[SourceConfig(path=str(tmp_path / "e.jsonl"))]), files)
    assert (made.train.num_documents, made.eval.num_documents) == (1, 2)


def test_eval_fraction_and_eval_sources_together_are_refused(tmp_path, files):
    source = SourceConfig(path=str(write_rows(tmp_path / "a.jsonl", [chat("one", "1")])))
    with pytest.raises(ConfigError):
        prepare(config(tmp_path, eval=[source], eval_fraction=0.1), files)


# ---- rows from Python


def test_rows_from_python_give_the_set_of_the_same_file(tmp_path, files):
    rows = some_chats(5)
    write_rows(tmp_path / "a.jsonl", rows)
    by_file = prepare(config(tmp_path), files)
    by_rows = prepare(config(tmp_path, "nowhere"), files, rows=iter(rows))
    assert documents(by_rows.train) == documents(by_file.train)
    assert not list((tmp_path / "sets").glob("rows.tmp-*"))


def test_bad_row_from_python_is_named_by_its_number(tmp_path, files):
    with pytest.raises(DataError) as raised:
        prepare(config(tmp_path, "nowhere"), files, rows=[chat("a", "b"), {"messages": 3}])
    assert raised.value.where.startswith("rows:2")


def test_no_rows_from_python_is_an_error(tmp_path, files):
    with pytest.raises(DataError, match="none"):
        prepare(config(tmp_path, "nowhere"), files, rows=[])


# ---- the words


def test_sentences_hold_the_numbers_of_the_report(tmp_path, files):
    from rft.data.loader import Loader

    made = prepare_rows(tmp_path, [*some_chats(9), {"messages": [{"role": "user", "content": "x"}]}], files)
    loader = Loader(made.train, seq_len=128, packing="stream", overlong="split", seed=0, pad_id=3)
    report = report_with_plan(made.report, loader)
    (sentence,) = describe(report)
    assert "10 rows (messages, template: the tokenizer's own)" in sentence
    assert "9 kept, 1 dropped (no trained token 1)" in sentence
    assert f"{report['train']['plan']['packs']} packs of 128" in sentence
    json.dumps(report)


def test_held_out_rows_are_not_called_dropped(tmp_path, files):
    made = prepare_rows(tmp_path, some_chats(60), files, eval_fraction=0.3)
    report = made.report
    train, held = describe(report)
    assert f"{report['train']['kept']} kept, 0 dropped, {report['eval']['kept']} held out" in train
    assert f"held out: {report['eval']['kept']} of these rows, 0 dropped" in held
    (text,) = evidence(report)  # said once for both sets
    assert text.startswith("rows.jsonl: ")


def test_remarks_tell_of_control_tokens_in_text(tmp_path, files):
    assert remarks(prepare_rows(tmp_path / "a", some_chats(3), files).report) == []
    (text,) = remarks(prepare_rows(tmp_path / "b", [chat("say <|im_end|>", "no"), chat("a", "b")], files).report)
    assert text.startswith("control tokens spelled in 1 row:")


# ---- processes


PREPARE = """
import sys, time
sys.path.insert(0, {tests!r})
from pathlib import Path
from support.data import tiny_files
from rft.config.data import DataConfig, SourceConfig
from rft.data.prepare import prepare
folder = Path({folder!r})
files = tiny_files(folder / "tokenizer")
data = DataConfig(train=[SourceConfig(path=str(folder / "a.jsonl"))], store=str(folder / "sets"))
import rft.data.prepare
rft.data.prepare.SHARD_BYTES = {shard_bytes}
print("ready", flush=True)
sys.stdin.readline()
made = prepare(data, files, lead={lead})
print(made.report["train"]["reused"], made.train.num_documents, made.train.key, flush=True)
"""


def start(tmp_path, lead=True):
    code = PREPARE.format(tests=str(ROOT / "tests"), folder=str(tmp_path), lead=lead, shard_bytes=20_000)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout.readline() == "ready\n"
    return process


def go(process):
    process.stdin.write("\n")
    process.stdin.flush()


def test_two_processes_at_once_write_one_set(tmp_path, files):
    write_rows(tmp_path / "a.jsonl", some_chats(3000))
    processes = [start(tmp_path), start(tmp_path), start(tmp_path, lead=False)]
    for process in processes:
        go(process)
    answers = [process.communicate(timeout=60)[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert sorted(answer[0] for answer in answers) == ["False", "True", "True"]
    assert answers[2][0] == "True"  # the one that was told to wait
    assert len({tuple(answer[1:]) for answer in answers}) == 1
    assert len([path for path in (tmp_path / "sets").iterdir() if path.name != "known"]) == 1


def content(store):
    return {path.name: path.read_bytes() for path in Path(store).iterdir()}


def kill_at(tmp_path, shards, seconds):
    """Prepare in another process, killed this long after so many shards were there; whether it was still at it."""
    process = start(tmp_path)
    go(process)
    while process.poll() is None and len(list((tmp_path / "sets").glob("*.part/*.rft"))) < shards:
        time.sleep(0.0002)
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
    process.communicate(timeout=20)
    return process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    "instants", [3, pytest.param(50, marks=pytest.mark.slow)], ids=["three instants", "fifty instants"]
)
def test_killed_while_preparing_the_next_run_ends_with_the_same_bytes(tmp_path, files, monkeypatch, instants):
    """kill -9 at random instants; after each the set is completed and compared with one that was made in one go."""
    import random
    import shutil

    monkeypatch.setattr("rft.data.prepare.SHARD_BYTES", 20_000)
    write_rows(tmp_path / "a.jsonl", some_chats(4000))
    data = config(tmp_path)
    began = time.perf_counter()
    store = part(prepare(data, files))["store"]
    seconds = time.perf_counter() - began
    whole = content(store)
    assert len(whole) > 10
    pick = random.Random(instants)
    killed = resumed = 0  # instants are counted in shards: how long a process takes to begin says nothing
    for _ in range(instants):
        shutil.rmtree(store)
        shards = pick.randrange(len(whole) // 2)
        killed += kill_at(tmp_path, shards, pick.uniform(0, 1.5) * seconds / len(whole))
        resumed += bool(list((tmp_path / "sets").glob("*.part/*.json")))
        assert part(prepare(data, files))["kept"] == 4000
        assert content(store) == whole
        assert [path.name for path in (tmp_path / "sets").iterdir() if path.name != "known"] == [Path(store).name]
    assert killed >= instants / 3
    assert resumed >= instants / 5, "some had complete shards to go on from"


def test_damaged_set_is_written_again(tmp_path, files, two_sets):
    for path in Path(two_sets["store"]).rglob("*"):
        if path.is_file() and path.stat().st_size > 200:
            content = bytearray(path.read_bytes())
            content = content[: len(content) // 2]
            path.write_bytes(content)
    again = part(prepare(config(tmp_path), files))
    assert (again["reused"], again["kept"]) == (False, 2)
    assert part(prepare(config(tmp_path), files))["reused"]


# ---- full disk


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KiB."""
    place = tmp_path / "small"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)], capture_output=True)
    if done.returncode:
        pytest.skip("mounting a small tmpfs is not allowed here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_full_disk_is_told_with_the_place_and_leaves_nothing_behind(tmp_path, files, small_disk):
    write_rows(tmp_path / "a.jsonl", some_chats(6000))
    data = config(tmp_path).model_copy(update={"store": str(small_disk / "sets")})
    with pytest.raises(RftError, match="no space left") as raised:
        prepare(data, files)
    assert str(small_disk) in str(raised.value)
    assert "data.store" in raised.value.do
    assert raised.value.exit_code == 1
    assert not list((small_disk / "sets").glob("*.part"))
    assert not list((small_disk / "sets").glob("*.part"))
    write_rows(tmp_path / "a.jsonl", some_chats(50))
    assert prepare(data, files).train.num_documents == 50


def test_full_disk_leaves_the_shards_that_are_complete_and_the_next_run_goes_on(
    tmp_path, files, small_disk, monkeypatch, capsys
):
    monkeypatch.setattr("rft.data.prepare.SHARD_BYTES", 20_000)
    write_rows(tmp_path / "a.jsonl", some_chats(3000))
    data = config(tmp_path).model_copy(update={"store": str(small_disk / "sets")})
    with pytest.raises(RftError, match="no space left") as raised:
        prepare(data, files)
    assert "complete shards are kept" in raised.value.problem
    (unfinished,) = (small_disk / "sets").glob("*.part")
    assert not list(unfinished.glob("*.tmp"))
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    made = prepare(data, files)
    assert made.train.num_documents == 3000
    assert "went on behind" in " ".join(capsys.readouterr().out.split())
    elsewhere = prepare(config(tmp_path), files)
    assert content(part(made)["store"]) == content(part(elsewhere)["store"])


def test_file_size_limit_is_told_like_a_full_disk(tmp_path, files):
    write_rows(tmp_path / "a.jsonl", some_chats(3000))
    code = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000));" + PREPARE.format(
        tests=str(ROOT / "tests"), folder=str(tmp_path), lead=True, shard_bytes=None
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], input="\n", capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.returncode == 1
    assert "RftError" in done.stderr
    assert "data.store" in done.stderr
    assert not list((tmp_path / "sets").glob("*.part"))


@pytest.mark.parametrize("name", ["file", "file/sets"])
def test_store_that_is_a_file_is_a_wrong_config(tmp_path, files, name):
    (tmp_path / "file").write_text("")
    write_rows(tmp_path / "a.jsonl", some_chats(3))
    data = config(tmp_path).model_copy(update={"store": str(tmp_path / name)})
    with pytest.raises(ConfigError, match="is a file") as raised:
        prepare(data, files)
    assert (raised.value.where, raised.value.exit_code) == ("data.store", 2)


# ---- several sources


def sources(tmp_path, *keys, **data):
    """A config with a data set of 200 chats for each dict of keys."""
    configs = []
    for number, own in enumerate(keys):
        path = write_rows(tmp_path / f"{number}.jsonl", some_chats(200, seed=number))
        configs.append(SourceConfig(path=str(path), **own))
    return DataConfig(train=configs, store=str(tmp_path / "sets"), **data)


def test_weights_and_max_rows_say_how_often_each_data_set_is_used(tmp_path, files):
    data = sources(tmp_path, {"weight": 0.25}, {"weight": 2.0}, {"max_rows": 30}, {})
    report = part(prepare(data, files))
    kept = [source["kept"] for source in report["sources"]]
    assert 30 < kept[0] < 75
    assert kept[1:] == [200, 30, 200]
    assert report["dropped"] == {"not sampled": 200 - kept[0], "over max_rows": 170}
    assert (report["repeats"], report["documents"]) == (200, sum(kept) + 200)
    (sentence,) = describe({"train": {**report, "plan": None}, "eval": None, "template": None})
    assert f"(not sampled {200 - kept[0]}, over max_rows 170)" in sentence
    assert "200 repeats by weight" in sentence


def test_the_seed_chooses_the_rows_and_nothing_where_none_are_chosen(tmp_path, files):
    chosen = [part(prepare(sources(tmp_path, {"weight": 0.5}), files, seed=seed)) for seed in (0, 1, 0)]
    assert chosen[0]["key"] == chosen[2]["key"] != chosen[1]["key"]
    whole = [part(prepare(sources(tmp_path, {"weight": 2}), files, seed=seed)) for seed in (0, 1)]
    assert whole[0]["key"] == whole[1]["key"]


def test_held_out_rows_are_not_repeated_by_a_weight(tmp_path, files):
    made = prepare(sources(tmp_path, {"weight": 3.0}, eval_fraction=0.2), files)
    assert made.train.num_documents == 3 * part(made)["kept"]
    assert made.eval.num_documents == part(made, "eval")["kept"]
    assert part(made)["kept"] + part(made, "eval")["kept"] == 200


def test_exact_duplicates_go_on_request_and_are_counted(tmp_path, files):
    rows = some_chats(40)
    write_rows(tmp_path / "a.jsonl", [*rows, *rows[:15], {**rows[0], "id": 7}])
    plain = part(prepare(config(tmp_path), files))
    assert (plain["kept"], plain["dropped"]) == (56, {})
    clean = prepare(config(tmp_path, dedup=True), files)
    assert (part(clean)["kept"], part(clean)["dropped"]) == (40, {"duplicate": 16})
    assert len(set(documents(clean.train))) == 40
