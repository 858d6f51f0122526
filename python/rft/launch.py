"""One process per GPU: start the workers, pass signals on, end all when one fails, and tell the first real error once.

Under torchrun, Slurm or Ray Train (RANK and WORLD_SIZE are set) this process is a worker already. With one GPU or none
the work runs in this process. Nothing heavy is imported here.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rft import errors, log
from rft.errors import RftError, Stopped
from rft.ranks import launched, read_ranks

GRACE_SECONDS = 10.0  # after one rank failed, until the others are killed: they may be writing down the real error
KNOWN_GRACE_SECONDS = 2.0  # where the one that failed has named its error, there is less to wait for
POLL_SECONDS = 0.05
# As in rft.training.signals, which imports too much for a launcher; a test holds the two together.
FORWARDED = {signal.SIGTERM: signal.SIGUSR1, signal.SIGINT: signal.SIGUSR2}
REPEAT_SECONDS = 0.5
_LOST_PEER = re.compile(
    r"(closed|reset) by peer|connection refused|gloo|nccl|broken pipe|TCPStore|socket", re.IGNORECASE
)


def launch(
    work: Callable[[], int | None], argv: Sequence[str], *, cpu_ranks: int | None = None, worker: str | None = None
) -> int:
    """Run `work` here or in one worker per visible GPU; returns the exit code.

    argv: the command line behind `rft`, for the workers. cpu_ranks: that many processes on the CPU (tests).
    worker: what the launcher gave its worker. Raises the RftError of `work`, of whichever process it came from.
    """
    if worker is not None:
        return _as_launched_worker(work, worker)
    if launched():
        return _as_foreign_worker(work)
    if cpu_ranks is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    count = cpu_ranks if cpu_ranks is not None else visible_gpus()
    return Launcher(argv, count).run() if count > 1 else int(work() or 0)


def visible_gpus() -> int:
    """GPUs that CUDA would show this process, without starting CUDA. More than one only if torch can use them."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        count = ctypes.c_uint(0)
        if nvml.nvmlInit_v2() != 0 or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return 0
    except (OSError, AttributeError):
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if count.value < 2 or (visible is not None and "," not in visible):
        return min(count.value, 1 if visible != "" else 0)
    import torch  # several GPUs: a second and a half to be sure that the workers can use them

    return torch.cuda.device_count()


# ---- the launcher


@dataclass
class _Worker:
    rank: int
    process: subprocess.Popen[bytes]
    output: Path | None
    """What it printed; rank 0 writes to the terminal itself."""


