"""A data set that no disk here holds, through `rft.data.open(config, streaming=True)` with the batches dropped.

A web server on this machine makes the files while they are fetched: chats whose words come from a vocabulary by a seed of the
file and the row, so no text repeats. Reported are the rate, the most disk that the store took (windows and fetched files) and the growth of
this process's anonymous memory over the last three quarters. Half-way the stream is given up and resumed from its state.
"""

from __future__ import annotations

import argparse
import hashlib
import http.server
import json
import multiprocessing
import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from readers import CHATML, chats, tokenizer, words

import rft.data
from results import Results

SEQ_LEN, MICRO_BATCH = 4096, 8


def content(number: int, size: int) -> bytes:
    """File `number`: JSON lines of `size` bytes, made of pieces of a stock that are joined anew in each row."""
    pick = random.Random(number)
    stock = " ".join(pick.choices(words(), k=200_000))
    lines, done, row = [], 0, 0
    while done < size:
        row += 1
        texts = []
        for _ in range(2):
            start, length = pick.randrange(len(stock) - 4000), int(pick.lognormvariate(6.0, 0.9)) + 20
            texts.append(f"{number}-{row} {stock[start : start + min(length, 4000)]}")
        turns = [{"role": role, "content": text} for role, text in zip(("user", "assistant"), texts, strict=True)]
        line = json.dumps({"messages": turns}).encode() + b"\n"
        lines.append(line)
        done += len(line)
    whole = b"".join(lines)[: size - 1]
    return whole[: whole.rfind(b"\n")].ljust(size - 1) + b"\n"


class Files(http.server.BaseHTTPRequestHandler):
    """`/N.jsonl`: the file made from seed N, by ranges; the last few are kept."""

    size = 0
    kept: dict[int, bytes] = {}  # noqa: RUF012 - of the server's process
    lock = threading.Lock()
    protocol_version = "HTTP/1.1"

    def number(self) -> int:
        return int(self.path.strip("/").removesuffix(".jsonl"))

    def do_HEAD(self) -> None:
        self.head(200, self.size)

    def do_GET(self) -> None:
        with self.lock:
            if self.number() not in self.kept:
                if len(self.kept) > 1:
                    self.kept.pop(min(self.kept))
                self.kept[self.number()] = content(self.number(), self.size)
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
        self.send_header("ETag", f'"{self.number()}-{self.size}"')
        self.send_header("Accept-Ranges", "bytes")
        if content_range:
            self.send_header("Content-Range", content_range)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Nothing: a line a request would drown the figures."""


def serve(size: int, port: Any) -> None:
    """In a process of its own: its memory and time are not the stream's."""
    Files.size = size
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Files)
    port.put(server.server_address[1])
    server.serve_forever()


def anonymous_megabytes() -> float:
    """Memory of this process that no file stands behind."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) / 1e3


def disk_megabytes(folder: Path) -> float:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_blocks * 512
        except OSError:  # removed while we looked
            continue
    return total / 1e6


def write_model(folder: Path) -> Path:
    """A tokenizer of 8,000 entries and a template; no weights."""
    folder.mkdir()
    (folder / "tokenizer.json").write_text(tokenizer(chats(2_000_000)))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>", "chat_template": CHATML}))
    (folder / "config.json").write_text("{}")
    return folder


def main() -> None:
    """All of it once; the same batches are expected behind the resume."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, help="append result lines here")
    parser.add_argument("--gigabytes", type=float, default=20)
    parser.add_argument("--file-megabytes", type=float, default=200)
    parser.add_argument("--folder", type=Path, help="where the store lies (default: a temporary folder)")
    args = parser.parse_args()
    results = Results(args.results)
    size, count = int(args.file_megabytes * 1e6), max(2, round(args.gigabytes * 1e3 / args.file_megabytes))
    port: Any = multiprocessing.Queue()
    server = multiprocessing.Process(target=serve, args=(size, port), daemon=True)
    server.start()
    base = f"http://127.0.0.1:{port.get()}"
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        sources = [{"path": f"{base}/{number}.jsonl", "format": "messages"} for number in range(1, count + 1)]
        store = {"store": str(folder / "sets"), "cache_gb": 3 * args.file_megabytes / 1e3}
        config = {"model": {"path": str(write_model(folder / "model"))}, "data": {"train": sources, **store}}
        run(results, config, folder / "sets", size * count / 1e6)
    server.terminate()


def run(results: Results, config: dict[str, Any], store: Path, megabytes: float) -> None:
    options = {"seq_len": SEQ_LEN, "micro_batch": MICRO_BATCH, "arrays": "numpy"}
    begun, processor = time.perf_counter(), time.process_time()
    stream: Any = rft.data.open(config, streaming=True, **options)
    tokens = batches = 0
    disk: list[float] = []
    memory: list[float] = []
    seen: dict[int, str] = {}
    states: list[tuple[int, dict[str, Any]]] = []
    first = 0.0
    for batches, batch in enumerate(stream.epoch(0), start=1):
        tokens += batch.num_tokens
        first = first or time.perf_counter() - begun
        if batches % 500 == 0:
            disk.append(disk_megabytes(store))
            memory.append(anonymous_megabytes())
            states.append((batches, stream.state(0, batches)))
        if 0 < batches % 500 <= 20:
            seen[batches] = hashlib.sha256(batch.input_ids.tobytes() + batch.labels.tobytes()).hexdigest()
    seconds, processor = time.perf_counter() - begun, time.process_time() - processor
    stream.close()
    case = f"data/streaming/{megabytes / 1e3:g}gb"
    results.add(case, "rft", "mb_per_s", megabytes / seconds)
    results.add(case, "rft", "mb_per_cpu_s", megabytes / processor)
    results.add(case, "rft", "seconds_to_first_batch", first)
    results.add(case, "rft", "tokens", float(tokens))
    results.add(case, "rft", "disk_mb", max(disk))
    late = memory[len(memory) // 4 :]
    results.add(case, "rft", "anonymous_mb", late)
    results.add(case, "rft", "memory_growth_mb", late[-1] - late[0])
    at, state = states[len(states) // 2]
    again: Any = rft.data.open(config, streaming=True, **options)
    same = []
    for number, batch in enumerate(again.resume(json.loads(json.dumps(state))), start=at + 1):
        if number in seen:
            same.append(hashlib.sha256(batch.input_ids.tobytes() + batch.labels.tobytes()).hexdigest() == seen[number])
        if number > at + 20:
            break
    again.close()
    results.add(case, "rft", "same_batches_after_resume", float(bool(same) and all(same)))


if __name__ == "__main__":
    main()
