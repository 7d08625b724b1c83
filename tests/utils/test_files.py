from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from pydtnn.cli.parser import Arguments
from pydtnn.data import Tokenizer, cifar, load_folder, load_text
from pydtnn.kernels.autotuner import AutotunerFile, Winner
from pydtnn.model.partition.plan import find_plan
from pydtnn.saving import load
from pydtnn.tools.interchange import import_onnx
from pydtnn.tools.interchange.files import read_state_dict
from pydtnn.tools.perfmodel import Platform
from pydtnn.tools.shards import verify_shards
from pydtnn.tools.tracing import read_traces
from pydtnn.utils.files import (
    MIN_LIMIT,
    check_expansion,
    fill_folder,
    open_file,
    path_inside,
    read_file,
)
from tests.data.image_files import write_images
from tests.each import each


def pipe(path: Path) -> None:
    os.mkfifo(path)


def bound(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


@each(
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
def test_only_regular_files_are_read_and_others_do_not_block(tmp_path, make, error, reason):
    make(tmp_path / "x")
    with pytest.raises(error, match=reason):
        read_file("test", tmp_path / "x")


def test_a_name_with_a_zero_byte_is_an_error_of_the_file():
    with pytest.raises(OSError, match=r"test: cannot read 'a.x00': embedded null byte"):
        read_file("test", "a\0")


def without_blocks(path: Path, content: bytes = b"{") -> None:
    path.write_bytes(content)
    os.truncate(path, 1 << 42)  # no memory has so much


READERS: dict[str, Callable[[Path], object]] = {
    "model.onnx": lambda path: import_onnx(path),
    "state.pth": lambda path: read_state_dict("test", path),
    "platform.yaml": lambda path: Platform.load(path),
    "config.yaml": lambda path: Arguments([f"--config={path}"]),
    "tokenizer.json": lambda path: Tokenizer(path),
    "rank-0000.npz": lambda path: read_traces(path.parent),
    "train/index.json": lambda path: verify_shards(path.parents[1]),
    "data_batch_1": lambda path: cifar._read_python("cifar10", path, "labels", 10),
    "text.txt": load_text,
    "plan.yaml": lambda path: find_plan(str(path), ["a"]),
}


@each("make", [pipe, without_blocks])
@each("name", READERS)
def test_neither_a_named_pipe_nor_a_file_of_any_length_without_blocks_on_the_disk_is_read(
    name, make, tmp_path
):
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    make(file)
    with pytest.raises((OSError, ValueError), match="at most|are holes|named pipe|not exist"):
        READERS[name](file)


def test_a_folder_of_images_does_not_wait_for_a_named_pipe(tmp_path):
    write_images(tmp_path)
    pipe(tmp_path / "train" / "ant" / "pipe.png")
    with pytest.raises(OSError, match="named pipe"):
        load_folder(data_dir=tmp_path)[0].read([0, 1, 2, 3, 4, 5])


def test_holes_that_others_than_strangers_make_are_read(tmp_path):
    file = tmp_path / "x"
    for length, written in ((MIN_LIMIT, 1), (MIN_LIMIT + 1, 1 << 20)):
        file.write_bytes(b"a" * written)
        os.truncate(file, length)
        with open_file("test", file) as opened:
            assert opened.read(1) == b"a"  # from the beginning
    with pytest.raises(ValueError, match="test: .*/x must have at most 9 B, got 67,108,865 B"):
        open_file("test", file, 9)


def test_choices_of_algorithms_do_not_wait_for_a_named_pipe(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PYDTNN_CACHE", str(tmp_path))
    file = AutotunerFile("machine")
    os.mkfifo(file.path)
    choice = Winner("direct", {"direct": 1.0})
    assert file.add("one thread", "conv", 4, choice) == choice
    assert "cannot be stored" in caplog.text


@each("name", ["", ".", "..", "../x", "/x", "a/b", "a\\b", "a\nb", 3, None])
def test_a_name_in_a_file_is_a_plain_name(tmp_path, name):
    with pytest.raises(ValueError, match="test: expected plain names of files in .*; use files fr"):
        path_inside("test", tmp_path, name)


def test_links_are_followed_inside_of_a_folder_only(tmp_path):
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


@each("name", ["SHA256SUMS", "model.json", "weights.safetensors"])
def test_a_file_of_a_model_is_no_link_that_leaves_it_no_pipe_and_has_no_holes(name, tmp_path):
    fill_folder(tmp_path / "m", {"model.json": b"{}", "weights.safetensors": b"x"})
    file = tmp_path / "m" / name
    file.rename(tmp_path / name)
    file.symlink_to(tmp_path / name)
    with pytest.raises(ValueError, match=f"{name} cannot be read .*, a link to .*{name}"):
        load(tmp_path / "m")
    (tmp_path / name).rename(file)
    without_blocks(file, file.read_bytes())
    with pytest.raises(ValueError, match=f"{name} cannot be read .*(at most|are holes)"):
        load(tmp_path / "m")
    file.unlink()
    pipe(file)
    with pytest.raises(ValueError, match=f"{name} cannot be read .*named pipe"):
        load(tmp_path / "m")


def test_data_may_expand_to_a_hundred_times_their_length():
    check_expansion("it", 10, MIN_LIMIT)
    check_expansion("it", 1 << 20, 100 << 20)
    with pytest.raises(ValueError, match="it expands from 1,048,576 B to 104,857,601 B, more than"):
        check_expansion("it", 1 << 20, (100 << 20) + 1)
