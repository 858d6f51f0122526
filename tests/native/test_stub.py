"""_native.pyi says what the extension is: the same names, parameters and defaults. Part of `make lint`."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

native = pytest.importorskip("rft._native", reason="the extension is not built: make dev")
STUB = Path(__file__).parents[2] / "python" / "rft" / "_native.pyi"
TREE = ast.parse(STUB.read_text(encoding="utf-8"))
CLASSES = {node.name: node for node in TREE.body if isinstance(node, ast.ClassDef)}


def functions(body: list[ast.stmt]) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in body if isinstance(node, ast.FunctionDef)}


def is_property(node: ast.FunctionDef) -> bool:
    return any(isinstance(d, ast.Name) and d.id == "property" for d in node.decorator_list)


def written(node: ast.FunctionDef) -> list[tuple[str, str, object]]:
    """(name, kind, default) of each parameter as the stub has it, self left out."""
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    rows = [
        (a.arg, "positional", ast.literal_eval(d) if d else inspect.Parameter.empty)
        for a, d in zip(positional, defaults, strict=True)
    ]
    rows += [
        (a.arg, "keyword", ast.literal_eval(d) if d else inspect.Parameter.empty)
        for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    return [row for row in rows if row[0] != "self"]


def built(call: object) -> list[tuple[str, str, object]]:
    """The same of what is in the extension."""
    rows = []
    for name, parameter in inspect.signature(call).parameters.items():  # type: ignore[arg-type]
        kind = "keyword" if parameter.kind is inspect.Parameter.KEYWORD_ONLY else "positional"
        rows.append((name, kind, parameter.default))
    return [row for row in rows if row[0] not in ("self", "$self")]


def public(thing: type | ModuleType) -> set[str]:
    return {name for name in vars(thing) if not name.startswith("_")}


def calls() -> Iterator[tuple[str, ast.FunctionDef, object]]:
    for name, node in functions(TREE.body).items():
        yield name, node, getattr(native, name, None)
    for class_name, class_node in CLASSES.items():
        kind = getattr(native, class_name, None)
        for name, node in functions(class_node.body).items():
            if is_property(node):
                continue
            yield f"{class_name}.{name}", node, kind if name == "__init__" else getattr(kind, name, None)


def test_the_module_has_the_names_of_the_stub():
    assert public(native) - {"annotations"} == {*functions(TREE.body), *CLASSES}


@pytest.mark.parametrize("name", [n for n in CLASSES if n != "NativeError"])
def test_a_class_has_the_methods_and_properties_of_the_stub(name):
    node = CLASSES[name]
    kind = getattr(native, name)
    assert public(kind) == {n for n in functions(node.body) if not n.startswith("_")}
    for member, function in functions(node.body).items():
        if is_property(function):
            assert inspect.isdatadescriptor(getattr(kind, member)), f"{name}.{member} is no property"


@pytest.mark.parametrize(("name", "node", "call"), [pytest.param(*row, id=row[0]) for row in calls()])
def test_a_function_takes_the_parameters_of_the_stub(name, node, call):
    assert call is not None, f"{name} is not in the extension"
    assert built(call) == written(node)


def test_the_error_of_the_extension_carries_what_ours_carry():
    assert issubclass(native.NativeError, Exception)
    fields = {node.target.id for node in CLASSES["NativeError"].body if isinstance(node, ast.AnnAssign)}
    assert fields == {"kind", "where", "problem", "wanted", "do"}
