"""A data set that no disk here holds, through `rft.data.open(config, streaming=True)` with the batches dropped.

    python bench/data/streaming.py --gigabytes 20 [--texts FOLDER]

A server on this machine that speaks S3's protocol makes the files of a bucket while they are fetched: chats whose texts are cut out of those of `--texts` (a folder;
default ../shared/data, where it is there, else this Python's own sources) at places that a seed of file and row gives, each with a
mark of its own, so that no row comes twice. Three processes read the stream and note a digest of every batch: one to the
end; one that is killed (SIGKILL) half-way; and one that goes on from the last position that the killed one had written, to the end. Every batch
of both has to be that of the first.

Reported are the rate, the most disk that the store took (windows and fetched files, also those that have no name any more and are still
open), and anonymous memory of the reading process (which
prepares as well) at eight points.
"""

from __future__ import annotations

import argparse
import hashlib
import http.server
import itertools
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from _chats import own_lines
from readers import CHATML, tokenizer

import rft.data
from results import ROOT, Results

SEQ_LEN, MICRO_BATCH = 4096, 8
DIGEST_BYTES = 16
STATE_EVERY, LOOK_EVERY = 200, 500
"""Batches after which the position is written, and after which memory and disk are looked at."""
TEXT_SUFFIXES = (".json", ".jsonl", ".txt", ".tsv")


def stock(texts: Path) -> bytes:
    """Text in the form in which it stands between the quotes of a JSON string, about 16 MB of it."""
    if texts.is_dir():
        files = sorted(path for path in texts.rglob("*") if path.suffix in TEXT_SUFFIXES)
        pieces: Iterator[str] = (piece for file in files for piece in _strings(file))
    else:
        pieces = (message["content"] for line in own_lines() for message in json.loads(line)["messages"])
    made, size = [], 0
    for piece in pieces:
        made.append(json.dumps(piece, ensure_ascii=False)[1:-1].encode("utf-8", "replace"))
        size += len(made[-1])
        if size > 16_000_000:
            break
    random.Random(0).shuffle(made)
    return b" ".join(made)


def _strings(file: Path) -> Iterator[str]:
    """The texts of a JSON or JSON lines file, or the paragraphs of any other."""
    text = file.read_text("utf-8", "replace")
    if file.suffix in (".txt", ".tsv"):
        yield from text.split("\n\n")
        return
    try:
        values = [json.loads(text)]
    except json.JSONDecodeError:
        values = [json.loads(line) for line in text.splitlines() if line.startswith("{") and line.endswith("}")]
    while values:
        value = values.pop()
        if isinstance(value, str) and len(value) > 20:
            yield value
        elif isinstance(value, dict | list):
            values.extend(value.values() if isinstance(value, dict) else value)


def content(number: int, size: int, texts: bytes) -> bytes:
    """File `number`: JSON lines of exactly `size` bytes."""
    pick = random.Random(number)
    lines, done = [], 0
    for row in itertools.count(1):
        parts = [b'{"messages":[']
        for role in (b"user", b"assistant"):
            start = texts.index(b" ", pick.randrange(len(texts) - 100_000)) + 1
            end = texts.index(b" ", start + min(int(pick.lognormvariate(6.3, 0.9)), 8000))
            parts.append(b'{"role":"%s","content":"%d-%d %s"},' % (role, number, row, texts[start:end]))
        parts[-1] = parts[-1][:-1] + b"]}\n"
        lines.append(b"".join(parts))
        done += len(lines[-1])
        if done > size - 2:
            lines[-1] = b" " * (size - 1 - (done - len(lines[-1]))) + b"\n"
            return b"".join(lines)
    raise AssertionError


