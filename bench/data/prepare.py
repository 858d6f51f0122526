"""Chats as JSONL -> packed shards: MB a CPU second on one thread against datasets + TRL, gain of a second core, memory.

    python bench/data/prepare.py --tokenizer FOLDER [--peer-python PYTHON]
    python bench/data/prepare.py --tokenizer FOLDER --two-gb 0.06 0.3 1     only what a second core gains, by size of the input
    python bench/data/prepare.py --tokenizer FOLDER --memory-gb 0.1 1 20      peak memory by size of the input, no peer
    ... --memory-input rows     the same over lines of text of long tokens: a set of 20 GB of it takes a fifteenth on disk

The input of a memory run, and of --two-gb beyond --megabytes, is one file of --megabytes, read as many times as it takes (as sources of their own).

ours: `_native.prepare` (read, parse, render, tokenise, mask, shards on disk, flushed) and the pack plan of the epoch.
theirs: load_dataset("json"), a batched map with `apply_chat_template(..., return_assistant_tokens_mask=True)`, TRL's
`pack_dataset` (bfd, 8192), save_to_disk, on one process. Both over the same file with the same template; CPU seconds of the whole
process over that work, imports left out; `--peer-python` runs them in another environment (it needs datasets, trl, transformers).
One thread runs on one core: on two, shards would be written on the second one, and that is part of what it gains. Gains are wall
clock: run them on an idle machine.
"""

from __future__ import annotations

NEEDS = "--tokenizer FOLDER of a Qwen3 model (tokenizer.json)"

import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _chats import TEMPLATE, arguments, request, write_chats

from results import Results

CASE = "prepare/chats-jsonl"
PEER = """
import json, sys, time
import datasets, transformers
from trl import pack_dataset
datasets.disable_progress_bars()
transformers.logging.set_verbosity_error()
chats, tokenizer, template, folder, repeats = sys.argv[1:6]
tok = transformers.PreTrainedTokenizerFast(tokenizer_file=tokenizer)
tok.chat_template = template
def batch(rows):
    out = tok.apply_chat_template(rows["messages"], return_dict=True, return_assistant_tokens_mask=True)
    return {"input_ids": out["input_ids"], "assistant_masks": out["assistant_masks"]}
for number in range(int(repeats)):
    wall, cpu = time.perf_counter(), time.process_time()
    rows = datasets.load_dataset("json", data_files=chats, split="train", cache_dir=f"{folder}/cache{number}")
    rows = rows.map(batch, batched=True, remove_columns=rows.column_names, load_from_cache_file=False)
    packed = pack_dataset(rows, 8192, "bfd")
    packed.save_to_disk(f"{folder}/out{number}")
    print(json.dumps({"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}), flush=True)
print(json.dumps({"versions": {p: __import__(p).__version__ for p in ("datasets", "trl", "transformers", "tokenizers")}}))
"""


def ours(spec: dict, folder: Path) -> tuple[float, float]:
    """CPU and wall seconds of a preparation and the plan of its first epoch, on as many cores as threads."""
    from rft import _native

    text = json.dumps(spec, ensure_ascii=False)
    target = folder / "set"
    shutil.rmtree(target, ignore_errors=True)
    all_cores = os.sched_getaffinity(0)
    # Threads that are started from here on inherit it.
    os.sched_setaffinity(0, sorted(all_cores)[: spec["threads"]])
    try:
        wall, cpu = time.perf_counter(), time.process_time()
        _native.prepare(text, str(target))
        _native.Plan(_native.Store(str(target)), 8192, "bfd", "split", 0, 0)
        return time.process_time() - cpu, time.perf_counter() - wall
    finally:
        os.sched_setaffinity(0, all_cores)


