"""The launcher: one message for a failure, no process left behind, signals passed on once."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from rft import launch
from rft.training import signals

WORKER = """
    import os, signal, sys, time
    from pathlib import Path
    from rft.errors import ConfigError, Stopped
    from rft.launch import launch

    case, folder = sys.argv[1], Path(sys.argv[2])
    rank = int(os.environ["RANK"])
    print("noise of rank", rank, flush=True)

    def listen():
        from rft.training.signals import Signals
        return Signals(timeout_seconds=2.0).install()

    def work():
        ready = folder / f"{rank}.{os.getpid()}"
        if case == "done":
            return 0
        if case == "config error on all":
            time.sleep(0.3 * rank)
            raise ConfigError("chat.toml", "is wrong", wanted="right", do="mend it")
        if case == "bug on rank 1":
            if rank == 1:
                raise ValueError("the real fault")
            time.sleep(1)
            raise RuntimeError("Connection closed by peer")
        if case == "killed" and rank == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        if case == "one fails, one hangs" and rank == 1:
            raise ConfigError("rank", "one is wrong")
        if case == "steps":
            ours = listen()
            ready.touch()
            while ours.received is None:
                time.sleep(0.01)
            time.sleep(0.3)
            raise Stopped("stop", f"{ours.received.name} arrived: saved step-7", exit_code=128 + ours.received)
        if case == "never saves":
            ours = listen()
        ready.touch()
        time.sleep(600)

    sys.exit(launch(work, [], worker=sys.argv[4]))
"""

PARENT = """
    import sys
    from rft import launch
    from rft.errors import RftError
    launch.GRACE_SECONDS = 1.0
    try:
        sys.exit(launch.Launcher(sys.argv[2:], 2, program=(sys.executable, "-P", sys.argv[1])).run())
    except RftError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
"""


class Job:
    """A launcher with two workers, in a process group of its own."""

    def __init__(self, folder: Path, case: str):
        self.folder = folder
        for name, text in (("worker.py", WORKER), ("parent.py", PARENT)):
            (folder / name).write_text(textwrap.dedent(text))
        command = [sys.executable, "-P", str(folder / "parent.py"), str(folder / "worker.py"), case, str(folder)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    def workers(self) -> list[int]:
        """Process ids, once both are at work."""
        until = time.monotonic() + 30
        while len(found := list(self.folder.glob("[01].*"))) < 2:
            assert time.monotonic() < until, "the workers never came"
            time.sleep(0.02)
        return [int(path.suffix[1:]) for path in found]

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err


@pytest.fixture
def start(tmp_path):
    jobs: list[Job] = []

    def begin(case: str) -> Job:
        jobs.append(Job(tmp_path, case))
        return jobs[-1]

    yield begin
    for job in jobs:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.process.pid, signal.SIGKILL)
        job.process.wait()


def gone(pid: int, seconds: float = 5.0) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.02)
    return False


def test_two_workers_that_are_done_give_exit_code_0_and_only_rank_0_is_heard(start):
    code, out, err = start("done").end()
    assert (code, out, err) == (0, "noise of rank 0\n", "")


def test_an_error_that_every_rank_meets_is_told_once_with_its_exit_code(start):
    code, _, err = start("config error on all").end()
    assert (code, err) == (2, "chat.toml: is wrong\nwanted: right\ndo: mend it\n")


def test_the_rank_that_failed_is_told_and_not_those_that_lost_it(start):
    code, _, err = start("bug on rank 1").end()
    assert code == 1
    assert err.startswith("rank 1: ValueError: the real fault\n")
    assert "closed by peer" not in err


def test_a_rank_that_dies_without_a_word_ends_the_run_with_its_output(start):
    code, _, err = start("killed").end()
    assert code == 1
    assert "rank 1: the process was ended by SIGSEGV without a word" in err
    assert "noise of rank 1" in err


def test_a_rank_that_hangs_after_another_failed_is_killed(start):
    job = start("one fails, one hangs")
    code, _, err = job.end()
    assert (code, err) == (2, "rank: one is wrong\n")
    assert all(gone(int(path.suffix[1:])) for path in job.folder.glob("[01].*"))


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("whole_group", [False, True], ids=["launcher only", "whole process group"])
def test_a_signal_stops_every_rank_once_and_the_exit_code_says_which(start, number, expected, whole_group):
    job = start("steps")
    pids = job.workers()
    if whole_group:  # as a terminal does, and `timeout`: workers must not count it, nor the launcher twice
        os.killpg(job.process.pid, number)
    else:
        job.process.send_signal(number)
    code, _, err = job.end()
    assert (code, err) == (expected, f"stop: {number.name} arrived: saved step-7\n")
    assert all(gone(pid) for pid in pids)


def test_a_second_signal_ends_everything_at_once(start):
    job = start("never saves")
    pids = job.workers()
    job.process.send_signal(signal.SIGTERM)
    time.sleep(0.7)
    begun = time.monotonic()
    job.process.send_signal(signal.SIGTERM)
    code, _, err = job.end()
    assert code == 1
    assert "a second signal arrived: stopped at once" in err
    assert time.monotonic() - begun < 1.0
    assert all(gone(pid) for pid in pids)


def test_a_save_that_outlasts_the_timeout_ends_with_exit_code_1(start):
    job = start("never saves")
    job.workers()
    begun = time.monotonic()
    job.process.send_signal(signal.SIGINT)
    code, out, err = job.end()
    assert code == 1
    assert 1.5 < time.monotonic() - begun < 8
    assert "could not be saved within 2 s of the signal" in out + err


def test_workers_die_with_a_launcher_that_is_killed(start):
    job = start("hang")
    pids = job.workers()
    job.process.kill()
    assert all(gone(pid) for pid in pids)


def test_the_launcher_and_the_workers_agree_on_the_forwarded_signals():
    assert launch.FORWARDED == signals.FORWARDED
    assert launch.REPEAT_SECONDS == signals.REPEAT_SECONDS


def test_one_process_runs_the_work_itself(monkeypatch):
    monkeypatch.setattr(launch, "visible_gpus", lambda: 1)
    monkeypatch.delenv("RANK", raising=False)
    assert launch.launch(lambda: os.getpid(), []) == os.getpid()


def report(rank: int, when: float, kind: str, problem: str) -> dict:
    fields = {"where": "", "problem": problem, "wanted": "", "do": "", "exit_code": 1, "others": []}
    return {"rank": rank, "time": when, "kind": kind, "traceback": problem, **fields}


def test_of_several_errors_the_one_that_the_others_follow_from_is_told():
    lost = report(0, 1.0, "", "RuntimeError: Connection closed by peer [127.0.0.1]")
    other = report(3, 1.0, "CheckpointError", "another rank could not write its part")
    bug = report(1, 2.0, "", "ValueError: the real fault")
    named = report(2, 2.5, "DataError", "the store of another set is broken")
    stopped = report(4, 0.5, "Stopped", "SIGTERM arrived")
    assert "the store" in launch.first_error([lost, other, bug, named, stopped]).problem
    assert "the real fault" in launch.first_error([lost, other, bug, stopped]).problem
    assert "another rank" in launch.first_error([other, stopped]).problem
    assert "SIGTERM" in launch.first_error([stopped]).problem
