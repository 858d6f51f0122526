"""Rows from documented functions: what is taken, what is left out, and that nothing is on both sides."""

from __future__ import annotations

import json
import textwrap

import pytest

from rft.errors import DataError
from rft.quickstart import files, stdlib
from rft.quickstart.stdlib import SYSTEM, Documented, _functions_of, documented_functions, example_of, split, write_rows


def functions_in(tmp_path, text: str) -> list[Documented]:
    path = tmp_path / "module.py"
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return list(_functions_of(path, "module.py"))


def test_source_is_the_function_without_its_docstring(tmp_path):
    (found,) = functions_in(
        tmp_path,
        '''
        class Box:
            @property
            def size(self):
                """Return the size of the box.

                In bytes.
                """
                # of what is in it
                return self._size
        ''',
    )
    assert found.name == "size"
    assert found.docstring == "Return the size of the box.\n\nIn bytes."
    assert found.source == "@property\ndef size(self):\n    # of what is in it\n    return self._size"


def test_functions_without_a_usable_docstring_are_left_out(tmp_path):
    assert not functions_in(
        tmp_path,
        '''
        def none(): return 1
        def short():
            """Do it."""
            return 1
        def on_one_line(): "A docstring that shares its line with the head."
        def endless():
            """%s"""
            return 1
        '''
        % ("word " * 400),
    )


def test_file_that_does_not_parse_or_decode_is_left_out(tmp_path):
    (tmp_path / "bad.py").write_text("def f(:\n")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    assert not list(_functions_of(tmp_path / "bad.py", "bad.py"))
    assert not list(_functions_of(tmp_path / "latin.py", "latin.py"))


def test_standard_library_gives_thousands_of_rows_of_very_different_lengths():
    functions = documented_functions()
    assert len(functions) > 3000
    assert len({f.digest for f in functions}) == len(functions)
    lengths = sorted(len(f.source) + len(f.docstring) for f in functions)
    assert lengths[-len(lengths) // 20] > 10 * lengths[len(lengths) // 20]
    assert not any("/test/" in f.where or f.where.startswith("test/") for f in functions)


def test_held_out_rows_are_never_trained_on_and_stay_the_same_when_rows_are_added():
    functions = [
        Documented("m.py:1", f"f{i}", f"def f{i}(): return {i}", f"Return the number {i}.") for i in range(100)
    ]
    train, held_out = split(functions, 10)
    assert len(held_out) == 10
    assert not {f.digest for f in train} & {f.digest for f in held_out}
    assert {f.digest for f in train} | {f.digest for f in held_out} == {f.digest for f in functions}
    fewer = split(functions[:60], 10)[1]
    assert {f.digest for f in held_out if f in functions[:60]} <= {f.digest for f in fewer}


def test_rows_are_conversations_with_a_short_system_message(tmp_path):
    function = Documented("a.py:3", "f", "def f():\n    return 'é'", "Return é, always.")
    write_rows(tmp_path / "data" / "rows.jsonl", [function])
    (line,) = (tmp_path / "data" / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    messages = json.loads(line)["messages"]
    assert [m["role"] for m in messages] == ["system", "user", "assistant"]
    assert [m["content"] for m in messages] == [SYSTEM, function.source, function.docstring]


def test_example_fits_a_terminal():
    short = Documented(
        "a.py:1", "f", "def f(x):\n    y = x\n    z = y\n    return z", "Return what was given, by a detour."
    )
    long = Documented("b.py:1", "g", "def g():\n" + "    pass\n" * 40, "Do nothing for a long time, forty times over.")
    assert example_of([long, short]) == short
    assert example_of([long]) == long


def test_python_without_sources_is_told_what_to_do(tmp_path):
    with pytest.raises(DataError, match="without the sources"):
        documented_functions(tmp_path)


def test_longest_rows_fit_a_pack():
    # characters a token of SmolLM2 on code and on prose; the template adds a few dozen tokens
    assert stdlib._LONGEST_SOURCE / 2.9 + stdlib._LONGEST_DOCSTRING / 4 + 50 < files.SEQ_LEN
