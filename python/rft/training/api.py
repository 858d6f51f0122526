"""`rft.train` and the body of `rft train`: from a config to a result, in this process or as one worker of several."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from rft import log
from rft.checkpoint.load import Checkpoint, open_checkpoint
from rft.config.load import load_config
from rft.config.root import Config
from rft.errors import RftError, TrainingError, system_reason
from rft.parallel.collectives import broadcast_json
from rft.parallel.mesh import World, join_world, leave_world
from rft.training import headline
from rft.training.job import Job
from rft.training.known import remember
from rft.training.loop import train as train_run
from rft.training.memory_modes import leave_no_folder
from rft.training.replan import ran_out
from rft.training.result import Result
from rft.training.resume import LOG, RunLock, Start, begin, take_run_dir
from rft.training.run import Run
from rft.training.rundir import write_run_files
from rft.training.setup import add_data, build_loaders, build_run, inspect_job
from rft.training.state import check_same_plan
from rft.training.trainee import Trainee

PAGE = "report.html"
Report = Callable[[Path], object]
"""Writes a page about a run directory. Given from above: the report knows training's files, training knows no report."""


def train(
    config: str | Path | dict[str, Any] | Config,
    *,
    rows: Iterable[dict[str, Any]] | None = None,
    report: Report | None = None,
) -> Result:
    """Train as the command does; see `rft.train`."""
    checked = load_config(config, rows=rows is not None)
    with log.capture_noise():
        return train_config(checked, rows=rows, report=report)


def train_config(
    config: Config,
    *,
    new: bool = False,
    config_path: Path | None = None,
    rows: Iterable[dict[str, Any]] | None = None,
    device: str | None = None,
    report: Report | None = None,
) -> Result:
    """Train a checked config on this rank and return what came of it; the same result on every rank.

    new: in the next free run directory. config_path: for the words that say how to run it again. device: "cpu" or "cuda".
    report: called with the run directory at the end of a finished run, on the first rank.
    Raises RftError kinds; Stopped after a signal.
    """
    world = join_world(device)
    log.set_rank(world.rank)
    assert config.train.out is not None, "load_config() fills in train.out"
    lock: RunLock | None = None
    try:
        if world.rank == 0:
            lock = take_run_dir(Path(config.train.out), new=new)
            log.open_run_log(lock.run_dir / LOG)
        run_dir = Path(broadcast_json(str(lock.run_dir) if lock else None, world.group))
        with _memory_is_told(world):
            return _train_in(config, world, run_dir, rows, config_path, report)
    except (RftError, OSError, KeyboardInterrupt) as error:
        log.record("error", str(error))
        log.close_run_log()
        if lock is not None:
            lock.undo()
        raise
    finally:
        log.close_run_log()
        if lock is not None:
            lock.release()
        leave_world()


@contextlib.contextmanager
def _memory_is_told(world: World) -> Iterator[None]:
    """Memory that ran out, as an error that says what to do. torch raises a plain RuntimeError for the machine's own."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise
        raise TrainingError(
            "memory of the GPU" if world.device.type == "cuda" else "memory of this machine",
            f"ran out: {' '.join(str(error).split())[:240]}",
            do="lower train.micro_batch or data.seq_len, or train an adapter instead of all weights; the same command goes "
            "on from the last checkpoint",
        ) from error


def _train_in(
    config: Config,
    world: World,
    run_dir: Path,
    rows: Iterable[dict[str, Any]] | None,
    config_path: Path | None,
    report: Report | None,
) -> Result:
    began = time.perf_counter()
    job = inspect_job(config, world)
    if world.rank == 0:
        remember(config, world.world_size, job.known)
    headline.tell_machine(job.machine)
    headline.tell_model(job)
    add_data(job, rows)
    headline.tell_decisions(job.decisions)
    start = begin_on_all(job, run_dir)
    for note in start.notes:
        log.say("resume", note)
    if start.kind == "finished":
        if start.checkpoint is not None:
            check_same_plan(run_dir, build_loaders(job)[0], start.checkpoint)
        return already_finished(run_dir, config_path, report if world.rank == 0 else None)
    try:
        run, result = _build_and_train(job, run_dir, start.checkpoint)
    finally:
        leave_no_folder(job.config, run_dir)
    if run.is_main and report is not None:
        write_page(report, run_dir)
    headline.tell_end(run, time.perf_counter() - began)
    return result


def _build_and_train(job: Job, run_dir: Path, checkpoint: Checkpoint | None) -> tuple[Run, Result]:
    run = build_run(job, run_dir, checkpoint)
    if run.is_main:
        write_run_files(run)
        headline.tell_run(run)
    assert run.signals is not None
    run.signals.install()
    try:
        return run, train_run(run)
    finally:
        run.signals.restore()
        run.loader.close()
        tell_offload(run.trainee)
        if run.eval_loader is not None:
            run.eval_loader.close()


def tell_offload(trainee: Trainee) -> None:
    """The run is over: what was moved, into run.log, and the file goes."""
    offloader = getattr(trainee, "offloader", None)
    if offloader is None:
        return
    pool = offloader.pool
    told = [
        f"{offloader.moved_bytes / 2**30:.2f} GiB to the host",
        f"at most {pool.peak_bytes / 2**30:.2f} GiB held there",
    ]
    if pool.disk is not None:
        told.append(
            f"{pool.disk.written_bytes / 2**30:.2f} GiB written to disk, {pool.disk.read_bytes / 2**30:.2f} read"
        )
    told.append(f"{offloader.fetched_late} pieces fetched late")
    log.detail("offload", ", ".join(told))
    offloader.close()


def begin_on_all(job: Job, run_dir: Path) -> Start:
    """What to do in this directory, as the first rank finds it; every rank opens the same checkpoint."""
    world, decided = job.world, frozenset(decision.key for decision in job.decisions)
    if world.rank == 0:
        start = begin(run_dir, job.config, world_size=world.world_size, decided=decided)
        path = str(start.checkpoint.path) if start.checkpoint else None
        broadcast_json({"kind": start.kind, "path": path}, world.group)
        return start
    found = broadcast_json(None, world.group)
    checkpoint: Checkpoint | None = open_checkpoint(Path(found["path"]), checked=True) if found["path"] else None
    return Start(found["kind"], checkpoint)


def write_page(report: Report, run_dir: Path) -> None:
    """The report of a run whose results are all on disk: what goes wrong with it costs the page and not the run."""
    try:
        report(run_dir)
    except OSError as error:
        log.warn(
            f"the report could not be written to {headline.shown(run_dir)}: {system_reason(error)}. "
            "The run itself is finished and complete",
            do="free some space, or see to the permissions, and start the same command again: it writes the report alone",
        )


def already_finished(run_dir: Path, config_path: Path | None, report: Report | None = None) -> Result:
    """Say so, and how to run it again; the result is that of the run. report: for a page that could not be written then."""
    if report is not None and not (run_dir / PAGE).exists():
        write_page(report, run_dir)
        if (run_dir / PAGE).exists():
            log.line(f"the report was missing: written to {headline.shown(run_dir / PAGE)}")
    command = f"rft train --new {headline.shown(config_path.absolute())}" if config_path else "another train.out"
    log.line(f"{headline.shown(run_dir)} holds this run, finished. To run it again: {command}")
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    return Result.from_json(run_dir, summary, status="already finished")
