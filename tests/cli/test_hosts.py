"""The hosts and ranks in a command of mpirun."""

from __future__ import annotations

import shlex
import subprocess
from types import SimpleNamespace

import pytest

from pydtnn.cli.hosts import PROBE, Host, HostPlacement, place, read_placement, silent_hosts
from pydtnn.launch import Launch
from tests.each import each


@each(
    "command",
    [
        ["mpirun", "-np", "8", "-hosts", "a:4,b:4"],
        ["/opt/mpich/bin/mpiexec", "-n", "8", "-host", "a:4,b:4"],
        ["mpirun", "--np", "8", "--host=a:4,b:4"],
    ],
)
def test_ranks_and_hosts_are_read_and_replaced(command, tmp_path):
    found = read_placement(command)
    assert found == HostPlacement((Host("a", "a:4", 4), Host("b", "b:4", 4)), 8)
    new = place(command, found.without(["a"]), tmp_path / "hosts")
    assert read_placement(new) == HostPlacement((Host("b", "b:4", 4),), 4)
    assert new[0] == command[0]
    (host,) = read_placement(["mpirun", "-hosts", "user@node-1.rack_é:4"]).hosts
    assert host == Host("user@node-1.rack_é", "user@node-1.rack_é:4", 4)
    assert shlex.split(PROBE)[-3:] == ["--", "{host}", "true"]  # a name is no option of ssh


@each("lines", ["a slots=2\n# none\nb slots=6\n", "a:2\n\nb:6 # two\n"])
def test_a_file_of_hosts_is_read_and_replaced(lines, tmp_path):
    file, new = tmp_path / "given", tmp_path / "hosts"
    file.write_text(lines)
    command = ["mpirun", "--hostfile", str(file), "-np", "8", "--bind-to", "none"]
    found = read_placement(command)
    assert [(host.name, host.slots) for host in found.hosts] == [("a", 2), ("b", 6)]
    again = place(command, found.without(["b"]), new)
    assert again == ["mpirun", "--hostfile", str(new), "-np", "2", "--bind-to", "none"]
    assert new.read_text() == found.hosts[0].text + "\n"
    assert file.read_text() == lines


def test_what_is_unknown_is_not_changed(tmp_path):
    for command in (
        ["srun", "-n", "8", "--nodes=2"],
        ["mpirun", "-np", "2", "a", ":", "-np", "4", "b"],
        [],
    ):
        found = read_placement(command)
        assert found == HostPlacement()
        assert place(command, found, tmp_path / "hosts") == command


def test_a_number_of_ranks_that_is_none_is_refused():
    with pytest.raises(ValueError, match="^launch: -np must be a number of ranks, got 'x'$"):
        read_placement(["mpirun", "-np", "x"])


def test_at_least_one_rank_remains_as_long_as_a_host_does():
    hosts = tuple(Host(name, name) for name in "abc")
    assert HostPlacement(hosts, 3).without(["a"]).ranks == 2
    assert HostPlacement(hosts, 1).without(["a", "b"]).ranks == 1
    assert HostPlacement(hosts, 1).without(["a", "b", "c"]) == HostPlacement()


def test_hosts_that_do_not_answer_are_found_each_once():
    asked = []

    def run(command: list[str], **options: object) -> object:
        asked.append(command)
        if command[1] == "late":
            raise subprocess.TimeoutExpired(command, 1)
        return SimpleNamespace(returncode=command[1] == "gone")

    hosts = [Host(name, name) for name in ("a", "gone", "late", "a", "localhost")]
    assert silent_hosts(hosts, "ask {host}", run) == ["gone", "late"]
    assert sorted(command[1] for command in asked) == ["a", "gone", "late"]


@each("name", ["-oProxyCommand=touch x", "user@-oProxyCommand", "$(touch x)", "a;b"])
def test_a_name_that_a_program_takes_for_an_option_or_for_code_is_refused(name, tmp_path):
    """A probe passes names to ssh, or to a shell if the user's command has one."""
    file = tmp_path / "hosts"
    file.write_text(f"good slots=2\n{name} slots=2\n")
    for option, value in (("-f", str(file)), ("--hostfile", str(file)), ("-hosts", f"b,{name}")):
        with pytest.raises(ValueError, match="expected names of hosts, got") as error:
            Launch(["mpirun", "-np", "2", option, value, "python", "-m", "pydtnn.train"], 1)
        assert repr(name.split(" ")[0]) in str(error.value)
        assert str(file) in str(error.value) or option == "-hosts"
