from __future__ import annotations

from pathlib import Path

import pytest

from pydtnn.data import data_folder
from pydtnn.data.download import DiskLayout, SourceFile, locate
from tests.each import each

LAYOUTS = (DiskLayout(("first", "."), ("a", "b")), DiskLayout(("second",), ("c",)))


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_the_argument_goes_before_the_variable_and_that_before_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PYDTNN_DATA", str(tmp_path / "variable"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert data_folder(tmp_path) == tmp_path
    assert data_folder() == tmp_path / "variable"
    monkeypatch.delenv("PYDTNN_DATA")
    assert data_folder() == tmp_path / "cache" / "pydtnn"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data_folder() == tmp_path / ".cache" / "pydtnn"
    assert data_folder("~/data") == tmp_path / "data"


def test_files_are_found_in_any_folder_of_any_layout_gzipped_or_not(tmp_path):
    touch(tmp_path / "second" / "c")
    assert locate("it", LAYOUTS, tmp_path) == (1, [tmp_path / "second" / "c"])
    touch(tmp_path / "a", tmp_path / "b.gz")
    assert locate("it", LAYOUTS, tmp_path) == (0, [tmp_path / "a", tmp_path / "b.gz"])
    touch(tmp_path / "first" / "a", tmp_path / "b")  # which is not complete
    assert locate("it", LAYOUTS, tmp_path)[1] == [tmp_path / "a", tmp_path / "b"]


def test_files_are_fetched_only_where_they_are_missing(tmp_path, monkeypatch):
    fetched, sources = [], (SourceFile("url", "sum", "first"),)

    def fetch(*arguments: object) -> None:
        fetched.append(arguments)
        touch(tmp_path / "new" / "first" / "a", tmp_path / "new" / "first" / "b")

    monkeypatch.setattr("pydtnn.data.download.fetch", fetch)
    for _ in range(2):
        assert locate("it", LAYOUTS, tmp_path / "new", sources)[0] == 0
    assert fetched == [("it", sources, tmp_path / "new")]


@each("files", [[], ["first/a"]])
def test_missing_files_are_told_with_the_way_to_get_them(tmp_path, files):
    reason = r"it: expected a, b or c in \S* or its folder first; specify the folder .* --download"
    touch(*(tmp_path / file for file in files))
    with pytest.raises(FileNotFoundError, match=reason):
        locate("it", LAYOUTS, tmp_path)
