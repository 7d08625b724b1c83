from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from pydtnn.data import load_folder, load_text
from pydtnn.kernels.autotuner import AutotunerFile, Winner
from pydtnn.model.partition.plan import find_plan
from pydtnn.saving import load
from pydtnn.tracing import read_traces
from pydtnn.utils.files import MIN_LIMIT, check_expansion, path_inside, read_file
from tests.data.image_files import write_images


def pipe(path: Path) -> None:
    os.mkfifo(path)


def bound(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


@pytest.mark.parametrize(
    ("make", "error", "reason"),
    [
        (pipe, OSError, "test: expected a regular file, got the named pipe .*/x; remove or repl"),
        (bound, OSError, "test: expected a regular file, got the socket .*/x; remove or replace"),
        (lambda path: path.symlink_to("/dev/zero"), OSError, "regular file, got the device .*/x"),
        (Path.mkdir, IsADirectoryError, "test: cannot read .*/x: is a directory"),
        (lambda path: None, FileNotFoundError, "test: file .*/x does not exist"),
        (lambda path: path.symlink_to(path), OSError, "test: cannot read .*/x: too many levels"),
    ],
)
def test_only_regular_files_are_read_and_others_do_not_block(
    tmp_path: Path, make: Callable[[Path], object], error: type[OSError], reason: str
) -> None:
    make(tmp_path / "x")
    with pytest.raises(error, match=reason):
        read_file("test", tmp_path / "x")


def test_a_name_with_a_zero_byte_is_an_error_of_the_file() -> None:
    with pytest.raises(OSError, match=r"test: cannot read 'a.x00': embedded null byte"):
        read_file("test", "a\0")


def in_folder(path: Path) -> None:
    write_images(path)
    os.mkfifo(path / "train" / "ant" / "pipe.png")
    load_folder(data_dir=path)[0].read([0, 1, 2, 3, 4, 5])


def in_traces(path: Path) -> None:
    path.mkdir()
    os.mkfifo(path / "rank-0000.npz")
    read_traces(path)


def in_model(path: Path) -> None:
    path.mkdir()
    for name in ("SHA256SUMS", "model.json", "weights.safetensors"):
        os.mkfifo(path / name)
    load(path)


def in_text(path: Path) -> None:
    os.mkfifo(path)
    load_text(path)


def in_plan(path: Path) -> None:
    path = path.with_suffix(".yaml")
    os.mkfifo(path)
    find_plan(str(path), ["a"])


@pytest.mark.parametrize("read", [in_folder, in_traces, in_model, in_text, in_plan])
def test_readers_of_files_refuse_a_named_pipe(tmp_path: Path, read: Callable[[Path], None]) -> None:
    with pytest.raises((OSError, ValueError), match="named pipe|found no file|does not exist"):
        read(tmp_path / "x")


@pytest.mark.parametrize("suffix", [".json", ".lock"])
def test_choices_of_algorithms_do_not_wait_for_a_named_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PYDTNN_CACHE", str(tmp_path))
    file = AutotunerFile("machine")
    os.mkfifo(file.path.with_suffix(suffix))
    choice = Winner("direct", {"direct": 1.0})
    assert file.add("one thread", "conv", 4, choice) == choice
    assert "cannot be stored" in caplog.text


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "/x", "a/b", "a\\b", "a\nb", 3, None])
def test_a_name_in_a_file_is_a_plain_name(tmp_path: Path, name: object) -> None:
    with pytest.raises(ValueError, match="test: expected plain names of files in .*; use files fr"):
        path_inside("test", tmp_path, name)


def test_links_are_followed_inside_of_a_folder_only(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "file").touch()
    (folder / "inside").symlink_to("file")
    (folder / "outside").symlink_to(tmp_path / "other")
    (tmp_path / "link").symlink_to(folder)
    for root in (folder, tmp_path / "link"):
        assert path_inside("test", root, "inside") == root / "inside"
        assert path_inside("test", root, "new") == root / "new"
        with pytest.raises(ValueError, match="got .*/outside, a link to .*/other; replace it by a"):
            path_inside("test", root, "outside")


def test_data_may_expand_to_a_hundred_times_their_length() -> None:
    check_expansion("it", 10, MIN_LIMIT)
    check_expansion("it", 1 << 20, 100 << 20)
    with pytest.raises(ValueError, match="it expands from 1,048,576 B to 104,857,601 B, more than"):
        check_expansion("it", 1 << 20, (100 << 20) + 1)
