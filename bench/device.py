"""Everything a GPU machine has to prove, in one command: GPU tests of chosen folders, then chosen benches, all output kept.

    python bench/device.py --out DIR --tests tests/kernels --bench kernels/linear_cross_entropy kernels/swiglu
    python bench/device.py --out DIR --bench "train/llama --model 8b" --part-seconds 240 --seconds 560

Into DIR: results.jsonl (format of bench/results.py), one junit-*.xml a test folder, log.txt, summary.txt. Each part runs in a process
of its own and is stopped at its limit, and all of it at `--seconds`, so that what was measured before comes back. Wheels of peers
in `--wheels` are installed beside the machine's packages for this run alone. Status 1 if a part failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ALONE = {"tests/kernels"}
"""Folders whose tests import the kernels and nothing else of rft: no conftest above them is read."""


def install(wheels: Path) -> Path | None:
    """The wheels of a folder in a folder of their own, for PYTHONPATH."""
    files = sorted(str(f) for f in wheels.glob("*.whl"))
    if not files:
        return None
    target = Path(tempfile.mkdtemp(prefix="site-"))
    options = [
        "--quiet",
        "--no-index",
        "--no-deps",
        "--no-compile",
        "--no-cache-dir",
        "--upgrade",
        "--target",
        str(target),
    ]
    for file in files:  # one that does not fit this machine does not keep out the others
        if subprocess.run([sys.executable, "-m", "pip", "install", *options, file], check=False).returncode:
            print(f"not installed: {file}", flush=True)
    return target


class Runner:
    """Runs parts one after another within the limits and keeps their output."""

    def __init__(self, out: Path, environment: dict[str, str], seconds: float, part_seconds: float) -> None:
        self.out, self.environment, self.part_seconds = out, environment, part_seconds
        self.end = time.monotonic() + seconds
        self.summary: list[str] = []
        self.failed = False

    def run(self, name: str, command: list[str]) -> None:
        """One part; its output goes to the terminal and to log.txt as it comes."""
        limit = min(self.part_seconds, self.end - time.monotonic())
        if limit <= 5:
            self._note(f"{name}: not started, no time left", failed=True)
            return
        start = time.monotonic()
        print(f"=== {name} (at most {limit:.0f} s): {shlex.join(command)}", flush=True)
        with open(self.out / "log.txt", "a", encoding="utf-8") as log:
            log.write(f"=== {name}: {shlex.join(command)}\n")
            process = subprocess.Popen(
                command, cwd=ROOT, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                errors="replace", start_new_session=True,
            )  # fmt: skip
            timer = threading.Timer(limit, os.killpg, (process.pid, signal.SIGKILL))
            timer.start()
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                log.write(line)
            status = process.wait()
            timer.cancel()
        taken = time.monotonic() - start
        how = "ok" if status == 0 else "stopped at its limit" if status == -signal.SIGKILL else f"status {status}"
        self._note(f"{name}: {how}, {taken:.0f} s", failed=status != 0)

    def _note(self, text: str, *, failed: bool) -> None:
        self.failed |= failed
        self.summary.append(text)
        (self.out / "summary.txt").write_text("\n".join(self.summary) + "\n", encoding="utf-8")


def stamp_commit(results: Path, commit: str) -> None:
    """Name the commit in lines that were written where no repository is."""
    if not results.exists():
        return
    lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        if line.get("commit") == "unknown":
            line["commit"] = commit
    results.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for everything that is kept")
    parser.add_argument("--tests", nargs="*", default=[], help="folders or files of tests")
    parser.add_argument("--marks", default="gpu", help="pytest -m (default gpu)")
    parser.add_argument("--workers", type=int, default=0, help="processes of pytest-xdist (default none)")
    parser.add_argument(
        "--bench",
        nargs="*",
        default=[],
        help='names as in bench/run.py --list, with their options: "kernels/tune --parts rows"',
    )
    parser.add_argument("--seconds", type=float, default=570, help="limit for all of it")
    parser.add_argument("--part-seconds", type=float, default=300, help="limit for one part")
    parser.add_argument(
        "--wheels", type=Path, default=ROOT / ".carry", help="wheels of peers (default .carry, which git ignores)"
    )
    parser.add_argument("--commit", help="commit to name where the machine has no repository")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    out: Path = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    site = install(args.wheels)
    paths = [str(ROOT / "python"), *([str(site)] if site else []), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in paths if p), "PYTHONUNBUFFERED": "1"}
    runner = Runner(out, environment, args.seconds, args.part_seconds)
    python = [sys.executable, "-P"]
    for tests in args.tests:
        name = tests.strip("/").replace("/", "-").removesuffix(".py")
        command = [
            *python,
            "-m",
            "pytest",
            tests,
            "-m",
            args.marks,
            "-q",
            "-p",
            "no:cacheprovider",
            "--durations=8",
            f"--junitxml={out}/junit-{name}.xml",
        ]
        if any(tests.strip("/").startswith(folder) for folder in ALONE):
            command.append(f"--confcutdir={tests if Path(ROOT, tests).is_dir() else Path(tests).parent}")
        if args.workers:
            command += ["-n", str(args.workers)]
        runner.run(tests, command)
    for bench in args.bench:
        name, *options = shlex.split(bench)
        runner.run(
            bench, [*python, str(ROOT / "bench" / f"{name}.py"), "--results", str(out / "results.jsonl"), *options]
        )
    if args.commit:
        stamp_commit(out / "results.jsonl", args.commit)
    print("\n".join(["=== summary", *runner.summary]), flush=True)
    return int(runner.failed)


if __name__ == "__main__":
    sys.exit(main())