class Files(http.server.BaseHTTPRequestHandler):
    """`/texts/N.jsonl`: the file made from seed N, by ranges; the last few are kept. `/texts?list-type=2...`: all of them."""

    size = count = 0
    texts = b""
    kept: dict[int, bytes] = {}  # noqa: RUF012 - of the server's process
    lock = threading.Lock()
    protocol_version = "HTTP/1.1"

    def number(self) -> int:
        return int(self.path.rpartition("/")[2].removesuffix(".jsonl"))

    def etag(self, number: int) -> str:
        return f'"{number}-{self.size}"'

    def do_HEAD(self) -> None:
        self.head(200, self.size)

    def do_GET(self) -> None:
        if "?" in self.path:
            items = "".join(
                f"<Contents><Key>all/{number:05}.jsonl</Key><LastModified>2022-01-01T00:00:00.000Z</LastModified>"
                f"<ETag>{self.etag(number)}</ETag><Size>{self.size}</Size></Contents>"
                for number in range(1, self.count + 1)
            )
            listing = f"<ListBucketResult><IsTruncated>false</IsTruncated>{items}</ListBucketResult>".encode()
            self.head(200, len(listing))
            self.wfile.write(listing)
            return
        with self.lock:
            if self.number() not in self.kept:
                if len(self.kept) > 1:
                    self.kept.pop(min(self.kept))
                self.kept[self.number()] = content(self.number(), self.size, self.texts)
            whole = self.kept[self.number()]
        given = self.headers.get("Range", "").removeprefix("bytes=")
        start, end = (int(part) for part in given.split("-")) if given else (0, self.size - 1)
        part = whole[start : end + 1]
        self.head(
            206 if given else 200, len(part), f"bytes {start}-{start + len(part) - 1}/{self.size}" if given else ""
        )
        self.wfile.write(part)

    def head(self, status: int, length: int, content_range: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        if "?" not in self.path:
            self.send_header("ETag", self.etag(self.number()))
        self.send_header("Last-Modified", "Sat, 01 Jan 2022 00:00:00 GMT")
        if content_range:
            self.send_header("Content-Range", content_range)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Nothing: a line a request would drown the figures."""


class Server(http.server.ThreadingHTTPServer):
    def handle_error(self, *_: Any) -> None:
        """Nothing: the killed process cuts its connections."""


def serve(size: int, count: int, texts: bytes, port: Any) -> None:
    """In a process of its own: its memory and time are not the stream's."""
    Files.size, Files.count, Files.texts = size, count, texts
    server = Server(("127.0.0.1", 0), Files)
    port.put(server.server_address[1])
    server.serve_forever()


def anonymous_megabytes() -> float:
    """Memory of this process that no file stands behind."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) / 1e3


def disk_megabytes(folder: Path) -> float:
    """Of the files in the folder, and of those removed from it that this process has open or mapped."""
    blocks = {}
    for path in [*folder.rglob("*"), *Path("/proc/self/fd").iterdir()]:
        try:
            status = path.stat()
            if path.parent.name == "fd" and (status.st_nlink or not str(path.readlink()).startswith(str(folder))):
                continue
        except OSError:  # removed while we looked
            continue
        blocks[status.st_ino] = status.st_blocks * 512
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, _, _, inode, *name = line.split(maxsplit=5)
        if name and name[0].startswith(str(folder)) and name[0].endswith("(deleted)"):
            start, end = (int(address, 16) for address in addresses.split("-"))
            blocks[int(inode)] = max(blocks.get(int(inode), 0), end - start)
    return sum(blocks.values()) / 1e6


def write_model(folder: Path, texts: bytes) -> Path:
    """A tokenizer of 8,000 entries and a template; no weights."""
    folder.mkdir()
    rows = [json.loads(line) for line in content(0, 2_000_000, texts).splitlines() if line.strip()]
    (folder / "tokenizer.json").write_text(tokenizer(rows))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>", "chat_template": CHATML}))
    (folder / "config.json").write_text("{}")
    return folder


def consume(folder: Path, name: str, state: Path | None) -> None:
    """The stream of `folder`/config.json to its end, from a state on where one is named.

    Behind each batch its digest goes to NAME.digests; now and then the position to NAME.state and a line of figures to NAME.log.
    """
    config = json.loads((folder / "config.json").read_text())
    store = Path(config["data"]["store"])
    begun = time.perf_counter()
    stream: Any = rft.data.open(config, streaming=True, seq_len=SEQ_LEN, micro_batch=MICRO_BATCH, arrays="numpy")
    first, batches = 0, stream.epoch(0)
    if state is not None:
        saved = json.loads(state.read_text())
        first, batches = saved["batches"], stream.resume(saved["state"])
    figures = {"first_batch": 0.0, "tokens": 0, "digest_cpu": 0.0, "batches": first}
    with (folder / f"{name}.digests").open("wb", 0) as digests, (folder / f"{name}.log").open("w") as log:

        def look() -> None:
            figures.update(seconds=time.perf_counter() - begun, cpu=time.process_time() - figures["digest_cpu"])
            figures.update(anonymous=anonymous_megabytes(), disk=disk_megabytes(store))
            log.write(json.dumps(figures) + "\n")
            log.flush()

        for number, batch in enumerate(batches, start=first + 1):
            figures["first_batch"] = figures["first_batch"] or time.perf_counter() - begun
            figures["tokens"] += batch.num_tokens
            figures["batches"] = number
            hashing = time.thread_time()
            digest = hashlib.sha256(batch.input_ids)
            digest.update(batch.labels)
            digest.update(batch.cu_seqlens)
            digests.write(digest.digest()[:DIGEST_BYTES])
            figures["digest_cpu"] += time.thread_time() - hashing
            if number % STATE_EVERY == 0:
                written = folder / f"{name}.state.tmp"
                written.write_text(json.dumps({"batches": number, "state": stream.state(0, number)}))
                written.replace(folder / f"{name}.state")
            if number % LOOK_EVERY == 0:
                look()
        look()
    stream.close()


def start(folder: Path, name: str, state: Path | None = None) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, "--consume", str(folder), name, *([str(state)] if state else [])]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))})


def finish(process: subprocess.Popen[bytes]) -> None:
    if process.wait():
        raise RuntimeError(f"the reading process ended with status {process.returncode}")


def log_of(folder: Path, name: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / f"{name}.log").read_text().splitlines()]


def digests_of(folder: Path, name: str) -> list[bytes]:
    """A digest a batch; a torn last one is left out."""
    whole = (folder / f"{name}.digests").read_bytes()
    return [whole[at : at + DIGEST_BYTES] for at in range(0, len(whole) - DIGEST_BYTES + 1, DIGEST_BYTES)]


def run(results: Results, folder: Path, megabytes: float) -> bool:
    case = f"data/streaming/{megabytes / 1e3:g}gb"
    finish(start(folder, "whole"))
    log = log_of(folder, "whole")
    end = log[-1]
    results.add(case, "rft", "megabytes", megabytes)
    results.add(case, "rft", "seconds", end["seconds"])
    results.add(case, "rft", "mb_per_s", megabytes / end["seconds"])
    results.add(case, "rft", "mb_per_cpu_s", megabytes / end["cpu"])
    results.add(case, "rft", "seconds_to_first_batch", end["first_batch"])
    results.add(case, "rft", "tokens", end["tokens"])
    results.add(case, "rft", "batches", end["batches"])
    results.add(case, "rft", "disk_mb", max(line["disk"] for line in log))
    for eighth in range(1, 9):
        line = log[max(0, len(log) * eighth // 8 - 1)]
        results.add(f"{case}/after-{eighth}-eighths", "rft", "anonymous_mb", line["anonymous"])
    results.add(case, "rft", "largest_anonymous_mb", max(line["anonymous"] for line in log))
    whole = digests_of(folder, "whole")

    process = start(folder, "killed")
    half = DIGEST_BYTES * (len(whole) // 2 + 7)  # not where a position is written
    while (folder / "killed.digests").stat().st_size < half if (folder / "killed.digests").exists() else True:
        if process.poll() is not None:
            raise RuntimeError(f"the reading process ended by itself, with status {process.returncode}")
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    killed = digests_of(folder, "killed")
    results.add(f"{case}/killed", "rft", "batches", len(killed))
    results.add(f"{case}/killed", "rft", "same_batches", float(killed == whole[: len(killed)]))

    state = folder / "killed.state"
    first = json.loads(state.read_text())["batches"]
    finish(start(folder, "resumed", state))
    resumed = digests_of(folder, "resumed")
    log = log_of(folder, "resumed")
    results.add(f"{case}/resumed", "rft", "from_batch", first)
    results.add(f"{case}/resumed", "rft", "seconds_to_first_batch", log[-1]["first_batch"])
    results.add(f"{case}/resumed", "rft", "batches", len(resumed))
    results.add(f"{case}/resumed", "rft", "same_batches", float(resumed == whole[first:]))
    results.add(f"{case}/resumed", "rft", "disk_mb", max(line["disk"] for line in log))
    return killed == whole[: len(killed)] and resumed == whole[first:]


def main() -> int:
    """Exit status 1 where a batch differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, help="append result lines here")
    parser.add_argument("--gigabytes", type=float, default=20)
    parser.add_argument("--file-megabytes", type=float, default=200)
    parser.add_argument("--texts", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--folder", type=Path, help="where the store lies (default: a temporary folder)")
    parser.add_argument("--consume", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.consume:
        consume(Path(args.consume[0]), args.consume[1], Path(args.consume[2]) if len(args.consume) > 2 else None)
        return 0
    results = Results(args.results)
    texts = stock(args.texts)
    size, count = int(args.file_megabytes * 1e6), max(2, round(args.gigabytes * 1e3 / args.file_megabytes))
    port: Any = multiprocessing.Queue()
    server = multiprocessing.Process(target=serve, args=(size, count, texts, port), daemon=True)
    server.start()
    os.environ.update(
        AWS_ENDPOINT_URL=f"http://127.0.0.1:{port.get()}",
        AWS_ALLOW_HTTP="true",
        AWS_ACCESS_KEY_ID="someone",
        AWS_SECRET_ACCESS_KEY="secret",
        AWS_REGION="us-east-1",
    )
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        data = {
            "train": [{"path": "s3://texts/all/", "format": "messages"}],
            "store": str(folder / "sets"),
            "cache_gb": 3 * args.file_megabytes / 1e3,
        }
        config = {"model": {"path": str(write_model(folder / "model", texts))}, "data": data}
        (folder / "config.json").write_text(json.dumps(config))
        same = run(results, folder, size * count / 1e6)
    server.terminate()
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
