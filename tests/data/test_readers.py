"""Every input format gives the same tokens for the same rows; what columns do to rows; BO-15 to BO-19 and BO-43 through each."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import rft.data
from rft.config.data import DataConfig, SourceConfig
from rft.data.prepare import FORMAT_VERSION, prepare, remarks
from rft.errors import DataError
from support.data import CHATML, chat, some_chats, tiny_files, write_rows

TOOLS = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}{{ m.keys() | list | length }}"
    "{% if m.tool_calls is defined %}{{ m.tool_calls | tojson }}{% endif %}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)
"""Shows what a message has and has not."""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return tiny_files(tmp_path_factory.mktemp("tokenizer"))


def run(folder: Path, path: Path | str, files, **keys):
    source = {key: keys.pop(key) for key in ("format", "fields") if key in keys}
    config = DataConfig(train=[SourceConfig(path=str(path), **source)], store=str(folder / "sets"), **keys)
    return prepare(config, files)


def documents(prepared):
    store = prepared.train
    found = [store.document(index) for index in range(store.num_documents)]
    return [(ids.tolist(), trained.tolist(), None if w is None else w.tolist()) for ids, trained, w in found]


def table_of(rows):
    return pa.table({name: [row.get(name) for row in rows] for row in rows for name in row})


def write_parquet(path, rows, **options):
    pq.write_table(table_of(rows), path, **options)


def write_stream(path, rows):
    table = table_of(rows)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


def write_file(path, rows, compression=None):
    table = table_of(rows)
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=7)


def write_gzip(path, rows):
    half = len(rows) // 2
    parts = ["".join(json.dumps(row) + "\n" for row in part).encode() for part in (rows[:half], rows[half:])]
    path.write_bytes(b"".join(gzip.compress(part) for part in parts))


def write_zip(path, rows):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data/rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        archive.writestr("README.md", "about")


def write_tar(path, rows):
    content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    with tarfile.open(path, "w:gz") as archive:
        info = tarfile.TarInfo("./data/rows.jsonl")
        info.size = len(content)
        archive.addfile(info, io.BytesIO(content))


def write_csv(path, rows, **dialect):
    names = list(dict.fromkeys(name for row in rows for name in row))
    out = io.StringIO()
    writer = csv.writer(out, **dialect)
    writer.writerow(names)
    for row in rows:
        cells = [row.get(name, "") for name in names]
        writer.writerow([cell if isinstance(cell, str) else json.dumps(cell, ensure_ascii=False) for cell in cells])
    content = out.getvalue().encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_json(path, rows):
    path.write_text(json.dumps(rows, indent=1), "utf-8")


WRITERS = {
    "rows.json": write_json,
    "rows.jsonl.gz": write_gzip,
    "rows.csv": write_csv,
    "rows.tsv.gz": lambda path, rows: write_csv(path, rows, delimiter="\t", lineterminator="\n"),
    "rows.parquet": write_parquet,
    "zstd.parquet": lambda path, rows: write_parquet(path, rows, compression="zstd", row_group_size=5),
    "gzip.parquet": lambda path, rows: write_parquet(path, rows, compression="gzip", use_dictionary=False),
    "lz4.parquet": lambda path, rows: write_parquet(path, rows, compression="lz4", data_page_version="2.0"),
    "stream.arrow": write_stream,
    "file.arrow": write_file,
    "lz4.feather": lambda path, rows: write_file(path, rows, "lz4"),
    "zstd.arrow": lambda path, rows: write_file(path, rows, "zstd"),
    "rows.zip": write_zip,
    "rows.tar.gz": write_tar,
}

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 9007199254740993, "b": [1.5, -2.0]}}}
CHATS = [
    chat("plain", "answer"),
    {
        "messages": [
            {"role": "user", "content": "two\u2028lines\r\n\x7f", "loss_weight": 0.5},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": '{"a": "\\ud83d"}', "name": "add"},
            {"role": "assistant", "content": "日本 😀"},
        ],
        "tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}],
    },
    {"messages": [{"role": "user", "content": "x" * 5000}, {"role": "assistant", "content": "y"}], "loss_weight": 0.25},
    *some_chats(20),
]


@pytest.mark.parametrize("name", WRITERS)
def test_the_same_chats_give_the_same_tokens_masks_and_weights_through_every_format(tmp_path, files, name):
    template = tmp_path / "t.jinja"
    template.write_text(TOOLS)
    path = write_rows(tmp_path / "wanted" / "rows.jsonl", CHATS)
    wanted = documents(run(tmp_path / "wanted", path, files, template=str(template)))
    WRITERS[name](tmp_path / name, CHATS)
    found = run(tmp_path, tmp_path / name, files, template=str(template))
    assert documents(found) == wanted
    place, line = found.train.origin(1)
    assert place.startswith(str(tmp_path / name))
    assert line >= 2


def test_packing_and_batches_are_those_of_json_lines_through_every_format(tmp_path, files):
    """BO-19: the position in the data is a place in a plan, and the plan is the same whatever the rows came from."""

    def batches(path, start):
        store = run(tmp_path, path, files).train
        loader = rft.data.open(store.path, seq_len=64, micro_batch=1, arrays="numpy")
        return [batch.input_ids.tolist() for batch in loader.epoch(0, start)][: 20 - start]

    rows = some_chats(40)
    path = write_rows(tmp_path / "rows.jsonl", rows)
    whole = batches(path, 0)
    for name in ("rows.parquet", "stream.arrow", "rows.zip"):
        WRITERS[name](tmp_path / name, rows)
        assert batches(tmp_path / name, 0) == whole, name
        assert batches(tmp_path / name, 5) == whole[5:], name


# ---- columns


def test_every_type_of_text_and_list_is_read(tmp_path, files):
    turns = [[{"role": "user", "content": "q"}, {"role": "assistant", "content": f"answer {n}"}] for n in range(9)]
    wanted = documents(run(tmp_path, write_rows(tmp_path / "a.jsonl", [{"messages": t} for t in turns]), files))

    def chats(text, of):
        return of(pa.struct([("role", pa.dictionary(pa.int8(), pa.string())), ("content", text)]))

    kinds = [
        chats(text, of)
        for text in (pa.string(), pa.large_string(), pa.string_view())
        for of in (pa.list_, pa.large_list, lambda value: pa.list_(value, 2))
    ]
    for number, kind in enumerate(kinds):
        plain = pa.array(turns, pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])))
        role, content = (pa.array([turn[key] for chat in turns for turn in chat]) for key in ("role", "content"))
        values = pa.StructArray.from_arrays(
            [
                role.dictionary_encode().cast(kind.value_type.field("role").type),
                content.cast(kind.value_type.field("content").type),
            ],
            fields=[kind.value_type.field("role"), kind.value_type.field("content")],
        )
        if pa.types.is_fixed_size_list(kind):
            column = pa.FixedSizeListArray.from_arrays(values, 2)
        else:
            build = pa.LargeListArray if pa.types.is_large_list(kind) else pa.ListArray
            column = build.from_arrays(
                plain.offsets.cast(pa.int64() if pa.types.is_large_list(kind) else pa.int32()), values
            )
        table = pa.table({"messages": column})
        with (
            pa.OSFile(str(tmp_path / f"{number}.arrow"), "wb") as sink,
            pa.ipc.new_stream(sink, table.schema) as writer,
        ):
            writer.write_table(table)
        assert documents(run(tmp_path, tmp_path / f"{number}.arrow", files)) == wanted, kind
        if "view" not in str(kind):
            pq.write_table(table, tmp_path / f"{number}.parquet")
            assert documents(run(tmp_path, tmp_path / f"{number}.parquet", files)) == wanted, kind


def test_numbers_and_times_keep_all_their_digits(tmp_path, files):
    """What reaches the template, through a tool's schema of every type."""
    import datetime
    import decimal

    value = {
        "i": pa.array([-(2**63)], pa.int64()),
        "u": pa.array([2**64 - 1], pa.uint64()),
        "f": pa.array([0.1], pa.float32()),
        "d": pa.array([1e300], pa.float64()),
        "h": pa.array([1.5], pa.float16()),
        "m": pa.array([decimal.Decimal("-12.50")], pa.decimal128(10, 2)),
        "t": pa.array([datetime.datetime(2024, 2, 29, 23, 59, 1, 5)], pa.timestamp("us")),
        "z": pa.array([datetime.datetime(2024, 2, 29, 12, tzinfo=datetime.UTC)], pa.timestamp("ns", tz="Europe/Paris")),
        "day": pa.array([datetime.date(1969, 12, 31)], pa.date32()),
        "time": pa.array([datetime.time(1, 2, 3)], pa.time64("us")),
        "b": pa.array([True]),
        "e": pa.array([[]], pa.list_(pa.int8())),
        "n": pa.array([[None, 1]], pa.list_(pa.int8())),
        "gone": pa.array([None], pa.string()),
    }
    struct = pa.StructArray.from_arrays(list(value.values()), list(value))
    chats = pa.array([chat("q", "a")["messages"]])
    table = pa.table({"messages": chats, "tools": pa.ListArray.from_arrays([0, 1], struct)})
    wanted = (
        '{"i": -9223372036854775808, "u": 18446744073709551615, "f": 0.10000000149011612, "d": 1e+300, "h": 1.5, "m": -12.5, '
        '"t": "2024-02-29T23:59:01.000005", "z": "2024-02-29T12:00:00Z", "day": "1969-12-31", "time": "01:02:03", '
        '"b": true, "e": [], "n": [null, 1]}'
    )
    template = tmp_path / "t.jinja"
    template.write_text("{% for t in tools %}{{ t | tojson }}{% endfor %}" + CHATML)
    pq.write_table(table, tmp_path / "a.parquet", version="2.6")
    found = run(tmp_path, tmp_path / "a.parquet", files, template=str(template))
    from tokenizers import Tokenizer

    text = Tokenizer.from_str(files.json).decode(documents(found)[0][0], skip_special_tokens=False)
    assert text.startswith(wanted), text


