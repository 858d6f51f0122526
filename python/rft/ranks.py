"""Who this process is among several, as a launcher's environment says: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from rft.errors import ConfigError

_DO = "start the processes with torchrun, which sets all of them; or unset RANK and WORLD_SIZE to train in one process"


@dataclass(frozen=True)
class Ranks:
    """One process: rank 0 of 1."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Rank on this machine."""


def launched(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher has started this process as one of its workers."""
    return "RANK" in environ or "WORLD_SIZE" in environ


def read_ranks(environ: Mapping[str, str] = os.environ) -> Ranks:
    """What the environment says. Raises ConfigError for what no launcher sets: the ranks would wait for each other for ever."""
    if not launched(environ):
        return Ranks()
    for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if name not in environ:
            raise _wrong(name, f"is not set, and {other} is", "both or neither")
    world_size = _number(environ, "WORLD_SIZE", 1)
    rank = _number(environ, "RANK", 0)
    if rank >= world_size:
        raise _wrong("RANK", f"is {rank}, and WORLD_SIZE is {world_size}", f"0 to {world_size - 1}")
    local_rank = _number(environ, "LOCAL_RANK", 0) if "LOCAL_RANK" in environ else 0
    if world_size > 1:
        if not environ.get("MASTER_ADDR"):
            raise _wrong(
                "MASTER_ADDR", f"is not set, and WORLD_SIZE is {world_size}", "the address of rank 0's machine"
            )
        if "MASTER_PORT" not in environ:
            raise _wrong(
                "MASTER_PORT", f"is not set, and WORLD_SIZE is {world_size}", "a free port of rank 0's machine"
            )
        if _number(environ, "MASTER_PORT", 1) > 65_535:
            raise _wrong("MASTER_PORT", f"is {environ['MASTER_PORT']}", "a port, 1 to 65535")
    return Ranks(rank, world_size, local_rank)


def plain_number(name: str, default: int, environ: Mapping[str, str] = os.environ) -> int:
    """A number of the environment for those who must not fail: `default` where it is none."""
    text = environ.get(name, "").strip()
    return int(text) if _is_number(text) else default


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10


def _number(environ: Mapping[str, str], name: str, least: int) -> int:
    text = environ[name].strip()
    wanted = f"a whole number of at least {least}"
    if not _is_number(text):
        raise _wrong(name, f"is {environ[name]!r}", wanted)
    if int(text) < least:
        raise _wrong(name, f"is {text}", wanted)
    return int(text)


def _wrong(name: str, problem: str, wanted: str) -> ConfigError:
    return ConfigError(f"environment variable {name}", problem, wanted=wanted, do=_DO)
