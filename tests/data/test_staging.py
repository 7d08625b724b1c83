from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from pydtnn.data import load_shards, pack_shards
from pydtnn.data.shards import stage_shards, staged_folder
from tests.data.image_files import read_all, write_images
from tests.data.test_shards import forge


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    pack_shards(write_images(tmp_path / "images"), tmp_path / "shards", shard_bytes=600)
    return tmp_path / "shards"


def test_a_copy_has_the_same_samples_and_is_made_once_unless_it_has_changed(shards, tmp_path):
    copy = stage_shards(shards, tmp_path / "local")
    assert copy == staged_folder(shards, tmp_path / "local")
    for one, other in zip(load_shards(data_dir=shards), load_shards(data_dir=copy), strict=True):
        np.testing.assert_array_equal(read_all(one)[0], read_all(other)[0])
    before = {path: path.stat().st_ino for path in copy.rglob("*.tar")}
    missing = sorted(before)[1]
    missing.unlink()
    assert stage_shards(shards, tmp_path / "local") == copy
    after = {path: path.stat().st_ino for path in copy.rglob("*.tar")}
    assert {path for path in after if after[path] == before[path]} >= {*before} - {missing}
    assert missing.exists()
    path = sorted(copy.rglob("*.tar"))[0]
    right = path.read_bytes()
    path.write_bytes(right[:-9] + b"x" + right[-8:])
    stage_shards(shards, tmp_path / "local", check=False)  # lengths are equal
    assert path.read_bytes() != right
    stage_shards(shards, tmp_path / "local")
    assert path.read_bytes() == right


def test_nothing_is_written_outside_of_the_folder_of_the_copy(shards, tmp_path):
    (tmp_path / ".bashrc.tar").write_bytes((shards / "train" / "shard-000000.tar").read_bytes())
    forge(shards, lambda content: content["shards"][0].update(name="../../.bashrc.tar"))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match="plain names of files"):
        stage_shards(shards, tmp_path / "local")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("level", [0, 2])
def test_a_copy_is_not_written_through_a_link(shards, tmp_path, level):
    """Another user may have made the link: the name of the folder can be guessed."""
    copy, outside = staged_folder(shards, tmp_path / "local"), tmp_path / "outside"
    link = (copy, copy / "train", copy / "train" / "shard-000000.tar")[level]
    link.parent.mkdir(parents=True)
    outside.mkdir()
    link.symlink_to(outside / "file" if level == 2 else outside)
    with pytest.raises(ValueError, match="stage: .*a link to .*outside"):
        stage_shards(shards, tmp_path / "local")
    assert not list(outside.iterdir())


def test_a_shard_that_has_changed_is_not_copied(shards, tmp_path):
    path = shards / "train" / "shard-000001.tar"
    data = bytearray(path.read_bytes())
    data[700] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"^stage: .*shard-000001\.tar does not match its checksu"):
        stage_shards(shards, tmp_path / "local")
    copy = staged_folder(shards, tmp_path / "local")
    assert [path.name for path in sorted(copy.rglob("*.tar"))] == ["shard-000000.tar"]
    os.remove(shards / "test" / "index.json")
    with pytest.raises(FileNotFoundError, match="index.json does not exist"):
        stage_shards(shards, tmp_path / "local")
