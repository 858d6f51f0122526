"""`rows = "module:function"`: off unless allowed, run once for each state of code and file, errors with their line."""

from __future__ import annotations

import multiprocessing

import pytest

from rft.config.data import DataConfig, SourceConfig
from rft.config.load import load_config
from rft.data.prepare import prepare
from rft.errors import ConfigError, DataError
from support.data import documents_of_code, prepare_code, text_of, tiny_files

CODE = """
from pathlib import Path

def rows(path):
    with open(Path(__file__).with_name("calls"), "a") as calls:
        calls.write("x")
    for line in Path(path).read_text().splitlines():
        yield {"text": line.upper()}
"""


@pytest.fixture
def files(tmp_path):
    return tiny_files(tmp_path / "tokenizer")


@pytest.fixture
def code(tmp_path):
    (tmp_path / "words.dat").write_text("one\ntwo\n")
    path = tmp_path / "loader.py"
    path.write_text(CODE)
    return path


def calls(tmp_path):
    path = tmp_path / "calls"
    return len(path.read_text()) if path.exists() else 0


def test_rows_are_made_once_and_again_when_code_or_file_changes(tmp_path, files, code):
    for _ in range(2):
        prepared = prepare_code(tmp_path, files, f"{code}:rows")
        texts = [text_of(prepared.train, index, files) for index in range(2)]
        assert [text.removesuffix("<|im_end|>") for text in texts] == ["ONE", "TWO"]
    assert calls(tmp_path) == 1
    code.write_text(CODE.replace("upper()", "upper() + '!'"))
    assert text_of(prepare_code(tmp_path, files, f"{code}:rows").train, 0, files).startswith("ONE!")
    (tmp_path / "words.dat").write_text("one\nten\n")
    assert text_of(prepare_code(tmp_path, files, f"{code}:rows").train, 1, files).startswith("TEN!")
    assert calls(tmp_path) == 3


def test_module_is_found_in_the_current_folder(tmp_path, files, code, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert prepare_code(tmp_path, files, "loader:rows").train.num_documents == 2


def test_module_of_a_package_may_import_its_neighbours_and_hold_dataclasses(tmp_path, files, code, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows_package").mkdir()
    (tmp_path / "rows_package" / "__init__.py").write_text("")
    (tmp_path / "rows_package" / "near.py").write_text("WORD = 'near'\n")
    (tmp_path / "rows_package" / "loader.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass, asdict\nfrom .near import WORD\n"
        "@dataclass\nclass Row:\n    text: str\n\ndef rows(path):\n    return [asdict(Row(WORD))]\n"
    )
    made = prepare_code(tmp_path, files, "rows_package.loader:rows")
    assert text_of(made.train, 0, files).startswith("near")
    (tmp_path / "broken_package").mkdir()
    (tmp_path / "broken_package" / "__init__.py").write_text("raise RuntimeError('broken')")
    with pytest.raises(DataError, match="cannot be imported: RuntimeError: broken"):
        prepare_code(tmp_path, files, "broken_package.loader:rows")


def test_code_is_off_unless_allowed(tmp_path, files, code):
    source = {"path": str(tmp_path / "words.dat"), "rows": f"{code}:rows"}
    with pytest.raises(DataError, match="runs code, which is off") as raised:
        prepare(DataConfig(train=[SourceConfig(**source)], store=str(tmp_path / "sets")), files)
    assert "allow_code" in raised.value.do
    with pytest.raises(ConfigError, match="running code is off"):
        load_config({"model": {"path": "org/model"}, "data": {"train": [source]}})
    assert calls(tmp_path) == 0


def test_file_of_code_counts_from_the_configs_folder(tmp_path, code):
    (tmp_path / "c.toml").write_text(
        '[model]\npath = "org/model"\n[data]\nallow_code = true\n[[data.train]]\npath = "words.dat"\nrows = "loader.py:rows"\n'
    )
    assert load_config(tmp_path / "c.toml").data.train[0].rows == f"{code}:rows"


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("def rows(path):\n    yield {}['x']", r"KeyError: 'x' \(loader.py:2\)"),
        ("def rows(path):\n    return 7", "not iterable"),
        ("def rows(path):\n    return []", "made no rows"),
        ("def rows(path):\n    yield 'text'", "a str"),
        ("import sys\ndef rows(path):\n    sys.exit(0)", r"SystemExit: 0 \(loader.py:3\)"),
        ("import sys\nsys.exit(0)", r"cannot be imported: SystemExit: 0 \(loader.py:2\)"),
        ("def other(path): pass", "no function 'rows'"),
        ("import nothing_of_this_name", r"cannot be imported: ModuleNotFoundError.* \(loader.py:1\)"),
    ],
)
def test_what_goes_wrong_in_the_code_is_told_with_its_line(tmp_path, files, code, body, problem):
    code.write_text(body)
    with pytest.raises(DataError, match=problem):
        prepare_code(tmp_path, files, f"{code}:rows")
    assert not list((tmp_path / "sets" / "rows").glob("*.jsonl")), "nothing half made is kept"


@pytest.mark.parametrize("rows", ["loader", "loader.py:rows:", "nowhere.py:rows", "no_such_module:rows", ":rows"])
def test_reference_that_names_nothing_is_an_error(tmp_path, files, code, rows):
    with pytest.raises(DataError) as raised:
        prepare_code(tmp_path, files, rows)
    assert raised.value.where == "data.train.0.rows"
    assert "module:function" in raised.value.wanted


def test_folder_is_refused_because_rows_takes_files(tmp_path, files, code):
    with pytest.raises(DataError, match="rows takes files"):
        prepare_code(tmp_path, files, f"{code}:rows", path=".")


def test_several_processes_run_the_code_once(tmp_path, files, code):
    code.write_text("import time\n" + CODE.replace("    for", "    time.sleep(0.5)\n    for"))
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        assert pool.map(documents_of_code, [(tmp_path, files, f"{code}:rows")] * 3) == [2, 2, 2]
    assert calls(tmp_path) == 1
