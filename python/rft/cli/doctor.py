"""`rft doctor`: what this machine has, which backends will be used, what falls back and why."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import pkgutil
import platform
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer

from rft import __version__, log
from rft.cli.arguments import leave_stdout_to_json
from rft.errors import ConfigError
from rft.report.environment import cpu_name
from rft.words import counted

_PACKAGES = ("torch", "triton", "transformers", "peft", "accelerate", "datasets", "tokenizers", "safetensors", "gguf",
             "pydantic", "numpy")  # fmt: skip
_TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
_DISK_TEST_BYTES = 64 << 20  # a second on a slow disk; enough to pass a drive's own cache on most


@dataclass(frozen=True)
class Finding:
    """One line of the table. usable: None where there is nothing to use or not."""

    topic: str
    name: str
    usable: bool | None
    text: str


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure this GPU for about 20 seconds: `rft plan` uses the figures.")
    ] = False,
) -> int:
    """Show what this machine has, which backends rft will use, and what falls back and why."""
    if calibrate:
        return _calibrate(as_json)
    if as_json:
        leave_stdout_to_json()
    findings = list(_findings())
    ok = not any(f.usable is False and f.topic in ("torch", "data engine") for f in findings)
    if as_json:
        table = {"rft": __version__, "ok": ok, "findings": [asdict(f) for f in findings], "line": _paste_line(findings)}
        log.output(json.dumps(table, indent=2, ensure_ascii=False) + "\n")
    else:
        _print(findings)
    return 0 if ok else 1


def _calibrate(as_json: bool) -> int:
    """Measure the GPU and keep the figures under its name. Raises ConfigError where there is none."""
    import datetime

    import torch

    from rft.memory.calibrate import calibrate
    from rft.memory.devices import UNKNOWN, find_gpu, write_calibration

    if not torch.cuda.is_available():
        raise ConfigError(
            "rft doctor --calibrate",
            "this machine has no GPU",
            do="run it where training will run, or use `rft plan --gpu NAME`",
        )
    device = torch.device("cuda")
    name = torch.cuda.get_device_name(device)
    known = find_gpu(name) or UNKNOWN
    if as_json:
        leave_stdout_to_json()
    rates: dict[str, float] = {}
    for key, figure in calibrate(device):
        rates[key] = figure
        log.say(key, f"{_rate(key, figure)} (table: {_rate(key, getattr(known.rates, key))})")
    path = write_calibration(name, rates, datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))
    log.say("kept", str(path))
    if as_json:
        log.output(json.dumps({"gpu": name, "rates": rates, "file": str(path)}, indent=2) + "\n")
    return 0


def _rate(key: str, figure: float) -> str:
    if key in ("launch", "launch_packed"):
        return f"{1e3 * figure:.2f} ms a layer"
    if key == "context":
        return f"{figure / 2**20:,.0f} MiB"
    return (
        f"{figure / 1e12:,.2f} TB/s"
        if key == "memory"
        else f"{figure / 1e9:,.0f} GB/s"
        if key == "host"
        else f"{figure / 1e12:,.0f} TFLOP/s"
    )


def _print(findings: list[Finding]) -> None:
    width = max(len(f.topic) for f in findings) + 2
    names = max(len(f.name) for f in findings if f.usable is not None) + 2
    log.output(f"rft {__version__}\n\n")
    colour = log.colour(log.stdout())
    before = ""
    for finding in findings:
        topic = finding.topic if finding.topic != before else ""
        before = finding.topic
        if finding.usable is None:
            body = f"{finding.name}  {finding.text}" if finding.name else finding.text
        else:
            mark = "yes" if finding.usable else "no "
            mark = f"\x1b[{32 if finding.usable else 33}m{mark}\x1b[0m" if colour else mark
            body = f"{finding.name:{names}}{mark}  {finding.text}"
        log.output(f"{topic:{width}}{body}".rstrip() + "\n")
    log.output(f"\nfor a bug report, paste this line:\n{_paste_line(findings)}\n")


def _paste_line(findings: list[Finding]) -> str:
    one = {f.topic: f.text for f in findings if f.usable is None}
    usable = [f.name for f in findings if f.topic == "attention" and f.usable]
    gpus = one.get("GPU", "none").partition(":")[0]
    parts = (
        f"rft {__version__}",
        one["system"],
        one["CPU"],
        f"GPU {gpus}",
        one["versions"],
        f"attention {'+'.join(usable)}",
    )
    return " | ".join(parts)


def _findings() -> Iterator[Finding]:
    try:
        import torch
    except (ImportError, OSError) as error:  # a wheel for another system, or a missing library
        torch = None  # type: ignore[assignment]
        broken = f"cannot be imported: {error}"
    yield from _machine(torch)
    if torch is None:
        yield Finding("torch", "import", False, broken)
    else:
        yield from _gpus(torch)
        yield from _torch(torch)
        yield from _attention(torch)
        yield _kernels(torch)
        yield _quantised(torch)
    yield _native()
    yield from _trackers()
    yield from _disk()
    versions = " · ".join(f"{name} {found}" for name in _PACKAGES if (found := _version(name)))
    yield Finding("versions", "", None, f"Python {platform.python_version()} · {versions}")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _machine(torch: Any) -> Iterator[Finding]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    yield Finding("system", "", None, f"{system}, {memory:.1f} GiB memory")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    arithmetic = ""
    if torch is not None:
        from rft.training.machine import cpu_features, cpu_has_bf16

        arithmetic = f" ({cpu_features()}: trains in {'bf16' if cpu_has_bf16() else 'fp32'} by default)"
    yield Finding("CPU", "", None, f"{cpu_name()}, {cores} cores{arithmetic}")


def _gpus(torch: Any) -> Iterator[Finding]:
    if not torch.cuda.is_available():
        why = (
            "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no CUDA device or driver"
        )
        yield Finding("GPU", "", None, f"none: {why}; training runs on the CPU")
        return
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        bf16 = "" if p.major >= 8 else ", no bf16: trains in fp32"
        text = f"{p.name}: {total / 2**30:.0f} GiB, {free / 2**30:.0f} free, compute {p.major}.{p.minor}{bf16}"
        yield Finding("GPU", "" if index == 0 else f"#{index}", None, text)
    if torch.cuda.device_count() > 1:
        reach = all(torch.cuda.can_device_access_peer(0, i) for i in range(1, torch.cuda.device_count()))
        yield Finding(
            "GPU", "peer access", reach, "" if reach else "GPUs reach each other through the host: slower collectives"
        )


def _torch(torch: Any) -> Iterator[Finding]:
    parts = [torch.__version__]
    if torch.version.cuda:
        parts.append(f"CUDA {torch.version.cuda}")
    if torch.cuda.is_available() and torch.backends.cudnn.is_available():
        parts.append(f"cuDNN {torch.backends.cudnn.version()}")
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        parts.append("NCCL " + ".".join(map(str, torch.cuda.nccl.version())))
    yield Finding("torch", "", None, " · ".join(parts))


def _attention(torch: Any) -> Iterator[Finding]:
    from rft.models.attention import why_not_backend
    from rft.models.attention_fast import why_not
    from rft.models.documents import Needs

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    purpose = {
        "fa4": "flash_attn.cute: one call for all documents, the fastest",
        "cudnn": "long documents through cuDNN, the others through varlen",
        "varlen": "one call for all documents of a pack",
        "flex": "FlexAttention: soft-cap, sinks, odd head sizes",
        "sdpa": "a call a document",
        "math": "plain maths a document: soft-cap and sinks; the reference of the others",
    }
    for name, text in purpose.items():
        # the fast ones are proved beside plain maths when a model is set up, which can mean compiling: not here
        ask = why_not if name in ("fa4", "cudnn", "flex") else why_not_backend
        why = ask(name, device, torch.bfloat16, Needs(head_size=128, value_size=128))
        yield Finding("attention", name, why is None, why or text)


def _kernels(torch: Any) -> Finding:
    """Whether rft.kernels run here: they are swapped into models where they do."""
    import rft.kernels
    from rft.models.surgery import why_no_kernels

    names = ", ".join(sorted(module.name for module in pkgutil.iter_modules(rft.kernels.__path__)))
    if importlib.util.find_spec("triton") is None:
        return Finding(
            "kernels", "triton", False, f"triton is not installed: torch's own operations do the work ({names})"
        )
    why = why_no_kernels(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if why:
        return Finding("kernels", "triton", False, f"{why}: torch's own operations do the work ({names})")
    return Finding(
        "kernels", "triton", True, f"swapped in where they equal a model's own parts, see receipts.json ({names})"
    )


def _quantised(torch: Any) -> Finding:
    from rft.errors import Refused
    from rft.quant.fp8 import refuse_without_fp8

    try:
        refuse_without_fp8(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    except Refused as refused:
        return Finding("base weights", "fp8", False, refused.problem)
    return Finding("base weights", "fp8", True, 'model.base_weights = "fp8": frozen weights of a LoRA in e4m3')


def _native() -> Finding:
    try:
        native = importlib.import_module("rft._native")
    except ImportError as error:
        return Finding("data engine", "rft._native", False, f"cannot be imported: {error}; build it with `make dev`")
    return Finding("data engine", "rft._native", True, native.__version__)


def _trackers() -> Iterator[Finding]:
    for name in _TRACKERS:
        found = _version(name)
        yield Finding("trackers", name, bool(found), found or f"pip install 'rft-llm[{name}]'")


def _disk() -> Iterator[Finding]:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rft" / "sets"
    for name, folder in (("sets", cache), ("here", Path.cwd())):
        existing = next(p for p in (folder, *folder.parents) if p.is_dir())
        stats = os.statvfs(existing)
        free = stats.f_bavail * stats.f_frsize / 2**30
        yield Finding("disk", name, *_write_speed(existing, f"{folder}: {free:,.0f} GiB free"))
    bases = sorted(cache.with_name("bases").glob("*.safetensors"))
    size = sum(file.stat().st_size for file in bases) / 1e9
    held = f"{cache.with_name('bases')}: {counted(len(bases), 'quantised base')}, {size:,.2f} GB (model.cache_gb bounds it)"
    yield Finding("disk", "bases", True, held)


def _write_speed(folder: Path, text: str) -> tuple[bool, str]:
    block = os.urandom(1 << 20)  # random: a compressing disk must not look fast
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            start = time.perf_counter()
            for _ in range(_DISK_TEST_BYTES >> 20):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            seconds = time.perf_counter() - start
    except OSError as error:
        return False, f"{text}, cannot be written: {error.strerror}"
    return True, f"{text}, writes {_DISK_TEST_BYTES / seconds / 1e6:,.0f} MB/s"
