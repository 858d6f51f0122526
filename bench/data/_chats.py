"""A JSONL file of chats and what a preparation of it is asked, for the benches of the data engine.

The chats are made of the modules of this Python and of the packages installed beside it: a question about a function, its source as the
answer, a follow-up, its docstring, and so on; 2 to 8 turns, prose and code mixed, none twice. `--chats FILE` takes one's own.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import random
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from results import ROOT

sys.path.insert(0, str(ROOT / "python"))

TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.role == 'assistant' %}{% generation %}{{- message.content + '<|im_end|>' }}{% endgeneration %}{{- '\\n' }}"
    "{%- else %}{{- message.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""ChatML with generation tags: ours and the peers' masks come from the same tags."""


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """Options that the benches share."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, help="append result lines here")
    parser.add_argument("--chats", type=Path, help="JSONL of chats (default: made of this Python's own sources)")
    parser.add_argument(
        "--megabytes", type=float, default=100.0, help="of the file that is made, or of yours that is read"
    )
    parser.add_argument("--repeats", type=int, default=5)
    return parser


def write_chats(path: Path, megabytes: float, given: Path | None) -> int:
    """Writes about so many megabytes of chats to `path`; returns the number of bytes."""
    limit = int(megabytes * 1e6)
    with path.open("wb") as file:
        for line in _lines(given) if given else own_lines():
            file.write(line)
            if file.tell() >= limit:
                break
    return path.stat().st_size


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from file


def own_lines() -> Iterator[bytes]:
    """A chat a line, as JSON."""
    pick, seen = random.Random(0), set()
    system = ["You are a helpful assistant.", "Answer in one sentence where you can.", "You explain Python code."]
    texts: list[str] = []
    for number, text in enumerate(_texts()):
        digest = hashlib.md5(text.encode()).digest()
        if digest in seen:
            continue
        seen.add(digest)
        texts.append(text)
        if len(texts) < 2 * pick.randint(1, 4):
            continue
        messages = [{"role": "system", "content": pick.choice(system)}] if number % 3 == 0 else []
        roles = ("user", "assistant")
        messages += [{"role": roles[n % 2], "content": part} for n, part in enumerate(texts[: len(texts) // 2 * 2])]
        texts = []
        yield json.dumps({"messages": messages}, ensure_ascii=False).encode() + b"\n"


def _texts() -> Iterator[str]:
    """Docstrings and sources of functions and classes, in turn."""
    folders = [Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))]
    for file in (file for folder in folders for file in sorted(folder.rglob("*.py"))):
        try:
            source = file.read_text("utf-8")
            lines, tree = source.splitlines(keepends=True), ast.parse(source)
        except (UnicodeDecodeError, SyntaxError, ValueError, OSError, RecursionError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                doc = ast.get_docstring(node)
                if doc and 40 < len(doc) < 4000:
                    yield f"What does this do?\n\n{doc}" if len(doc) % 2 else doc
                    yield "".join(lines[node.lineno - 1 : node.end_lineno])[:3000]


def request(chats: Path, tokenizer: Path, *, threads: int = 1, **options: Any) -> dict[str, Any]:
    """What `_native.prepare` is asked: these chats, ChatML, the assistant's turns trained on.

    tokenizer: a folder with tokenizer.json (and tokenizer_config.json), or the JSON file.
    """
    text = (tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer).read_text("utf-8")
    vocab = json.loads(text)
    size = max([*vocab["model"]["vocab"].values(), *(token["id"] for token in vocab["added_tokens"])]) + 1
    added = {token["content"]: token["id"] for token in vocab["added_tokens"]}
    return {
        "format_version": 2,
        "sources": [{"path": str(chats), "format": "messages"}],
        "tokenizer": {"json": text, "eos_id": added.get("<|im_end|>", 0), "vocab_size": size},
        "template": TEMPLATE,
        "threads": threads,
        **options,
    }
