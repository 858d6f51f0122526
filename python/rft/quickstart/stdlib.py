"""Rows that every machine has: the documented functions of this Python's standard library, source -> docstring."""

from __future__ import annotations

import ast
import hashlib
import json
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rft.errors import DataError

SYSTEM = "You write docstrings for Python functions."
"""Short, and in every row: the template of SmolLM2 would put a longer one of its own there."""

# tests document little and in other words; idlelib and the rest are programs rather than a library
_LEFT_OUT = {
    "test",
    "tests",
    "idle_test",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "site-packages",
    "dist-packages",
    "pydoc_data",
}
_LONGEST_SOURCE, _LONGEST_DOCSTRING = 2_000, 1_000
"""Characters; at 2.9 and 4 characters a token both fit into a pack of 1,024 tokens. A few hundred are longer."""


@dataclass(frozen=True)
class Documented:
    """A function and its docstring; `source` is without it, at no indentation."""

    where: str
    name: str
    source: str
    docstring: str

    def row(self) -> dict[str, object]:
        return {
            "messages": [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": self.source},
                {"role": "assistant", "content": self.docstring},
            ],
            "from": self.where,
        }

    @property
    def digest(self) -> str:
        """Of the content: decides what is held out, the same on every run."""
        return hashlib.sha256(f"{self.source}\0{self.docstring}".encode()).hexdigest()


def documented_functions(root: Path | None = None) -> list[Documented]:
    """Every documented function under `root` (default: the standard library) once, in the order of files.

    Raises DataError where there are no sources (some minimal or embedded Pythons ship bytecode alone).
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, Documented] = {}
    for path in sorted(root.rglob("*.py")):
        if not _LEFT_OUT.intersection(path.relative_to(root).parts):
            for function in _functions_of(path, path.relative_to(root).as_posix()):
                found.setdefault(function.digest, function)
    if len(found) < 200:
        raise DataError(
            str(root),
            f"holds {len(found)} documented functions: this Python comes without the sources of its standard library",
            wanted="a few thousand",
            do="use another Python 3.11 or newer, or train on rows of your own with `rft train`",
        )
    return list(found.values())


def _functions_of(path: Path, where: str) -> Iterator[Documented]:
    try:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (SyntaxError, UnicodeDecodeError, ValueError):  # a few files are in other encodings or broken on purpose
        return
    lines = text.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        docstring = (ast.get_docstring(node) or "").strip()
        if not 12 <= len(docstring) <= _LONGEST_DOCSTRING:
            continue
        first = node.body[0]
        start = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        kept = lines[start - 1 : first.lineno - 1] + lines[(first.end_lineno or first.lineno) : node.end_lineno]
        source = textwrap.dedent("\n".join(kept)).strip()
        # a one-line `def f(): "doc"` shares its line with the docstring and would lose its head
        if source and first.lineno > node.lineno and len(source) <= _LONGEST_SOURCE:
            yield Documented(f"{where}:{node.lineno}", node.name, source, docstring)


def split(functions: list[Documented], held_out: int) -> tuple[list[Documented], list[Documented]]:
    """Training and held-out functions: the `held_out` lowest content hashes stay out of the training."""
    chosen = {f.digest for f in sorted(functions, key=lambda f: f.digest)[:held_out]}
    return [f for f in functions if f.digest not in chosen], [f for f in functions if f.digest in chosen]


def write_rows(path: Path, functions: list[Documented]) -> None:
    """One JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(f.row(), ensure_ascii=False) + "\n" for f in functions), encoding="utf-8")


def example_of(held_out: list[Documented]) -> Documented:
    """The held-out function to show: short enough for a terminal, with a docstring of a line or two."""

    def fits(function: Documented) -> bool:
        lines = function.source.splitlines()
        return (
            4 <= len(lines) <= 9
            and max(map(len, lines)) <= 76
            and 30 <= len(function.docstring) <= 110
            and not function.name.startswith("_")
        )

    fitting = [f for f in held_out if fits(f)]
    return min(fitting or held_out, key=lambda f: f.digest)
