"""Hosts with limited links on one machine: network namespaces around a switch that is one, too.

Each host is a network namespace with one interface, ``eth0``; its other end is a port of a bridge
in a namespace of its own. A token bucket at either end limits what the host sends and what it
receives, so that links are full-duplex and shared by the ranks of a host, as a network card is.
Nothing is ever made outside these namespaces, so deleting them removes all of it.

Settings, and why:

* A small bucket (`BURST`). What fits into it travels faster than the rate; with the 256 kB that are
  often recommended, that would be most of a message of an allreduce.
* Reno, the congestion control that every kernel lets a namespace choose: BBR all but stops every
  ten seconds to measure its round trip.
* No slow start after idling: a link is idle between two steps, and its capacity does not change.
* At most 64 KiB of a connection wait at the link, as at a real card. Acknowledgements of what comes
  in queue there, too; behind a whole message they would slow down the rank that sends it (a ring
  over four hosts: 46 instead of 35 ms).
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "pydtnn"
"""Namespaces are called pydtnn-PID-switch and pydtnn-PID-host0, after the process they serve."""

BURST = 16 * 1024
"""Size of the token buckets in B: 0.13 ms at 1 Gbit/s."""

QUEUE = 64 * 2**20
"""Bytes that may wait for tokens: more than is ever under way, so that no packet is dropped."""

MTU = 9000
"""Bytes of an Ethernet frame's payload."""

TCP = {
    "tcp_congestion_control": "reno",
    "tcp_slow_start_after_idle": "0",
    "tcp_limit_output_bytes": "65536",
}
"""Settings of TCP in every namespace."""

RATE = re.compile(r"(\d+(?:\.\d+)?)([kmg]?)bit")


def bits_per_second(rate: str) -> float:
    """Read a rate as `tc` writes it: ``1gbit``, ``100mbit``.

    Raises
    ------
    ValueError
        For anything else.
    """
    found = RATE.fullmatch(rate.lower())
    if found is None or not float(found[1]):
        raise ValueError(f"cluster: expected a rate such as 1gbit or 100mbit, not {rate!r}.")
    return float(found[1]) * {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}[found[2]]


def why_no_hosts() -> str:
    """Say why hosts cannot be made here; empty where they can."""
    if os.geteuid() != 0:
        return "network namespaces can be made by root only"
    missing = [program for program in ("ip", "tc", "unshare") if shutil.which(program) is None]
    if missing:
        return f"no {' and no '.join(missing)} (Debian, Ubuntu: iproute2, util-linux)"
    return ""


class Hosts:
    """Hosts that exist as long as the `with` block does.

    Parameters
    ----------
    count : int
        Number of hosts, from 1.
    rate : str
        Of every link, in each direction, as `tc` writes it.

    Attributes
    ----------
    names : list of str
        The namespaces.
    addresses : list of str
        Their addresses in `SUBNET`.
    """

    SUBNET = "10.77.0.0/24"

    def __init__(self, count: int, rate: str) -> None:
        if not 1 <= count <= 250:
            raise ValueError(f"cluster: expected 1 to 250 hosts, not {count}.")
        bits_per_second(rate)
        own = f"{PREFIX}-{os.getpid()}"
        self.rate = rate
        self.switch = f"{own}-switch"
        self.names = [f"{own}-host{i}" for i in range(count)]
        self.addresses = [f"10.77.0.{i + 1}" for i in range(count)]

    def __enter__(self) -> Hosts:
        remove_abandoned()
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._remove()

    def enter(self, host: int) -> list[str]:
        """What to put before a command to run it on a host: with its own name and shared memory.

        The hosts know each other's names, as programs look up the address of their own one.
        """
        name = self.names[host]
        known = "\\n".join(f"{a} {n}" for a, n in zip(self.addresses, self.names, strict=True))
        settle = (
            f"mount -t tmpfs tmpfs /dev/shm && hostname {name} && "
            rf"printf '127.0.0.1 localhost\n{known}\n' > /dev/shm/hosts && "
            'mount --bind /dev/shm/hosts /etc/hosts && exec "$@"'
        )
        return [*_inside(name), "unshare", "--uts", "--ipc", "sh", "-c", settle, "sh"]

    def _make(self) -> None:
        _do("ip", "netns", "add", self.switch)
        _do("ip", "-n", self.switch, "link", "add", "name", "bridge0", "type", "bridge")
        _do("ip", "-n", self.switch, "link", "set", "bridge0", "up")
        for i, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            port = f"port{i}"
            _do("ip", "netns", "add", name)
            _do(
                *("ip", "link", "add", "name", port, "netns", self.switch, "type", "veth"),
                *("peer", "name", "eth0", "netns", name),
            )
            _do("ip", "-n", self.switch, "link", "set", port, "master", "bridge0")
            _do("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            _do("ip", "-n", name, "link", "set", "lo", "up")
            for space, device in ((name, "eth0"), (self.switch, port)):
                _do("ip", "-n", space, "link", "set", device, "mtu", str(MTU), "up")
                bucket = ("tbf", "rate", self.rate, "burst", str(BURST), "limit", str(QUEUE))
                _do("tc", "-n", space, "qdisc", "replace", "dev", device, "root", *bucket)
            for key, value in TCP.items():
                _do(*_inside(name), "sh", "-c", f"echo {value} > /proc/sys/net/ipv4/{key}")

    def _remove(self) -> None:
        with _uninterrupted():
            for name in (*self.names, self.switch):
                remove(name)


def remove(name: str) -> None:
    """End what runs in a namespace and delete it; do nothing if there is none."""
    for _ in range(50):  # a process may start another one before it is killed
        pids = _run("ip", "netns", "pids", name).stdout.split()
        if not pids:
            break
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.02)
    _run("ip", "netns", "delete", name)


def remove_abandoned() -> None:
    """Remove the namespaces of processes that were killed before they could do it."""
    for line in _run("ip", "netns", "list").stdout.splitlines():
        name = line.split()[0]
        found = re.fullmatch(rf"{PREFIX}-(\d+)-(switch|host\d+)", name)
        if found and not Path("/proc", found[1]).exists():
            remove(name)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let a second Ctrl-C wait, also for the programs that are started meanwhile."""
    before = signal.pthread_sigmask(
        signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    )
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _inside(name: str) -> list[str]:
    return ["ip", "netns", "exec", name]


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True)


def _do(*command: str) -> None:
    done = _run(*command)
    if done.returncode:
        reason = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
        raise RuntimeError(f"cluster: `{' '.join(command)}` failed: {reason}.")
