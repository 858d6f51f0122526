"""Tokenization, file to flat ids: MB (10^6 bytes of UTF-8) a CPU second against gigatoken, fastokens and tokenizers 1.0.

    python bench/data/tokenization.py --corpora FOLDER --tokenizers FOLDER [--peers PYTHON ...] [--results FILE]
    ... --tokenizer qwen3 llama3=llama.cpp-llama-bpe gemma=llama.cpp-gemma-4 --corpus english     # other vocabularies

FOLDER of corpora: <name>.txt of bench/data/corpora.py. FOLDER of tokenizers: <name>/tokenizer.json or <name>.json.
PYTHON: interpreters of environments that hold peers (`pip install gigatoken fastokens`; `pip install tokenizers==1.0.0rc3` in one
of its own); each peer runs in the first that has it. Every figure is one fresh process pinned to its cores, cold: the first
half of the corpus, after 20 short documents. Systems take turns, `--repeats` times; so do the tokenizers of a corpus, since
their rates are compared with each other too. `.../2-cores` cases are wall clock: run them on an idle machine (`--threads 2`); "gain" is over one thread on one core, by turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

NEEDS = "corpora (bench/data/corpora.py) and tokenizer files; peers in environments of their own"
CORPORA = ("english", "code", "multilingual", "chat", "json")
PEERS = {"gigatoken": "gigatoken", "fastokens": "fastokens", "tokenizers-1.0": "tokenizers"}
"""System -> the distribution it comes from."""
LARGEST = 76_000_000


def half(path: Path) -> list[str]:
    """The first half of a corpus, of at most LARGEST bytes, in documents."""
    documents = path.read_bytes()[:LARGEST].split(b"\0")[:-1]
    return [document.decode() for document in documents[: len(documents) // 2]]


def encoder(system: str, tokenizer: Path, threads: int) -> Any:
    """A call that turns a file of documents (and those documents) into ids, and does not turn them into Python lists
    where the system can do without."""
    if system == "rft":
        from rft import _native

        ours = _native.Tokenizer(tokenizer.read_text(encoding="utf-8"))
        if not ours.engine[0]:
            raise SystemExit(f"falls back: {ours.engine[1]}")
        return lambda path, documents: ours.encode_file(path, 0, threads)
    if system == "gigatoken":
        import gigatoken

        giga = gigatoken.Tokenizer(str(tokenizer))
        return lambda path, documents: giga.encode_files(gigatoken.TextFileSource([str(path)], separator=b"\0"))
    if system == "fastokens":
        from fastokens._native import Tokenizer as Fast

        fast = Fast.from_file(str(tokenizer))
        return lambda path, documents: [e.ids for e in fast.encode_batch(documents, add_special_tokens=False)]
    from tokenizers import Tokenizer, __version__

    if int(__version__.split(".")[0]) < 1:
        raise SystemExit(f"tokenizers {__version__} is not 1.0")
    library = Tokenizer.from_file(str(tokenizer))
    return lambda path, documents: [e.ids_array for e in library.encode_batch(documents, add_special_tokens=False)]


def child(system: str, tokenizer: Path, corpus: Path, threads: int) -> None:
    import resource

    documents = half(corpus)
    size = sum(len(document.encode()) for document in documents) / 1e6
    with tempfile.TemporaryDirectory() as folder:
        short, path = Path(folder) / "short", Path(folder) / "text"
        short.write_bytes(b"\0".join([b"warm up"] * 20))
        path.write_bytes("\0".join(documents).encode())
        began = time.perf_counter()
        encode = encoder(system, tokenizer, threads)
        load = time.perf_counter() - began
        encode(short, ["warm up"] * 20)
        cpu, wall = time.process_time(), time.perf_counter()
        result = encode(path, documents)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        del result
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    print(json.dumps({"cpu": size / cpu, "wall": size / wall, "load": load, "peak": peak}))


def measure(python: str, system: str, tokenizer: Path, corpus: Path, threads: int) -> dict[str, float]:
    env = dict(os.environ, RAYON_NUM_THREADS=str(threads), OMP_NUM_THREADS=str(threads), TOKENIZERS_PARALLELISM="true")
    env["OPENBLAS_NUM_THREADS"] = "1"  # numpy's workers spin for 0.1 s after the import, on a core that is measured
    command = [python, __file__, "--child", system, str(tokenizer), str(corpus), str(threads)]
    cores = sorted(os.sched_getaffinity(0))[:threads]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, preexec_fn=lambda: os.sched_setaffinity(0, cores)
    )
    if done.returncode != 0:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1][:200])
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def pythons(given: list[str]) -> dict[str, str]:
    """System -> interpreter that has it."""
    found = {"rft": sys.executable}
    code = "import sys, importlib.metadata as m; print(m.version(sys.argv[1]))"
    for system, package in PEERS.items():
        for python in given:
            done = subprocess.run([python, "-c", code, package], capture_output=True, text=True)
            version = done.stdout.strip()
            if done.returncode == 0 and (system != "tokenizers-1.0" or version.startswith("1.")):
                found[system] = python
                break
    return found


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]), int(sys.argv[5]))
        return
    from results import Results

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpora", type=Path, required=True)
    parser.add_argument("--tokenizers", type=Path, required=True)
    parser.add_argument("--peers", nargs="*", default=[], metavar="PYTHON")
    parser.add_argument(
        "--tokenizer",
        nargs="*",
        default=["qwen3"],
        metavar="NAME[=FILE]",
        help="FILE: its name in the folder, else NAME",
    )
    parser.add_argument("--corpus", nargs="*", default=list(CORPORA))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--results", type=Path)
    args = parser.parse_args()
    systems = pythons(args.peers)
    results = Results(args.results)
    named = [name.partition("=")[::2] for name in args.tokenizer]
    found = {
        name: (args.tokenizers / (file or name) / "tokenizer.json", f"{file or name}.json") for name, file in named
    }
    files = {name: file if file.is_file() else args.tokenizers / short for name, (file, short) in found.items()}
    if missing := [f"{name}: no {file}" for name, file in files.items() if not file.is_file()]:
        parser.error("; ".join(missing))
    kind, suffix = ("cpu", "") if args.threads == 1 else ("wall", f"/{args.threads}-cores")
    for corpus in args.corpus:
        absent = {system: "no environment of --peers has it" for system in PEERS if system not in systems}
        errors = {name: dict(absent) for name in files}
        runs: dict[str, dict[str, list[dict[str, float]]]] = {name: {each: [] for each in systems} for name in files}
        alone: dict[str, list[dict[str, float]]] = {name: [] for name in files}
        for _ in range(args.repeats):
            for name, file in files.items():
                for system in systems:
                    if system in errors[name]:
                        continue
                    try:
                        text = args.corpora / f"{corpus}.txt"
                        runs[name][system].append(measure(systems[system], system, file, text, args.threads))
                        if system == "rft" and args.threads > 1:
                            alone[name].append(measure(systems[system], system, file, text, 1))
                    except RuntimeError as error:
                        errors[name][system] = str(error)
        for name in files:
            case = f"tokenize/{name}/{corpus}{suffix}"
            for system in ("rft", *PEERS):
                if system in errors[name]:
                    results.error(case, system, errors[name][system])
                    continue
                made = runs[name][system]
                results.add(case, system, "mb_per_second", [run[kind] for run in made])
                if system == "rft":
                    results.add(case, system, "load_seconds", [run["load"] for run in made])
                    results.add(case, system, "peak_rss_mib", [run["peak"] for run in made])
                    if alone[name]:
                        one, many = (statistics.median(run["wall"] for run in each) for each in (alone[name], made))
                        results.add(case, system, "gain", many / one)


if __name__ == "__main__":
    main()
