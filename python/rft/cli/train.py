"""`rft train cfg.toml`: the main job. One process per visible GPU; under torchrun it joins as a worker."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from rft import log
from rft.cli.arguments import ConfigPath, Sets


def command(
    config: ConfigPath,
    sets: Sets = None,
    new: Annotated[bool, typer.Option("--new", help="Start afresh in the next free run directory (NAME-2).")] = False,
    cpu_ranks: Annotated[int | None, typer.Option("--cpu-ranks", hidden=True)] = None,
    worker: Annotated[str | None, typer.Option("--worker", hidden=True)] = None,
) -> int:
    """Fine-tune a model as a TOML file says. Run the same command again to resume.

    An unfinished run in the run directory goes on from its last complete checkpoint; a finished one is left as it is.
    Exit status: 0 done, 1 failed, 2 wrong config or input, 130 or 143 stopped by a signal after a complete checkpoint.
    """
    from rft.config.load import load_config

    # Told in under a second, before torch is imported and workers are started.
    checked = load_config(config, sets or [])
    from rft.launch import launch

    def work() -> int:
        with log.capture_noise():
            from rft.report import write_report
            from rft.training.api import train_config

            train_config(checked, new=new, config_path=config, report=write_report)
        return 0

    argv = list(sys.argv[1:])
    if worker is not None:
        at = argv.index("--worker")
        del argv[at : at + 2]
    return launch(work, argv, cpu_ranks=cpu_ranks, worker=worker)