def test_cache_files_and_saved_sets_of_datasets_are_read(tmp_path, files):
    import datasets

    rows = some_chats(30)
    wanted = documents(run(tmp_path, write_rows(tmp_path / "rows.jsonl", rows), files))
    saved = datasets.Dataset.from_list(rows)
    saved.save_to_disk(tmp_path / "saved")
    assert (tmp_path / "saved" / "dataset_info.json").exists()
    assert documents(run(tmp_path, tmp_path / "saved", files)) == wanted
    cached = datasets.load_dataset("json", data_files=str(tmp_path / "rows.jsonl"), cache_dir=str(tmp_path / "hf"))[
        "train"
    ]
    cached.map(lambda row: {"n": 1})  # its result lies beside the set, as cache-*.arrow
    folder = Path(cached.cache_files[0]["filename"]).parent
    assert list(folder.glob("cache-*.arrow"))
    assert documents(run(tmp_path, folder, files)) == wanted
    datasets.DatasetDict(train=saved, test=saved).save_to_disk(tmp_path / "both")
    with pytest.raises(DataError, match="several splits: test, train"):
        run(tmp_path, tmp_path / "both", files)
    assert documents(run(tmp_path, tmp_path / "both" / "train", files)) == wanted


def test_binary_columns_fail_only_where_they_are_needed(tmp_path, files):
    pq.write_table(pa.table({"text": ["a"], "image": pa.array([b"\xff"])}), tmp_path / "a.parquet")
    assert run(tmp_path, tmp_path / "a.parquet", files).train.num_documents == 1
    pq.write_table(pa.table({"text": pa.array([b"a"])}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match="a value of type binary") as raised:
        run(tmp_path, tmp_path / "b.parquet", files, format="text")
    assert raised.value.where.endswith('b.parquet:1, field "text"')


def test_files_of_one_folder_may_have_other_schemas(tmp_path, files):
    folder = tmp_path / "parts"
    folder.mkdir()
    write_parquet(folder / "0.parquet", [{"text": "a", "meta": None}, {"text": "b", "meta": None}])
    write_parquet(folder / "1.parquet", [{"meta": {"deep": [1]}, "more": 1.5, "text": "c"}])
    pq.write_table(pa.table({"more": ["x"], "text": pa.array(["d"]).dictionary_encode()}), folder / "2.parquet")
    prepared = run(tmp_path, folder, files)
    assert (prepared.report["train"]["kept"], prepared.report["train"]["dropped"]) == (4, {})


def test_a_row_whose_column_is_null_is_a_row_without_the_field(tmp_path, files):
    write_parquet(tmp_path / "a.parquet", [{"text": "a"}, {"text": None}, {"text": "c"}])
    with pytest.raises(DataError, match='no field "text"') as raised:
        run(tmp_path, tmp_path / "a.parquet", files)
    assert raised.value.where.endswith("a.parquet:2")
    counts = run(tmp_path, tmp_path / "a.parquet", files, on_error="skip").report["train"]
    assert (counts["read"], counts["kept"], counts["dropped"]) == (3, 2, {"bad row": 1})


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_preference_pairs_behind_ordinary_rows_are_bad_rows(tmp_path, files, kind):
    none = {"chosen": None, "rejected": None}
    rows = [{**chat("a", "b"), **none}, {**chat("c", "d"), **none}, {**chat("e", "f"), "chosen": "x", "rejected": "y"}]
    path = tmp_path / f"a.{kind}"
    write_parquet(path, rows) if kind == "parquet" else write_rows(path, rows)
    with pytest.raises(DataError, match="preference pairs") as raised:
        run(tmp_path, path, files)
    assert raised.value.where.endswith(f"a.{kind}:3")
    counts = run(tmp_path, path, files, on_error="skip").report["train"]
    assert (counts["kept"], counts["dropped"]) == (2, {"bad row": 1})


# ---- bugs.md


@pytest.mark.parametrize(("name", "by"), [("a.csv", ","), ("a.tsv", "\t")])
def test_bo_15_mark_line_ends_and_empty_lines_of_csv(tmp_path, files, name, by):
    lines = [f"prompt{by}completion", f"a{by}b", "", f"c{by}d"]
    wanted = documents(
        run(
            tmp_path,
            write_rows(tmp_path / "w.jsonl", [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d"}]),
            files,
        )
    )
    for mark in (b"", b"\xef\xbb\xbf"):
        for end in ("\n", "\r\n"):
            (tmp_path / name).write_bytes(mark + end.join(lines).encode())
            assert documents(run(tmp_path, tmp_path / name, files)) == wanted
            (tmp_path / name).write_bytes(mark + end.join([*lines, '"e']).encode())
            with pytest.raises(DataError, match="1 cells") as raised:
                run(tmp_path, tmp_path / name, files)
            assert raised.value.where.endswith(f"{name}:5")
            counts = run(tmp_path, tmp_path / name, files, on_error="skip").report["train"]
            assert (counts["kept"], counts["dropped"]) == (2, {"bad row": 1})


@pytest.mark.parametrize("name", ["rows.parquet", "zstd.parquet", "stream.arrow", "rows.csv"])
def test_bo_16_a_column_that_is_null_for_long_does_not_matter(tmp_path, files, name):
    rows = [{"text": "t", "meta": None}] * 4000 + [{"meta": "x", "text": "last"}]
    if name == "rows.csv":
        (tmp_path / name).write_text("text,meta\n" + "t,\n" * 4000 + "last,x\n")
    else:
        WRITERS[name](tmp_path / name, rows)
    prepared = run(tmp_path, tmp_path / name, files)
    assert (prepared.report["train"]["kept"], prepared.report["train"]["dropped"]) == (4001, {})
    assert len(documents(prepared)[-1][0]) > len(documents(prepared)[0][0])


BIG = """
import json, resource, sys
from rft import _native
spec = json.loads(sys.stdin.read())
counts = json.loads(_native.prepare(json.dumps(spec), sys.argv[1]))
print(json.dumps([counts["kept"], counts["dropped"], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.parquet", "stream.arrow", "rows.tar.gz"])
def test_bo_17_one_row_of_64_mib_among_short_ones(tmp_path, files, name):
    """The long row is turned away by its weight, so that the reader is what is measured and not the tokenizer."""
    size = 64 << 20
    short = [{"text": "short", "loss_weight": 1.0}] * 2
    writers = {**WRITERS, "rows.jsonl": write_rows}
    peaks = []
    for text in ("short", "word " * (size // 5)):
        folder = tmp_path / str(len(peaks))
        folder.mkdir()
        writers[name](folder / name, [{"text": text, "loss_weight": -1.0}, *short])
        member = "data/rows.jsonl" if name.endswith(".tar.gz") else None
        spec = {
            "format_version": FORMAT_VERSION,
            "sources": [{"path": str(folder / name), "member": member}],
            "tokenizer": {"json": files.json, "eos_id": 0, "vocab_size": files.vocab_size},
            "on_error": "skip",
            "threads": 1,
        }
        command = [sys.executable, "-c", BIG, str(folder / "set")]
        done = subprocess.run(command, input=json.dumps(spec), capture_output=True, text=True, check=True)
        kept, dropped, peak = json.loads(done.stdout)
        assert (kept, dropped) == (2, {"bad row": 1})
        peaks.append(1024 * peak)
    assert peaks[1] - peaks[0] < 8 * size


@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl.zst", "zip", "tar.gz"])
def test_damaged_packing_is_a_fault_of_the_data_and_not_of_the_disk(tmp_path, files, kind):
    rows = "".join(json.dumps({"text": f"{number} {'abcdefghij' * (number % 7)}"}) + "\n" for number in range(3000))
    packed = io.BytesIO()
    if kind == "jsonl.gz":
        packed.write(gzip.compress(rows.encode()))
    elif kind == "jsonl.zst":
        packed.write(pa.compress(rows.encode(), "zstd", asbytes=True))
    elif kind == "zip":
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("rows.jsonl", rows)
    else:
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            info = tarfile.TarInfo("rows.jsonl")
            info.size = len(rows)
            archive.addfile(info, io.BytesIO(rows.encode()))
    refused = 0
    for part in range(1, 12):
        damaged = bytearray(packed.getvalue())
        damaged[len(damaged) * part // 12] ^= 0x55
        path = tmp_path / f"{part}.{kind}"
        path.write_bytes(damaged)
        try:
            run(tmp_path, path, files)
        except DataError:  # what the disk is at fault for is another kind, and another exit code
            refused += 1
    assert refused > 5


@pytest.mark.parametrize("name", ["rows.jsonl", *WRITERS])
def test_bo_18_one_sign_changed_with_size_and_time_kept_is_another_set(tmp_path, files, name):
    path, chats = tmp_path / name, some_chats(5)
    write = {**WRITERS, "rows.jsonl": write_rows}[name]
    write(path, chats)
    before, first = path.stat(), run(tmp_path, path, files)
    assert run(tmp_path, path, files).train.key == first.train.key
    content = chats[3]["messages"][0]["content"]
    chats[3]["messages"][0]["content"] = content[:-1] + ("X" if content[-1] != "X" else "Y")
    write(path, chats)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    changed = run(tmp_path, path, files)
    assert changed.train.key != first.train.key
    differ = [
        index
        for index, (one, other) in enumerate(zip(documents(first), documents(changed), strict=True))
        if one != other
    ]
    assert differ == [3]


@pytest.mark.parametrize("on_error", ["fail", "skip"])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.json"])
def test_half_of_a_surrogate_pair_is_a_bad_row_of_its_place(tmp_path, files, name, on_error):
    """As other programs write it: no text holds one, so no token could stand for it."""
    good, bad = (json.dumps(chat(words, "x")["messages"]) for words in ("q", "a\ud800b"))
    if name == "rows.csv":
        text = "messages\n" + "".join('"' + cell.replace('"', '""') + '"\n' for cell in (good, bad))
    elif name == "rows.json":
        text = "[\n" + ",\n".join(f'{{"messages": {cell}}}' for cell in (good, bad)) + "\n]"
    else:
        text = "".join(f'{{"messages": {cell}}}\n' for cell in (good, bad))
    (tmp_path / name).write_text(text)
    line = 2 if name == "rows.jsonl" else 3
    if on_error == "fail":
        with pytest.raises(DataError) as raised:
            run(tmp_path, tmp_path / name, files)
        assert raised.value.where.endswith(f"{name}:{line}")
        return
    report = run(tmp_path, tmp_path / name, files, on_error="skip").report["train"]
    assert (report["kept"], report["dropped"]) == (1, {"bad row": 1})


def test_of_a_key_that_stands_twice_the_last_counts_as_everywhere(tmp_path, files):
    (tmp_path / "twice.jsonl").write_text('{"text": "one", "text": "two"}\n')
    (tmp_path / "once.jsonl").write_text('{"text": "two"}\n')
    twice, once = (run(tmp_path, tmp_path / name, files) for name in ("twice.jsonl", "once.jsonl"))
    assert documents(twice) == documents(once)


# ---- files that other programs leave


@pytest.mark.parametrize("name", ["none.jsonl", "blank.jsonl", "list.json", "head.csv", "none.txt", "no_rows.parquet"])
def test_a_file_without_rows_is_passed_over_under_skip_counted_and_told(tmp_path, files, name):
    folder = tmp_path / "parts"
    folder.mkdir()
    content = {"blank.jsonl": "\n \n", "list.json": "[]", "head.csv": "text,meta\n"}.get(name, "")
    (folder / name).write_text(content)
    if name.endswith(".parquet"):
        pq.write_table(pa.table({"text": pa.array([], pa.string())}), folder / name)
    rows = write_rows(tmp_path / "rows.jsonl", [{"text": "a"}, {"text": "b"}])
    paths = [SourceConfig(path=str(path)) for path in (folder / name, rows, folder / name)]

    def prepared(on_error, **keys):
        sources = [source.model_copy(update=keys) for source in paths] if keys else paths
        return prepare(DataConfig(train=sources, store=str(tmp_path / "sets"), on_error=on_error), files)

    found = prepared("skip")
    assert documents(found) == documents(run(tmp_path, rows, files))
    counts = found.report["train"]
    assert (counts["empty_files"], counts["read"], counts["kept"], counts["dropped"]) == (2, 2, 2, {})
    assert "2 files without a row" in remarks(found.report)
    if name != "none.txt":  # whose name alone says what it is
        with pytest.raises(DataError, match="the file holds no rows") as raised:
            prepared("fail")
        assert 'on_error = "skip"' in raised.value.do


def test_a_parquet_file_of_no_bytes_is_damaged_and_not_empty(tmp_path, files):
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(DataError, match="an empty file"):
        run(tmp_path, tmp_path / "a.parquet", files, on_error="skip")


@pytest.mark.parametrize("zeros", [1, 3, 512, 700_000])
def test_zeros_behind_gzip_are_padding(tmp_path, files, zeros):
    rows = [json.dumps({"text": f"{number} " * 50}).encode() + b"\n" for number in range(300)]
    members = b"".join(gzip.compress(b"".join(rows[at : at + 100])) for at in range(0, 300, 100))
    wanted = write_rows(tmp_path / "rows.jsonl", [json.loads(row) for row in rows])
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(members + bytes(zeros))
    assert documents(run(tmp_path, path, files)) == documents(run(tmp_path, wanted, files))
    for more in (members, b"x"):
        path.write_bytes(members + bytes(zeros) + more)
        with pytest.raises(DataError, match="zeros behind a member of gzip, and then something else"):
            run(tmp_path, path, files)
    path.write_bytes(members + b"x")
    with pytest.raises(DataError, match="damaged or cut short"):
        run(tmp_path, path, files)


def test_a_zip_behind_a_program_that_unpacks_it_is_a_zip(tmp_path, files):
    wanted = documents(run(tmp_path, write_rows(tmp_path / "rows.jsonl", CHATS[:1]), files))
    write_zip(tmp_path / "plain.zip", CHATS[:1])
    zipped = (tmp_path / "plain.zip").read_bytes()
    (tmp_path / "self.zip").write_bytes(b"#!/bin/sh\nexec unzip $0\n" + b"\x7fELF" * 1000 + zipped)
    assert documents(run(tmp_path, tmp_path / "self.zip", files)) == wanted
    with zipfile.ZipFile(tmp_path / "self.zip", "a") as archive:  # offsets from the start of the file, and a comment
        archive.comment = b"about PK\x05\x06 " * 20
    assert documents(run(tmp_path, tmp_path / "self.zip", files)) == wanted
    with zipfile.ZipFile(tmp_path / "self.zip", "a") as archive:
        archive.writestr("../out.jsonl", "{}")
    with pytest.raises(DataError, match="leaves the archive's folder"):
        run(tmp_path, tmp_path / "self.zip", files)
    (tmp_path / "none.zip").write_bytes(b"#!/bin/sh\n" * 200)
    with pytest.raises(DataError, match=r"none\.zip"):
        run(tmp_path, tmp_path / "none.zip", files)
