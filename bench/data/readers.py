"""How fast each kind of file is read and prepared, in MB of text a CPU second, and what a few columns of many cost.

`prepare`: rows to tokens and masks, whole. `read`: the same with all but a thousandth of the rows left out before they are
parsed (they belong to the other side of a split), so what is measured is the reader alone. One thread; systems are the kinds of file. Listing an
archive, for which a tar.gz is unpacked once more, is counted.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import json
import os
import statistics
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _chats import own_lines

from results import Results
from rft import _native
from rft.data.prepare import FORMAT_VERSION

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SEPARATE = {"separators": (",", ":"), "ensure_ascii": False}


def chats(size: int) -> list[dict[str, Any]]:
    """Chats of docstrings and sources with `size` bytes of text in all: what packing and tokenising cost depends on the text."""
    rows, done = [], 0
    for line in own_lines():
        rows.append(json.loads(line))
        done += sum(len(message["content"].encode()) for message in rows[-1]["messages"])
        if done >= size:
            break
    return rows


def tokenizer(rows: list[dict[str, Any]]) -> str:
    """A byte-level BPE of 8,000 entries, trained on some of the rows."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=8000,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator((m["content"] for row in rows[:2000] for m in row["messages"]), trainer)
    return made.to_str()


def write_all(folder: Path, rows: list[dict[str, Any]]) -> Iterator[tuple[str, Path, str | None]]:
    """(system, file, member) for each kind, plain JSON lines first."""
    plain = "".join(json.dumps(row, **SEPARATE) + "\n" for row in rows).encode()
    table = pa.table({"messages": [row["messages"] for row in rows]})

    def put(name: str, content: bytes) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    yield "jsonl", put("rows.jsonl", plain), None
    yield "json array", put("rows.json", b"[" + plain.strip().replace(b"\n", b",\n") + b"]"), None
    yield "jsonl.gz", put("rows.jsonl.gz", gzip.compress(plain, 6)), None
    yield "jsonl.zst", put("rows.jsonl.zst", pa.compress(plain, "zstd", asbytes=True)), None
    cells = io.StringIO()
    writer = csv.writer(cells)
    writer.writerow(["messages"])
    writer.writerows([json.dumps(row["messages"], **SEPARATE)] for row in rows)
    yield "csv", put("rows.csv", cells.getvalue().encode()), None
    for codec in ("snappy", "zstd"):
        pq.write_table(table, folder / f"{codec}.parquet", compression=codec)
        yield f"parquet {codec}", folder / f"{codec}.parquet", None
    with pa.OSFile(str(folder / "rows.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table, max_chunksize=1000)
    yield "arrow", folder / "rows.arrow", None
    with zipfile.ZipFile(folder / "rows.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("rows.jsonl", plain)
    yield "zip", folder / "rows.zip", "rows.jsonl"
    with tarfile.open(folder / "rows.tar.gz", "w:gz", compresslevel=6) as archive:
        info = tarfile.TarInfo("rows.jsonl")
        info.size = len(plain)
        archive.addfile(info, io.BytesIO(plain))
    yield "tar.gz", folder / "rows.tar.gz", "rows.jsonl"


def request(path: Path, member: str | None, tokenizer_json: str, **options: Any) -> str:
    """What the extension is asked, without the folder."""
    vocabulary = json.loads(tokenizer_json)["model"]["vocab"]
    return json.dumps(
        {
            "format_version": FORMAT_VERSION,
            "sources": [{"path": str(path), "member": member}],
            "tokenizer": {"json": tokenizer_json, "eos_id": 0, "vocab_size": len(vocabulary)},
            "template": CHATML,
            "threads": 1,
            **options,
        }
    )


def cpu_seconds(spec: str, repeats: int, touched: Path | None = None) -> list[float]:
    """Process time of the whole call, `repeats` times after one that is not counted. touched: a file that is new each time, so that nothing
    of it is known."""
    taken = []
    for number in range(repeats + 1):
        if touched is not None:
            os.utime(touched, (number, number))
        with tempfile.TemporaryDirectory() as out:
            start = time.process_time()
            _native.prepare(spec, str(Path(out) / "set"))
            taken.append(time.process_time() - start)
    return taken[1:]


def bytes_read(call: Callable[[], object]) -> int:
    """Bytes that this process read from files during the call (Linux)."""

    def so_far() -> int:
        lines = Path("/proc/self/io").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))

    before = so_far()
    call()
    return so_far() - before


def columns(results: Results, folder: Path, rows: list[dict[str, Any]], tokenizer_json: str) -> None:
    """Three columns of 40: bytes that the key and the preparation read, as shares of the file and of these columns."""
    texts = ["\n".join(m["content"] for m in row["messages"]) for row in rows[:4000]]
    table = {f"column_{n}": texts[n:] + texts[:n] for n in range(37)}
    table |= {"prompt": [text[:300] for text in texts], "completion": texts, "loss_weight": [1.0] * len(texts)}
    path = folder / "wide.parquet"
    pq.write_table(pa.table(table), path)
    groups = pq.ParquetFile(path).metadata
    wanted = sum(
        groups.row_group(g).column(c).total_compressed_size
        for g in range(groups.num_row_groups)
        for c in range(groups.num_columns)
        if groups.row_group(g).column(c).path_in_schema in ("prompt", "completion", "loss_weight")
    )
    spec = request(path, None, tokenizer_json)
    key = bytes_read(lambda: _native.store_key(spec))
    made = bytes_read(lambda: _native.prepare(spec, str(folder / "wide")))
    results.add("data/readers/3-of-40-columns", "key", "share_of_file", key / path.stat().st_size)
    results.add("data/readers/3-of-40-columns", "key", "times_the_columns", key / wanted)
    results.add("data/readers/3-of-40-columns", "prepare", "share_of_file", made / path.stat().st_size)
    results.add("data/readers/3-of-40-columns", "prepare", "times_the_columns", made / wanted)


def main() -> None:
    """Every kind in turn; figures relative to plain JSON lines follow."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, help="append result lines here")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--megabytes", type=float, default=20, help="of text")
    args = parser.parse_args()
    results = Results(args.results)
    rows = chats(int(args.megabytes * 1e6))
    size = sum(len(m["content"].encode()) for row in rows for m in row["messages"]) / 1e6
    tokenizer_json = tokenizer(rows)
    few = {"holdout": {"fraction": 0.001, "part": "eval"}}
    plain: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for system, path, member in write_all(folder, rows):
            for case, options in (("read", few), ("prepare", {})):
                seconds = cpu_seconds(
                    request(path, member, tokenizer_json, **options), args.repeats, path if member else None
                )
                rates = [size / s for s in seconds]
                results.add(f"data/readers/{case}", system, "mb_per_cpu_s", rates)
                plain.setdefault(case, statistics.median(rates))
                if system != "jsonl":
                    relative = statistics.median(rates) / plain[case]
                    results.add(f"data/readers/{case}", system, "of_plain_jsonl", relative)
        columns(results, folder, rows, tokenizer_json)


if __name__ == "__main__":
    main()
