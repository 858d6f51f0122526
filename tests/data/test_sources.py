"""Paths of the config: files, globs, directories, and rows from Python."""

from __future__ import annotations

import pytest

from rft.config.data import SourceConfig
from rft.data.sources import expand
from rft.data.sources import write_rows as write_python_rows
from rft.errors import DataError
from support.data import write_rows

ROW = [{"text": "x"}]


def names(tmp_path, path):
    return [file.path.relative_to(tmp_path).as_posix() for file in expand([SourceConfig(path=str(path))], "data.train")]


@pytest.fixture
def tree(tmp_path):
    for name in ("a/2.jsonl", "a/1.jsonl", "a/deep/3.json", "b.jsonl", "a/.hidden/x.jsonl"):
        write_rows(tmp_path / name, ROW)
    (tmp_path / "a/README.txt").write_text("about")
    (tmp_path / "a/z.jsonl.gz").write_bytes(b"")
    (tmp_path / "t").mkdir()
    (tmp_path / "t/one.txt").write_text("line")
    return tmp_path


def test_glob_gives_files_in_the_order_of_their_names(tree):
    assert names(tree, tree / "a/*.jsonl") == ["a/1.jsonl", "a/2.jsonl"]
    assert names(tree, tree / "**/*.jsonl") == ["a/1.jsonl", "a/2.jsonl", "b.jsonl"]


def test_directory_gives_its_json_files_and_those_below_but_no_hidden_ones_and_no_readme(tree):
    assert names(tree, tree / "a") == ["a/1.jsonl", "a/2.jsonl", "a/deep/3.json", "a/z.jsonl.gz"]


def test_directory_of_text_files_gives_these(tree):
    assert names(tree, tree / "t") == ["t/one.txt"]


def test_file_whose_name_looks_like_a_glob_is_a_file(tree):
    write_rows(tree / "part[1].jsonl", ROW)
    assert names(tree, tree / "part[1].jsonl") == ["part[1].jsonl"]


def test_sources_keep_the_order_of_the_config(tree):
    configs = [SourceConfig(path=str(tree / "b.jsonl")), SourceConfig(path=str(tree / "a/*.jsonl"), format="text")]
    files = expand(configs, "data.train")
    assert [file.path.name for file in files] == ["b.jsonl", "1.jsonl", "2.jsonl"]
    assert [file.spec()["format"] for file in files] == ["auto", "text", "text"]


@pytest.mark.parametrize(
    ("path", "problem", "do"),
    [
        ("a/*.csv", "matches no file", ""),
        ("b.jsnl", "does not exist", "b.jsonl"),
        ("nowhere/x.jsonl", "does not exist", "does not exist either"),
        ("empty", "holds no data files", ""),
        ("x.parquet", "this kind of file is not read", "convert"),
    ],
)
def test_path_that_gives_nothing_is_an_error_that_names_the_key(tree, path, problem, do):
    (tree / "empty").mkdir()
    (tree / "x.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=problem) as raised:
        names(tree, tree / path)
    assert raised.value.where == "data.train.0.path"
    assert do in raised.value.do


def test_remote_paths_are_refused_by_name(tree):
    with pytest.raises(DataError, match="s3://bucket/x"):
        expand([SourceConfig(path="s3://bucket/x.jsonl")], "data.train")


def test_rows_from_python_become_json_lines(tmp_path):
    path = tmp_path / "rows"
    assert write_python_rows(({"text": f"é{n}\n"} for n in range(3)), path) == 3
    assert path.read_text("utf-8") == "".join(f'{{"text": "é{n}\\n"}}\n' for n in range(3))


@pytest.mark.parametrize("row", ["text", {"text": object()}, {"text": float("nan")}, {"text": "\ud800"}])
def test_row_from_python_that_is_no_json_object_is_named_by_its_number(tmp_path, row):
    with pytest.raises(DataError) as raised:
        write_python_rows([{"text": "fine"}, row], tmp_path / "rows")
    assert raised.value.where == "rows:2"
