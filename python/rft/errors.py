"""What can go wrong that a user can mend: one block without a traceback, an exit code, and what to do."""

from __future__ import annotations

import errno
from pathlib import Path


class RftError(Exception):
    """Base of every error that is told to the user as one block.

    where: place or subject ("train.jsonl:412", "chat.toml: optim.lr"). problem: what was given or happened.
    wanted: what is accepted. do: the next thing to try. `exit_code` is the process's exit status.
    """

    exit_code = 1
    others: tuple[RftError, ...] = ()
    """Further errors of the same kind, found at the same time: printed after this one."""

    def __init__(self, where: str, problem: str, *, wanted: str = "", do: str = ""):
        super().__init__(where, problem)
        self.where, self.problem, self.wanted, self.do = where, problem, wanted, do

    def __str__(self) -> str:
        lines = [f"{self.where}: {self.problem}" if self.where else self.problem]
        if self.wanted:
            lines.append(f"wanted: {self.wanted}")
        if self.do:
            lines.append(f"do: {self.do}")
        return "\n".join(lines)

    def __reduce__(self):
        return _rebuild, (type(self), self.where, self.problem, self.wanted, self.do)


def _rebuild(kind: type[RftError], where: str, problem: str, wanted: str, do: str) -> RftError:
    return kind(where, problem, wanted=wanted, do=do)


class ConfigError(RftError):
    """The config or the command line is wrong."""

    exit_code = 2


class InUse(ConfigError):
    """Another process is at work there."""


class DataError(RftError):
    """A row, a file or a template is wrong."""

    exit_code = 2


class ModelError(RftError):
    """The model or its tokenizer cannot be read, or cannot be trained as asked."""

    exit_code = 2


class Refused(RftError):
    """Something that the config asks for cannot be applied here: the run stops before it starts."""

    exit_code = 2


class CheckpointError(RftError):
    """A checkpoint cannot be written, or is not what it says."""


class TrainingError(RftError):
    """Training cannot go on: a non-finite loss, gradients that are all zero, out of memory."""


class Stopped(RftError):
    """SIGINT or SIGTERM arrived and a complete checkpoint was written (130, 143), or could not be (1)."""

    def __init__(self, where: str, problem: str, *, wanted: str = "", do: str = "", exit_code: int = 1):
        super().__init__(where, problem, wanted=wanted, do=do)
        self.exit_code = exit_code

    def __reduce__(self):
        return _rebuild_stopped, (self.where, self.problem, self.wanted, self.do, self.exit_code)


def _rebuild_stopped(where: str, problem: str, wanted: str, do: str, exit_code: int) -> Stopped:
    return Stopped(where, problem, wanted=wanted, do=do, exit_code=exit_code)


def system_reason(error: OSError) -> str:
    """What the system says, as a part of a sentence: `no space left on device`."""
    text = error.strerror or str(error)
    return text[:1].lower() + text[1:]


_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ENFILE, errno.EMFILE, errno.ENOMEM)
"""What the machine lacks at the moment; any other refusal of the system is about the place that the user chose."""


def unusable_folder(key: str, folder: Path, error: OSError) -> RftError:
    """The error for a folder that a key of the config names and that cannot be made or written.

    ConfigError (exit 2), but where the machine failed: a full or broken disk (exit 1).
    """
    reason = system_reason(error)
    if error.errno in _MACHINE:
        problem = reason if reason.startswith("the disk is full") else f"cannot be written: {reason}"
        return RftError(str(folder), problem, do=f"free some space, or set {key} to another place")
    taken = next((path for path in (folder, *folder.parents) if path.exists() and not path.is_dir()), None)
    if taken is not None:
        problem = f"{folder} is a file" if taken == folder else f"{folder} cannot be a folder: {taken} is a file"
        return ConfigError(key, problem, wanted="a folder", do=f"set {key} to another place")
    return ConfigError(
        key,
        f"{folder} cannot be made or written: {reason}",
        wanted="a folder that you may write to",
        do=f"set {key} to another place",
    )
