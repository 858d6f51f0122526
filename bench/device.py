"""Everything a GPU machine has to prove, in one command: GPU tests of chosen folders, then chosen benches, all output kept.

    python bench/device.py --out DIR --tests tests/kernels --bench kernels/linear_cross_entropy kernels/swiglu
    python bench/device.py --out DIR --all --seconds 570                  what a GPU has to show, in order of importance
    python bench/device.py --out DIR --all --from 7 --seconds 570         go on where the last call's time ran out (it says where)
    python bench/device.py --out DIR --all --tiny                         does every line run: on a CPU, with tiny shapes

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
from typing import Literal, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LEAST_SECONDS = 20
"""Of time left with which a part is still begun."""


class Part(NamedTuple):
    """One item of `--all`: tests (a pytest path, with options) or a bench, and the seconds that it may take."""

    kind: Literal["tests", "bench"]
    what: str
    seconds: float
    tiny: str | None = None
    """What takes its place on a CPU; None: left out there."""


def _step(options: str, seconds: float) -> Part:
    return Part("bench", f"train/step {options}", seconds, f"train/step --tiny {options}")


PARTS: tuple[Part, ...] = (
    Part("tests", "tests/models/test_kernel_swaps_gpu.py", 150, "tests/models/test_kernel_swaps.py -k llama"),
    Part("tests", "tests/kernels/test_lora_linear.py tests/kernels/test_lora_swiglu.py tests/kernels/test_fp8.py tests/kernels/test_dropout.py", 150,
         "tests/kernels/test_lora_linear.py -k single"),
    Part("tests", "tests/models/test_attention_gpu.py", 120),
    _step("--systems rft --profile --cases lora-bf16/doc-8192", 120),
    _step("--systems rft --profile --cases lora-fp8/doc-8192", 120),
    _step("--systems rft --profile --cases llama-1b/full-bf16/doc-8192", 120),
    _step("--systems rft --profile --cases lora-bf16/packed-400 lora-fp8/packed-400", 200),
    Part("tests", "tests/training/test_step_gpu.py tests/training/test_resume_gpu.py", 120),
    _step("--cases lora-bf16/doc-8192 lora-fp8/doc-8192", 330),
    _step("--cases lora-bf16/packed-400 lora-fp8/packed-400", 330),
    _step("--systems rft liger --cases llama-1b/full-bf16/doc-8192", 150),
    Part("bench", "train/fp8_curve {fp8_curve}", 240, "train/fp8_curve --tiny"),
    _step("--cases lora-bf16/doc-8192-default-settings lora-fp8/doc-8192-default-settings", 330),
    _step("--cases lora-bf16/packed-400-default-settings lora-fp8/packed-400-default-settings", 330),
    Part("tests", "tests/memory tests/quant tests/optim", 90),
    Part("bench", "train/memory --seconds 500", 520, "train/memory --tiny --systems rft --only rft-nf4"),
    _step("--systems rft --cuda-graph --cases lora-bf16/packed-400 lora-fp8/packed-400", 120)._replace(tiny=None),
    Part("bench", "train/plan --calibrated --seconds 400", 420, "train/plan --tiny --only 8b-lora-8k-full qlora-2k"),
    Part("bench", "train/offload --cases cpu", 180, "train/offload --tiny --cases cpu"),
    Part("bench", "train/long --tokens 500000 --offload cpu --host-gib 72 --keep-gib 55 --tiles 32", 600, "train/long --tiny"),
    Part("bench", "kernels/nf4", 60),
    Part("bench", "kernels/linear_cross_entropy", 120),
    Part("bench", "kernels/swiglu", 60),
    Part("bench", "kernels/rms_norm", 60),
    Part("bench", "kernels/rope", 60),
    Part("bench", "kernels/lora", 60),
    Part("tests", "tests/kernels", 240),
    Part("bench", "train/parity {parity}", 300),
    Part("bench", "train/first_loss {first_loss}", 120, "train/first_loss --tiny"),
    Part("tests", "tests/parallel/test_nccl.py", 240),
    Part("bench", "train/scaling --parts nccl parity killed speed checkpoint", 560, "train/scaling --tiny --parts parity"),
)  # fmt: skip
"""In order of importance: is it right, how fast is it and where does the time go, then each case beside its peers in one run. `{name}` stands
for the value of --name; without one the part is left out."""


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

    def run(self, name: str, command: list[str], seconds: float | None = None) -> bool:
        """One part; its output goes to the terminal and to log.txt as it comes. False: there was no time left to begin it."""
        limit = min(self.part_seconds if seconds is None else seconds, self.end - time.monotonic())
        if limit <= LEAST_SECONDS:
            self._note(f"{name}: not started, no time left", failed=True)
            return False
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
        return True

    def note(self, text: str) -> None:
        """A line of the summary."""
        self._note(text, failed=False)

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
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "out", help="folder for everything that is kept")
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
    parser.add_argument(
        "--all", action="store_true", help="every part that a GPU has to show, in order, each within its own limit"
    )
    parser.add_argument("--from", type=int, default=0, dest="first", help="number of the first part of --all")
    parser.add_argument("--list", action="store_true", help="show the parts of --all")
    parser.add_argument("--tiny", action="store_true", help="--all on a CPU with tiny shapes")
    parser.add_argument("--parity", help="options of train/parity: '--model DIR --train FILE'")
    parser.add_argument("--first-loss", help="options of train/first_loss: '--tokenizer DIR --train FILE'")
    parser.add_argument("--fp8-curve", help="options of train/fp8_curve: '--model DIR --train FILE --eval FILE'")
    parser.add_argument("--commit", help="commit to name where the machine has no repository")
    return parser.parse_args()


def pytest_command(tests: str, args: argparse.Namespace, out: Path, marks: str | None = None) -> list[str]:
    """pytest over paths, with options behind them."""
    paths = shlex.split(tests)
    name = "-".join(p.strip("/").replace("/", "-").removesuffix(".py") for p in paths[:1])
    command = [
        sys.executable, "-P", "-m", "pytest", *paths, "-m", marks or args.marks, "-q", "-p", "no:cacheprovider", "--durations=8",
        f"--junitxml={out}/junit-{name}.xml",
    ]  # fmt: skip
    if all(p.startswith(("tests/kernels", "-")) for p in paths) and any(
        paths[0].strip("/").startswith(f) for f in ALONE
    ):
        command.append(f"--confcutdir={paths[0] if Path(ROOT, paths[0]).is_dir() else Path(paths[0]).parent}")
    if args.workers:
        command += ["-n", str(args.workers)]
    return command


def bench_command(bench: str, out: Path) -> list[str]:
    name, *options = shlex.split(bench)
    return [
        sys.executable, "-P", str(ROOT / "bench" / f"{name}.py"), "--results", str(out / "results.jsonl"), *options
    ]  # fmt: skip


def run_all(runner: Runner, args: argparse.Namespace, out: Path) -> None:
    """The parts in order. Says with which to go on where time ran out."""
    given = {"parity": args.parity, "first_loss": args.first_loss, "fp8_curve": args.fp8_curve}
    for number, part in enumerate(PARTS):
        what = part.tiny if args.tiny else part.what
        if number < args.first or what is None:
            continue
        missing = [n for n, value in given.items() if "{" + n + "}" in what and not value]
        if missing:
            runner.note(f"{what}: left out, no --{missing[0].replace('_', '-')}")
            continue
        if "nccl" in what and len(list(Path("/dev").glob("nvidia[0-9]*"))) < 2:
            runner.note(f"{what}: left out, needs two GPUs")
            continue
        what = what.format(**given)
        name = f"[{number}] {what}"
        if part.kind == "tests":
            marks = "not gpu and not slow" if args.tiny else "multi_gpu" if "nccl" in what else "gpu"
            command = pytest_command(what, args, out, marks)
        else:
            command = bench_command(what, out)
        if not runner.run(name, command, part.seconds):
            runner.note(f"go on with: --all --from {number}")
            return


def main() -> int:
    args = arguments()
    if args.list:
        for number, part in enumerate(PARTS):
            print(f"{number:3}  {part.seconds:4.0f} s  {part.kind:5}  {part.what}")
        return 0
    out: Path = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    site = install(args.wheels)
    paths = [str(ROOT / "python"), *([str(site)] if site else []), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in paths if p), "PYTHONUNBUFFERED": "1"}
    runner = Runner(out, environment, args.seconds, args.part_seconds)
    if args.all:
        run_all(runner, args, out)
    for tests in args.tests:
        runner.run(tests, pytest_command(tests, args, out))
    for bench in args.bench:
        runner.run(bench, bench_command(bench, out))
    if args.commit:
        stamp_commit(out / "results.jsonl", args.commit)
    print("\n".join(["=== summary", *runner.summary]), flush=True)
    return int(runner.failed)


if __name__ == "__main__":
    sys.exit(main())
