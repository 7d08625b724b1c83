"""Platforms: files, errors in them, and networks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pydtnn.tools.perfmodel.platform import FOLDER, Platform, platform_names
from tests.each import each

TEXT = (FOLDER / "laptop.yaml").read_text()


def edited(tmp_path: Path, old: str, new: str) -> Path:
    """The path of a copy of a platform file with one change."""
    assert TEXT.count(old) == 1
    path = tmp_path / "edited.yaml"
    path.write_text(TEXT.replace(old, new))
    return path


@each("name", platform_names())
def test_a_saved_platform_is_loaded_unchanged(name, tmp_path):
    platform = Platform.load(name)
    assert platform.name == name
    assert Platform.load(FOLDER / f"{name}.yaml") == platform
    platform.save(tmp_path / "x.yaml")
    assert Platform.load(tmp_path / "x.yaml") == platform


CALL = "  call: 15 us"


@each(
    ("old", "new", "message"),
    [
        ("latency: 50 us", "latency: 50", r"messages.between.latency: expected a numb"),
        ("latency: 50 us", "latency: -50 us", "messages.between.latency: expected a finite"),
        ("  threads: 1\n", "", "expected an entry 'compute.threads', got none"),
        ("threads: 1", "threads: 0", "compute.threads must be at least 1, got 0"),
        ("threads:", "thread:", "'compute.thread'; did you mean 'compute.threads'"),
        ("    float64: 45", "    flaot64: 45", "unknown dtype 'flaot64'"),
        (CALL, "  rates: {conv 3x3: 1 Gflop/s}", "compute.rates: expected a class, chann"),
        (CALL, "  rates: {'conv 3x4, 64, forward': 1 Gflop/s}", "unknown class 'conv 3x4'"),
        (CALL, "  rates: {'linear, 64, forwards': 1 Gflop/s}", "unknown direction 'forwards'"),
        (CALL, "  bandwidths: {'norms, forward': 1 GB/s}", "unknown class 'norms, forward'"),
        ("name: laptop", "name: [", "edited.yaml: expected a YAML file: "),
        (
            "  add: 8 GB/s",
            "  collectives: {'broadcast, 2 ranks, 64': 1 ms}",
            "been removed: delete",
        ),
        ("  add: 8 GB/s", "  classes: [3]", r"classes\[0\]: expected entries 'name: value'"),
    ],
)
def test_an_error_in_a_file_is_one_sentence_with_the_entry(tmp_path, old, new, message):
    with pytest.raises(ValueError, match=message) as error:
        Platform.load(edited(tmp_path, old, new))
    assert "\n" not in str(error.value)


@each("content", [b"", b"\xff\xfe", b"- a", b"a: *b"])
def test_a_file_that_is_not_a_platform_is_refused(tmp_path, content):
    (tmp_path / "x.yaml").write_bytes(content)
    with pytest.raises(ValueError, match="x.yaml: expected "):
        Platform.load(tmp_path / "x.yaml")


def test_unknown_names_and_missing_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="unknown platform 'cpu-1gb'; did you mean 'cpu-1gbit'"):
        Platform.load("cpu-1gb")
    with pytest.raises(FileNotFoundError, match="platform: file .*x.yaml does not exist"):
        Platform.load(tmp_path / "x.yaml")


def test_the_network_has_the_links_of_the_file():
    laptop = Platform.load("laptop")
    network = laptop.network(6)
    assert network.routes[0, 0] == (1e-6, 6e9, ("inside 0",))
    assert network.routes[0, 1] == (50e-6, 125e6, ("from 0", "to 1"))
    assert network.links["inside 1"] == 15e9
    assert network.links["from 1"] == 125e6
    assert network.add == 1 / 8e9
    between = replace(laptop.messages.between, shared=1e9)  # a card faster than one message
    network = replace(laptop, messages=replace(laptop.messages, between=between)).network(5)
    assert network.links["from 0"] == 1e9
    assert network.routes[0, 1].bandwidth == 125e6


def test_the_time_of_a_checkpoint_is_that_of_its_bytes():
    storage = Platform.load("laptop").storage
    assert replace(storage, write=2e9).checkpoint(1e9) == 0.5
    assert replace(storage, write=None).checkpoint(1e9) == 0


def test_the_link_between_hosts_depends_on_the_number_of_ranks():
    abci = Platform.load("abci")
    assert abci.hosts(6) == (0, 0, 0, 0, 1, 1)
    found = [abci.network(ranks).routes[0, 1].latency for ranks in (8, 68, 69, 136, 137)]
    assert found == [30.31e-6, 30.31e-6, 30.49e-6, 30.49e-6, 30.98e-6]
