"""Paths of the config: files, globs, directories, and rows from Python."""

from __future__ import annotations

import re
import tarfile
import zipfile

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


@pytest.mark.parametrize("kind", ["zip", "tar.gz"])
def test_archive_gives_its_data_files_by_the_rules_of_a_folder(tree, kind):
    path = tree / f"set.{kind}"
    names = ("b/2.jsonl", "b/1.jsonl", "README.txt", "__MACOSX/._1.jsonl", ".hidden/x.jsonl")
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            for name in names:
                archive.writestr(name, "{}")
    else:
        with tarfile.open(path, "w:gz") as archive:
            for name in names:
                archive.addfile(tarfile.TarInfo(name))
    files = expand([SourceConfig(path=str(path))], "data.train")
    assert [(file.path, file.member) for file in files] == [(path, "b/1.jsonl"), (path, "b/2.jsonl")]
    assert files[0].name == f"{path}/b/1.jsonl"


@pytest.mark.parametrize("name", ["../evil.jsonl", "/etc/evil.jsonl", "link"])
def test_bo_43_archive_that_reaches_outside_is_refused_and_nothing_is_written(tree, name):
    before = sorted(tree.rglob("*"))
    with tarfile.open(tree / "x.tar.gz", "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("data.jsonl"))
        info = tarfile.TarInfo(name)
        if name == "link":
            info.type, info.linkname = tarfile.SYMTYPE, ".."
        archive.addfile(info)
    with zipfile.ZipFile(tree / "x.zip", "w") as archive:
        archive.writestr("data.jsonl", "{}")
        zipped = zipfile.ZipInfo(name)
        zipped.create_system, zipped.external_attr = 3, (0o120777 if name == "link" else 0o100644) << 16
        archive.writestr(zipped, "..")
    for archive in ("x.tar.gz", "x.zip"):
        with pytest.raises(DataError, match=f'member "{re.escape(name)}"') as raised:
            names(tree, tree / archive)
        assert raised.value.where == str(tree / archive)
        (tree / archive).unlink()
    assert sorted(tree.rglob("*")) == before


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
        ("a/mixed", r"several kinds: JSON \(1.jsonl\) and Parquet \(2.parquet\)", "a/mixed/**/*.jsonl"),
        ("x.zip", "member 'inner.tar.gz' is an archive itself", "unpack"),
        ("notes.zip", "notes.zip holds no data files", ""),
        ("broken.zip", "archive is damaged", "again"),
    ],
)
def test_path_that_gives_nothing_is_an_error_that_names_the_key(tree, path, problem, do):
    (tree / "empty").mkdir()
    write_rows(tree / "a/mixed/1.jsonl", ROW)
    (tree / "a/mixed/2.parquet").write_bytes(b"PAR1")
    for name, member in (("x.zip", "inner.tar.gz"), ("notes.zip", "x.pdf")):
        with zipfile.ZipFile(tree / name, "w") as archive:
            archive.writestr(member, b"")
    (tree / "broken.zip").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(DataError, match=problem) as raised:
        names(tree, tree / path)
    assert raised.value.where in ("data.train.0.path", str(tree / path))
    assert do in raised.value.do


def test_rows_from_python_become_json_lines(tmp_path):
    path = tmp_path / "rows"
    assert write_python_rows(({"text": f"é{n}\n"} for n in range(3)), path) == 3
    assert path.read_text("utf-8") == "".join(f'{{"text": "é{n}\\n"}}\n' for n in range(3))


@pytest.mark.parametrize("row", ["text", {"text": object()}, {"text": float("nan")}, {"text": "\ud800"}])
def test_row_from_python_that_is_no_json_object_is_named_by_its_number(tmp_path, row):
    with pytest.raises(DataError) as raised:
        write_python_rows([{"text": "fine"}, row], tmp_path / "rows")
    assert raised.value.where == "rows:2"
