"""`rft data` without its terminal: the code of the program `rft-data`, called in this process."""

from __future__ import annotations


def run(arguments: list[str]) -> tuple[int, str, str]:
    """Exit code, and what goes to stdout and to stderr."""
    from rft import _native

    return _native.data_command(arguments)
