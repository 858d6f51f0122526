"""`rft verify cfg.toml`: parity on this config's own architecture, at small size, in a minute or two."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rft import __version__, log
from rft.cli.arguments import ConfigPath, Sets, leave_stdout_to_json
from rft.config.load import load_config

if TYPE_CHECKING:
    from rft.verify.check import Check

_NAME_WIDTH = 42


def command(
    config: ConfigPath,
    sets: Sets = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> int:
    """Check that packing, swaps, accumulation, saving, resuming and two ranks change no number, on a small copy of this model.

    Needs the model's config, not its weights or data. Exit status 1 if any check fails. The result also goes to verify.json in
    the run directory, if there is one.
    """
    if as_json:
        leave_stdout_to_json()
    checked = load_config(config, sets or [], check_files=False)
    from rft.verify.checks import run_checks
    from rft.verify.small import make_small

    results = []
    with tempfile.TemporaryDirectory(prefix="rft-verify-") as folder:
        case = make_small(checked, Path(folder))
        if not as_json:
            log.line(f"{'check':{_NAME_WIDTH}} {'largest error':>13}  {'allowed':>8}")
        for check in run_checks(case):
            results.append(check)
            if not as_json:
                _show(check)
    failed = sum(check.status == "FAILED" for check in results)
    report = {"rft": __version__, "ok": not failed, "checks": [c.to_json() for c in results], "notes": case.notes}
    run_dir = Path(checked.train.out) if checked.train.out else None
    if run_dir is not None and run_dir.is_dir():
        (run_dir / "verify.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if as_json:
        log.output(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
        return 1 if failed else 0
    for note in case.notes:
        log.say("note", note)
    log.line(f"{failed} of {len(results)} checks FAILED" if failed else f"all {len(results)} checks hold")
    return 1 if failed else 0


def _show(check: Check) -> None:
    error = "-" if check.error is None else _number(check.error)
    allowed = "-" if check.allowed is None else _number(check.allowed)
    status: str = check.status
    if log.colour():
        colour = {"ok": 32, "FAILED": 31, "skipped": 33}[check.status]
        status = f"\x1b[{colour}m{status}\x1b[0m"
    note = f"  {check.note}" if check.note else ""
    log.line(f"{check.name:{_NAME_WIDTH}} {error:>13}  {allowed:>8}  {status}{note}")


def _number(value: float) -> str:
    """0, 3.1e-7, 1e-5."""
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
