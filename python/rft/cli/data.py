"""`rft data prepare | pack | stats | cat | ls | verify | export | prune`: the same code as the program `rft-data`, which parses its arguments itself."""

from __future__ import annotations

import sys

from rft import log

_OURS = ("-q", "--quiet", "-v", "--verbose")


def run(arguments: list[str]) -> int:
    """Hand the arguments through; returns the exit code."""
    from rft.data import command

    given = [argument for argument in arguments if argument not in _OURS] or ["--help"]
    code, out, err = command.run(given)
    log.output(out)
    if err:
        sys.stderr.write(err)
    return code if arguments else 2
