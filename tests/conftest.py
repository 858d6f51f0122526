"""What holds for every test: no network, a cache of its own, no log state left behind; in CI an acceptance test may not be skipped."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

SHARED = Path(__file__).parents[2] / "shared"
"""Data and design that lie beside the checkout where acceptance tests can run."""


def pytest_configure(config: pytest.Config) -> None:
    """Set before any test module imports torch or transformers."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="rft-tests-")  # prepared sets of tests never meet the user's
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models: a second thread only spins
    if not any(
        Path("/dev").glob("nvidia[0-9]*")
    ):  # Triton reads it when it is first imported, and torch may be who does
        os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_unconfigure(config: pytest.Config) -> None:
    import shutil

    shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)


@pytest.fixture(autouse=True)
def _fresh_log() -> Iterator[None]:
    """Verbosity, rank and an open run.log are the process's: no test inherits another's."""
    from rft import log

    log.setup(rank=0)
    yield
    log.close_run_log()
    log.setup(rank=0)


# ---- in CI, an acceptance test that could run and does not is a failure


def _must_not_skip(reason: str) -> bool:
    return os.environ.get("CI") == "true" and SHARED.is_dir() and "../shared" in reason


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    return _failed_if_acceptance(report)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    report = yield
    return _failed_if_acceptance(report)


def _failed_if_acceptance(report):
    if report.skipped and isinstance(report.longrepr, tuple) and _must_not_skip(report.longrepr[2]):
        report.outcome = "failed"
        report.longrepr = (
            f"{report.longrepr[2]}\nSkipped although ../shared is there, in CI: an acceptance test has to run."
        )
    return report
