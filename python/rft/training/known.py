"""What a command found out about a model on this machine, kept so that `rft config show` can decide every `auto` without torch.

Importing torch, transformers and PEFT, probing a small copy of the model and counting its parameters takes seconds; what comes out is a few
numbers, which depend on nothing but the model's files, `[model]`, `[adapter]`, the precision, the machine and the versions of the code. They
lie in `$XDG_CACHE_HOME/rft/models` under a hash of all of that. The decisions themselves are made anew each time, by the functions that a run
calls. What cannot be read is found out again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rft.config.root import Config
from rft.data.folder import default_root
from rft.models.facts import Facts
from rft.models.rope import asked
from rft.ranks import launched
from rft.training.decision import Decision
from rft.training.machine import Machine, usable_cores
from rft.training.resolve import resolve
from rft.training.without_effect import Resolved

MOST_FILES = 200
"""Older ones are removed: each is about a kilobyte."""
_PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "peft",
    "flash-attn-4",
    "gguf",
    "tokenizers",
    "accelerate",
    "bitsandbytes",
)
_VARIABLES = ("CUDA_", "NVIDIA_", "TRITON_", "TORCH_", "PYTORCH_", "ATEN_", "ONEDNN_", "HF_", "OMP_", "KMP_", "MKL_")
"""What begins so can change what torch and its libraries do."""


@dataclass(frozen=True)
class Known:
    """What `resolve` asks of model and machine."""

    facts: Facts
    machine: Machine
    attention: tuple[str, str]
    chunk_rows: int
    kernels: bool
    isolates: bool
    can_recompute: bool

    def resolve(self, config: Config) -> tuple[Config, list[Decision]]:
        """Every `auto` that can be decided before the data is there. config: its precision is decided."""
        return resolve(
            config,
            self.facts,
            self.machine,
            attention=self.attention,
            chunk_rows=self.chunk_rows,
            store=str(default_root()),
            kernels=self.kernels,
            isolates=self.isolates,
            can_recompute=self.can_recompute,
        )

    def seen(self, given: Config, made: Config) -> Resolved:
        """For the keys that were given and are of no use. given: as `resolve` got it; made: as it gave it back."""
        return Resolved(given, made, self.machine, self.facts.num_layers)


def recall(config: Config, processes: int = 1) -> Known | None:
    """What was found out before, or None."""
    path = _place(config, processes)
    if path is None:
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        facts = Facts(**{**found["facts"], "windows": tuple(found["facts"]["windows"])})
        given = {
            **found,
            "facts": facts,
            "machine": Machine(**found["machine"]),
            "attention": tuple(found["attention"]),
        }
        return Known(**given)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def remember(config: Config, processes: int, known: Known) -> None:
    """Keep it for the next call. A cache that cannot be written costs the next call its seconds, and nothing else."""
    path = _place(config, processes)
    if path is None or not known.isolates:  # what refuses packing is told by the probe, in its own words
        return
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(asdict(known)), encoding="utf-8")
        os.replace(temporary, path)
        files = sorted(path.parent.glob("*.json"), key=lambda file: file.stat().st_mtime)
        for file in files[:-MOST_FILES]:
            file.unlink(missing_ok=True)


# ---- what it depends on


def _place(config: Config, processes: int) -> Path | None:
    """The file of this model, config and machine; None where the answer is more than numbers, or the model is not here yet."""
    special = config.model.base_weights != "bf16" or asked(config.model.rope) or config.model.trust_remote_code
    if special or launched():
        return None
    try:
        model = _model_files(config.model.path, config.model.revision)
        adapter = _files(Path(path)) if (path := getattr(config.adapter, "path", None)) else []
        if not model:
            return None
        depends = [
            config.model.model_dump(mode="json"), config.adapter.model_dump(mode="json"), config.train.precision, config.train.master,
            config.train.cuda_graph,
            processes, model, adapter, _code(), _machine(),
        ]  # fmt: skip
    except (OSError, RuntimeError):  # a name that is too long, ~somebody: told by whoever looks for the model
        return None
    key = hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:32]
    return default_root().with_name("models") / f"{key}.json"


def _model_files(path: str, revision: str | None) -> list[Any]:
    """Names and identities of the model's files; [] where it is not on this disk."""
    local = Path(path).expanduser()
    if local.exists():
        return _files(local)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(path, "config.json", revision=revision)
    except HFValidationError:
        return []
    return _files(Path(found).parent) if isinstance(found, str) else []


def _files(place: Path) -> list[Any]:
    """(name, size, times, inode) of a file, or of each file of a folder: what changes when a file does."""
    found = []
    for file in sorted(place.iterdir()) if place.is_dir() else [place]:
        if file.is_file():
            stat = file.stat()
            found.append([str(file.absolute()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino])
    return found


def _code() -> list[Any]:
    """Versions of the libraries, and this package's own files: a checkout changes without a new version."""
    versions = []
    for package in _PACKAGES:
        try:
            versions.append(version(package))
        except PackageNotFoundError:
            versions.append("")
    root = Path(__file__).resolve().parents[1]
    own = [[str(file), file.stat().st_mtime_ns] for file in sorted(root.rglob("*.py"))]
    own += [[str(file), file.stat().st_mtime_ns] for file in sorted((root / "kernels").glob("*.py"))]
    return [sys.version, versions, own]


def _machine() -> list[Any]:
    """Processor, memory, driver and GPUs as the system names them, and the variables that libraries listen to."""
    said: list[Any] = []
    for place in (Path("/proc/driver/nvidia/version"), *sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))):
        with contextlib.suppress(OSError):
            said.append(place.read_text(errors="replace"))
    said.append(sorted(str(device) for device in Path("/dev").glob("nvidia*")))
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        said.append(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    variables = sorted(item for item in os.environ.items() if item[0].startswith(_VARIABLES) and "TOKEN" not in item[0])
    return [platform.platform(), memory, usable_cores(), said, variables]