class Launcher:
    """The parent of the workers. It holds no GPU and computes nothing."""

    # -P: from a checkout's root our kernels/ folder would hide the package of that name.
    PROGRAM = (sys.executable, "-P", "-m", "rft")

    def __init__(self, argv: Sequence[str], count: int, program: Sequence[str] = PROGRAM):
        self.command, self.count = [*program, *argv], count
        self.folder = Path(tempfile.mkdtemp(prefix="rft-launch-"))
        self.workers: list[_Worker] = []
        self.received: signal.Signals | None = None
        self._received_at = 0.0
        self._kill_now = False
        self._killed: set[int] = set()

    def run(self) -> int:
        """Start the workers and wait for all of them; returns the exit code or raises the first worker's error."""
        old = {number: signal.signal(number, self._on_signal) for number in FORWARDED}
        try:
            self._start()
            codes = self._wait()
            return self._result(codes)
        finally:
            self._kill()
            for number, handler in old.items():
                # Once stopping, a further signal must not change the exit code on the way out.
                signal.signal(number, handler if self.received is None else signal.SIG_IGN)
            shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self) -> None:
        port = free_port()
        threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, len(os.sched_getaffinity(0)) // self.count))
        for rank in range(self.count):
            env = {
                **os.environ,
                "RANK": str(rank), "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.count), "LOCAL_WORLD_SIZE": str(self.count),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": threads,
            }  # fmt: skip
            command = [*self.command, "--worker", f"{os.getpid()}:{self.folder}"]
            output = None if rank == 0 else self.folder / f"rank-{rank}.log"
            with contextlib.ExitStack() as stack:
                streams: dict[str, Any] = {}
                if output is not None:
                    file = stack.enter_context(open(output, "wb"))
                    streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
                self.workers.append(_Worker(rank, subprocess.Popen(command, env=env, **streams), output))

    def _on_signal(self, number: int, _frame: Any) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._received_at = signal.Signals(number), now
            for worker in self.workers:
                with contextlib.suppress(ProcessLookupError):
                    worker.process.send_signal(FORWARDED[self.received])
        elif now - self._received_at > REPEAT_SECONDS:
            self._kill_now = True

    def _wait(self) -> list[int]:
        """Exit codes by rank. One failure gives the others GRACE_SECONDS; a second signal ends all at once."""
        failed_at: float | None = None
        while None in (codes := [worker.process.poll() for worker in self.workers]):
            if self._kill_now:
                self._kill()
                raise Stopped(
                    "stop",
                    "a second signal arrived: stopped at once; the last complete checkpoint is as it was",
                    exit_code=1,
                )
            if failed_at is None and any(codes):
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() - failed_at > self._grace():
                self._kill()
            time.sleep(POLL_SECONDS)
        return [worker.process.returncode for worker in self.workers]

    def _grace(self) -> float:
        reports = (read_report(self.folder, rank) for rank in range(self.count))
        named = any(report is not None and report["kind"] not in ("", "Stopped") for report in reports)
        return min(GRACE_SECONDS, KNOWN_GRACE_SECONDS if named else GRACE_SECONDS)

    def _kill(self) -> None:
        for worker in self.workers:
            if worker.process.poll() is None:
                self._killed.add(worker.rank)
                worker.process.kill()
        for worker in self.workers:
            worker.process.wait()

    def _result(self, codes: list[int]) -> int:
        if not any(codes):
            return 0
        reports = [report for rank in range(self.count) if (report := read_report(self.folder, rank)) is not None]
        reported = {report["rank"] for report in reports}
        silent = [rank for rank, code in enumerate(codes) if code and rank not in self._killed | reported]
        if reports and not (silent and all(lost_a_peer(report) for report in reports)):
            raise first_error(reports)
        if self.received is not None:
            if codes[0] == 1:  # it has said why: the save took too long
                return 1
            raise Stopped(
                "",
                f"by {self.received.name}, before the first step: nothing to save",
                exit_code=128 + self.received,
            )
        rank = silent[0] if silent else next(rank for rank, code in enumerate(codes) if code)
        raise self._silent_death(rank, codes[rank])

    def _silent_death(self, rank: int, code: int) -> RftError:
        """A worker wrote no error down: it was killed, or crashed in native code."""
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        output = self.workers[rank].output
        tail = (
            output.read_text(errors="replace").strip().splitlines()[-8:]
            if output is not None and output.exists()
            else []
        )
        return errors.TrainingError(
            f"rank {rank}",
            "\n".join([f"the process {how} without a word, and the other ranks were stopped", *tail]),
            do="if it was SIGKILL, memory of the machine ran out: see `dmesg`; start the same command again to go on from the "
            "last complete checkpoint",
        )


