"""Runs benchmarks: `python bench/run.py` for all that need nothing, `--list` to see them, names to choose.

    python bench/run.py                                  every bench without needs, results into bench/results/
    python bench/run.py --list
    python bench/run.py cli/ease data/pack               these two
    python bench/run.py train/gsm8k -- --model DIR       what stands behind -- goes to the bench

A bench is a file in a folder beside this one: a docstring whose first line says what it measures, `--results FILE` as its
option, and, where it needs more than this machine and checkout, `NEEDS = "..."`, which keeps it out of a run of all.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
GROUPS = ("cli", "data", "kernels", "train")


@dataclass(frozen=True)
class Bench:
    """One file. needs: "" where it runs anywhere."""

    name: str
    path: Path
    about: str
    needs: str


def find() -> list[Bench]:
    """Every bench, read without importing it: some import torch or a peer."""
    return [
        _read(path) for group in GROUPS for path in sorted((HERE / group).glob("*.py")) if not path.name.startswith("_")
    ]


def _read(path: Path) -> Bench:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    about = (ast.get_docstring(tree) or "").splitlines()
    needs = next(
        (
            node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and node.targets[0].id == "NEEDS"
            and isinstance(node.value, ast.Constant)
        ),
        "",
    )
    return Bench(f"{path.parent.name}/{path.stem}", path, about[0] if about else "", str(needs))


def main() -> int:
    """Exit status 1 if any bench failed."""
    argv, _, passed_on = _split(sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="as in --list; a group takes all of it")
    parser.add_argument("--list", action="store_true", help="what there is")
    parser.add_argument("--results", type=Path, help="append result lines here (default bench/results/GROUP.jsonl)")
    args = parser.parse_args(argv)
    benches = find()
    if args.list:
        width = max((len(b.name) for b in benches), default=0)
        for bench in benches:
            print(f"{bench.name:{width}}  {bench.about}" + (f"  [needs {bench.needs}]" if bench.needs else ""))
        return 0
    unknown = [n for n in args.names if not any(n in (b.name, b.path.parent.name) for b in benches)]
    if unknown:
        parser.error(f"no bench {unknown[0]!r}; see --list")
    if args.names:
        chosen = [b for b in benches if {b.name, b.path.parent.name} & set(args.names)]
    else:
        chosen = [b for b in benches if not b.needs]
    failed = []
    for bench in chosen:
        results = args.results or HERE / "results" / f"{bench.path.parent.name}.jsonl"
        print(f"--- {bench.name}", flush=True)
        # -P: from here, bench/kernels and the checkout's kernels/ would hide packages of that name
        done = subprocess.run(
            [sys.executable, "-P", str(bench.path), "--results", str(results), *passed_on], check=False
        )
        if done.returncode:
            failed.append(bench.name)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def _split(argv: list[str]) -> tuple[list[str], str, list[str]]:
    at = argv.index("--") if "--" in argv else len(argv)
    return argv[:at], "--", argv[at + 1 :]


if __name__ == "__main__":
    sys.exit(main())
