"""Emulated hosts: what is asked of them is checked, what they print is read, nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import wait_for

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def hosts():
    """The class, where this machine lets us make hosts."""
    from benchmarks.comm.cluster_hosts import Hosts, why_no_hosts

    if reason := why_no_hosts():
        pytest.skip(reason)
    try:
        with Hosts(1, "1gbit"):
            pass
    except RuntimeError as error:
        pytest.skip(f"namespaces are not allowed here: {error}")
    return Hosts


def spaces() -> list[str]:
    """The namespaces of this process."""
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    return [name for name in names.split() if name.startswith(f"pydtnn-{os.getpid()}-")]


def test_rates_are_read_as_tc_writes_them_and_others_refused_in_a_sentence():
    from benchmarks.comm.cluster_hosts import Hosts, bits_per_second

    assert bits_per_second("2.5Gbit") == pytest.approx(2.5e9)
    assert bits_per_second("800kbit") == pytest.approx(8e5)
    for rate in ("fast", "0gbit", "1 gbit", "1gbyte", "-1mbit"):
        with pytest.raises(ValueError, match="expected a rate such as 1gbit"):
            Hosts(2, rate)


def test_hosts_are_linked_and_vanish(hosts):
    with hosts(3, "1gbit") as three:
        assert len(spaces()) == 4
        done = subprocess.run([*three.enter(2), "hostname"], capture_output=True, text=True)
        assert done.stdout.strip() == three.names[2]
        listing = subprocess.run(
            ["tc", "-n", three.names[1], "qdisc", "show", "dev", "eth0"],
            capture_output=True,
            text=True,
        )
        assert "tbf" in listing.stdout
        assert "rate 1Gbit" in listing.stdout
    assert spaces() == []


def test_hosts_vanish_after_an_error_with_all_that_runs_there(hosts):
    def fail():
        with hosts(1, "100mbit") as one:
            sleepers.append(subprocess.Popen([*one.enter(0), "sleep", "600"]))
            pids = ["ip", "netns", "pids", one.names[0]]
            wait_for(lambda: subprocess.run(pids, capture_output=True).stdout)
            raise ZeroDivisionError

    sleepers: list[subprocess.Popen] = []
    with pytest.raises(ZeroDivisionError):
        fail()
    assert sleepers[0].wait(300) == -signal.SIGKILL
    assert spaces() == []


def test_what_a_killed_program_left_is_removed_by_the_next(hosts):
    code = (
        "import os, signal, sys; sys.path.insert(0, sys.argv[1])\n"
        "from benchmarks.comm.cluster_hosts import Hosts\n"
        "with Hosts(1, '1gbit'): os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(ROOT)]) as killed:
        pass
    with hosts(1, "1gbit"):
        names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert f"pydtnn-{killed.pid}-" not in names


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_commands_run_on_all_ranks_until_they_end_or_are_interrupted(hosts, number):
    from benchmarks.comm.cluster_launch import why_not

    if reason := why_not():
        pytest.skip(reason)
    cluster = "-m benchmarks.comm.cluster --hosts 2 --ranks 1 --"
    program = [sys.executable, *cluster.split()]
    done = subprocess.run([*program, "hostname"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert {name.rpartition("-")[2] for name in done.stdout.split()} == {"host0", "host1"}

    process = subprocess.Popen(
        [*program, "sh", "-c", "echo here; sleep 600"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "here\n"
    process.send_signal(number)
    process.communicate(timeout=300)
    assert process.returncode == 128 + number
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert f"pydtnn-{process.pid}-" not in names


def test_the_place_of_ssh_is_taken_by_a_script_that_knows_every_host(tmp_path):
    from benchmarks.comm.cluster_launch import AGENT, Cluster

    cluster = Cluster(2, 2, "1gbit")
    script = tmp_path / "agent"
    script.write_text(AGENT.format(cases="\n".join(map(cluster._case, range(2)))))
    subprocess.run(["sh", "-n", str(script)], check=True)
    done = subprocess.run(
        ["sh", str(script), "-x", "10.9.9.9", "true"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "no host has the address 10.9.9.9" in done.stderr


def test_what_the_programs_print_is_read():
    from benchmarks.comm.cluster_table import (
        EPOCHS,
        STEPS,
        read_allreduces,
        read_share,
        read_training,
    )

    text = (
        "     bytes algorithm            median us    min us / vendor  predicted / median\n"
        "   2600000 vendor                 45320.0   33780.0     1.00\n"
        "   2600000 ring                   32330.0   32220.0     1.52    31920.0     0.99\n"
    )
    assert dict(read_allreduces(text)) == {"vendor": (0.04532, None), "ring": (0.03233, 0.03192)}
    text = (
        "default                         95.21     12\n"
        "default, 4 buckets: 0.987 of the speed of hierarchical 128 KiB\n"
    )
    assert read_share(text) == 0.987
    text = (
        "epoch 2/2  loss 2.0  lr 0.01  118 samples/s  4.4 s\n"
        "samples/s               119\n"
        "time in compute        4.0 s\n"
        "time in communication  6.0 s not overlapped with computation\n"
        "exchanged per rank     33.6 MB\n"
    )
    assert read_training(text) == pytest.approx((119, 0.6, 33.6 / (STEPS * EPOCHS)))