def free_port() -> int:
    """A TCP port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ---- a worker


def _as_launched_worker(work: Callable[[], int | None], worker: str) -> int:
    launcher, _, folder = worker.partition(":")
    die_with(int(launcher))
    for number, forward in FORWARDED.items():
        signal.signal(number, signal.SIG_IGN)  # a terminal sends to the whole group: only the launcher counts
        signal.signal(forward, signal.SIG_DFL)  # until training listens, there is nothing to save
    rank = int(os.environ["RANK"])
    log.set_rank(rank)
    try:
        code = int(work() or 0)
        if "torch.distributed" in sys.modules:
            from rft.parallel.mesh import leave_world

            leave_world()
    except BaseException as error:
        report = describe(error, rank)
        code = report["exit_code"]
        if code:
            with contextlib.suppress(OSError):
                write_report(Path(folder), report)
    # Not through the interpreter's end: threads of a broken collective can hold it up, and after DCP's safetensors writer
    # it once aborted there (hooks.md 7), which would make a failure of a finished run.
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _as_foreign_worker(work: Callable[[], int | None]) -> int:
    """Under torchrun or the like: of errors that all ranks meet, the first to get here speaks; the others only end."""
    ranks = read_ranks()
    log.set_rank(ranks.rank)
    if ranks.world_size > 1:
        signal.signal(
            signal.SIGTERM, signal.SIG_DFL
        )  # until training listens: a collective would not let Python hear it
    try:
        return int(work() or 0)
    except RftError as error:
        if _first_to_fail():
            raise
        return error.exit_code


def _first_to_fail() -> bool:
    """Whether no other rank has told an error, by the store where the ranks met. True where it cannot be asked."""
    try:
        from datetime import timedelta

        from torch.distributed import TCPStore

        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=3), wait_for_workers=False)
        return store.add("rft/errors", 1) == 1
    except Exception:
        return True


def die_with(launcher: int) -> None:
    """Let the system kill this process when its launcher is gone, however it went (Linux)."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher:  # gone before the line above
        os._exit(1)


# ---- errors between processes, as JSON


def describe(error: BaseException, rank: int) -> dict[str, Any]:
    """What a worker writes down about its end."""
    common = {"rank": rank, "time": time.time(), "traceback": "".join(traceback.format_exception(error))}
    if isinstance(error, RftError):
        fields = {name: getattr(error, name) for name in ("where", "problem", "wanted", "do", "exit_code")}
        others = [describe(other, rank) for other in error.others]
        return {"kind": type(error).__name__, **fields, "others": others, **common}
    code = 1
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    return {"kind": "", "problem": f"{type(error).__name__}: {error}", "exit_code": code, **common}


def write_report(folder: Path, report: dict[str, Any]) -> None:
    path = folder / f"error-{report['rank']}.json"
    temporary = path.with_suffix(".writing")
    temporary.write_text(json.dumps(report))
    os.replace(temporary, path)


def read_report(folder: Path, rank: int) -> dict[str, Any] | None:
    """What that rank wrote down, if it ended with an error and came to it."""
    try:
        return json.loads((folder / f"error-{rank}.json").read_text())
    except (OSError, ValueError):
        return None


def lost_a_peer(report: dict[str, Any]) -> bool:
    """Whether it only tells that another rank is gone."""
    return (
        bool(_LOST_PEER.search(report["problem"]))
        if not report["kind"]
        else report["problem"].startswith("another rank")
    )


def first_error(reports: list[dict[str, Any]]) -> RftError:
    """The error that the others follow from: one that we name, else the earliest that does not only tell of a lost peer."""
    stopped = [report for report in reports if report["kind"] == "Stopped"]

    def order(report: dict[str, Any]) -> tuple[int, float]:
        known = bool(report["kind"]) and report["kind"] != "Stopped"
        return (2 if report in stopped else 1 if lost_a_peer(report) else 0), report["time"] - (1.0 if known else 0.0)

    report = min(reports, key=order)
    if report["kind"]:
        return _rebuild(report)
    log.detail("traceback", report["traceback"])
    last = report["traceback"].strip().splitlines()[-12:]
    return errors.TrainingError(
        f"rank {report['rank']}",
        report["problem"] + "\n" + "\n".join(last),
        do="this looks like a fault of rft: run again with -v and report it; the last complete checkpoint is as it was",
    )


def _rebuild(report: dict[str, Any]) -> RftError:
    kind = getattr(errors, report["kind"])
    more = {"exit_code": report["exit_code"]} if kind is Stopped else {}
    error = kind(report["where"], report["problem"], wanted=report["wanted"], do=report["do"], **more)
    error.others = tuple(_rebuild(other) for other in report["others"])
    return error