def peer(python: str, chats: Path, tokenizer: Path, folder: Path, repeats: int) -> tuple[list[dict], dict[str, str]]:
    """Its seconds, and its versions. Raises RuntimeError with its last words."""
    file = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "RAYON_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "ARROW_NUM_THREADS": "1",
    }
    command = [python, "-c", PEER, str(chats), str(file), TEMPLATE, str(folder), str(repeats)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or "versions" not in lines[-1]:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no output"])[-1])
    return lines[:-1], lines[-1]["versions"]


def write_rows(path: Path, megabytes: float) -> None:
    """Lines of about 1 kB of long tokens: runs of one sign, which vocabularies hold in lengths of 16 to 64."""
    pick, left = random.Random(0), int(megabytes * 1e6)
    with path.open("w", encoding="ascii") as file:
        while left > 0:
            signs = pick.choices("=-*# ", k=pick.randint(4, 28))
            line = json.dumps({"text": f"row {left} " + "".join(sign * 64 for sign in signs)}) + "\n"
            left -= file.write(line)


def memory(gigabytes: float, threads: int, chats: Path, form: str, tokenizer: Path, folder: Path) -> tuple[int, int]:
    """Peak bytes of anonymous memory while so many gigabytes are prepared (in a process of its own), and rows."""
    program = f"""
import json, sys
sys.path.insert(0, {str(Path(__file__).resolve().parent)!r})
from _chats import request
from pathlib import Path
from rft import _native
spec = request(Path(sys.argv[1]), Path(sys.argv[2]), threads=int(sys.argv[5]))
spec["sources"][0]["format"] = sys.argv[6]
spec["sources"] *= int(sys.argv[4])
peak = 0
def look(*_):
    global peak
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    peak = max(peak, int(status["RssAnon"].split()[0]) * 1024)
counts = json.loads(_native.prepare(json.dumps(spec), sys.argv[3], look))
print(json.dumps([peak, counts["read"]]))
"""
    times = max(1, round(gigabytes * 1e9 / chats.stat().st_size))
    target = folder / "large"
    shutil.rmtree(target, ignore_errors=True)
    arguments = [str(chats), str(tokenizer), str(target), str(times), str(threads), form]
    command = [sys.executable, "-P", "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    shutil.rmtree(target)
    peak, rows = json.loads(done.stdout.splitlines()[-1])
    return peak, rows


def two_threads(results: Results, gigabytes: float, chats: Path, tokenizer: Path, folder: Path, repeats: int) -> None:
    """One thread and two in turn, over a set of so many gigabytes; the gain is of the shortest times."""
    times = max(1, round(gigabytes * 1e9 / chats.stat().st_size))
    seconds: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(repeats):
        for threads, taken in seconds.items():
            spec = request(chats, tokenizer, threads=threads)
            spec["sources"] *= times
            taken.append(ours(spec, folder)[1])
    megabytes = times * chats.stat().st_size / 1e6
    case = f"{CASE}/{megabytes:.0f}-mb"
    results.add(f"{case}/one-thread", "rft", "mb_per_wall_second", [megabytes / wall for wall in seconds[1]])
    results.add(f"{case}/two-threads", "rft", "mb_per_wall_second", [megabytes / wall for wall in seconds[2]])
    results.add(f"{case}/two-threads", "rft", "gain", min(seconds[1]) / min(seconds[2]))


def main() -> int:
    """Result lines for rft and the peer."""
    parser = arguments(__doc__)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with tokenizer.json, or the file")
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter with datasets and trl")
    parser.add_argument("--peer-repeats", type=int, default=3)
    parser.add_argument(
        "--two-gb", type=float, nargs="*", default=[], help="only the gain of a second thread, at these sizes"
    )
    parser.add_argument("--memory-gb", type=float, nargs="*", default=[], help="only measure memory, at these sizes")
    parser.add_argument("--memory-input", choices=("chats", "rows"), default="chats")
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2], help="of the memory runs")
    parser.add_argument("--folder", type=Path, help="where the files go for the while (default: the system's)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        chats = folder / "chats.jsonl"
        if args.memory_gb and args.memory_input == "rows":
            write_rows(chats, args.megabytes)
        else:
            megabytes = write_chats(chats, args.megabytes, args.chats) / 1e6
        if args.two_gb:
            results = Results(args.results)
            for size in args.two_gb:
                part = folder / "part.jsonl"
                write_chats(part, min(size * 1e3, megabytes), chats)
                two_threads(results, size, part, args.tokenizer, folder, args.repeats)
            return 0
        if args.memory_gb:
            results = Results(args.results)
            form = "text" if args.memory_input == "rows" else "messages"
            for threads in args.threads:
                case = f"prepare/memory/{args.memory_input}/{threads}-threads"
                measured = [memory(size, threads, chats, form, args.tokenizer, folder) for size in args.memory_gb]
                for size, (peak, rows) in zip(args.memory_gb, measured, strict=True):
                    results.add(f"{case}/{size:g}-gb", "rft", "peak_mib", peak / 2**20)
                    results.add(f"{case}/{size:g}-gb", "rft", "rows", rows)
                (first, few), (last, many) = measured[0], measured[-1]
                if many > few:
                    results.add(case, "rft", "bytes_per_row", max(0.0, (last - first) / (many - few)))
            return 0
        try:
            theirs, versions = peer(args.peer_python, chats, args.tokenizer, folder, args.peer_repeats)
        except RuntimeError as error:
            theirs, versions = str(error), {}
        results = Results(args.results, versions=versions)
        one = [ours(request(chats, args.tokenizer, threads=1), folder) for _ in range(args.repeats)]
        two = [ours(request(chats, args.tokenizer, threads=2), folder) for _ in range(args.repeats)]
        results.add(CASE, "rft", "mb_per_second", [megabytes / cpu for cpu, _ in one])
        if isinstance(theirs, str):
            results.error(CASE, "datasets+trl", theirs)
        else:
            results.add(CASE, "datasets+trl", "mb_per_second", [megabytes / line["cpu"] for line in theirs])
        results.add(f"{CASE}/one-thread", "rft", "mb_per_wall_second", [megabytes / wall for _, wall in one])
        results.add(f"{CASE}/two-threads", "rft", "mb_per_wall_second", [megabytes / wall for _, wall in two])
        results.add(f"{CASE}/two-threads", "rft", "gain", min(wall for _, wall in one) / min(wall for _, wall in two))
        results.add(f"{CASE}/file", "rft", "megabytes", megabytes)
        results.add(f"{CASE}/peak", "rft", "max_rss_mib", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    return 0


if __name__ == "__main__":
    sys.exit(main())
