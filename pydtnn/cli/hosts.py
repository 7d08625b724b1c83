"""The hosts and ranks in a command of mpirun, and which of the hosts answer."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pydtnn.utils.files import MAX_TEXT_B, read_file

LAUNCHERS = ("mpirun", "mpiexec", "mpiexec.hydra", "prterun", "orterun")
"""Programs whose hosts and ranks are known from their arguments."""

RANKS = ("-n", "-np", "--n", "--np", "-c")

LISTS = ("-host", "--host", "-hosts", "--hosts", "-H")
"""Options with a list of hosts: ``a,b`` or ``a:4,b:4``."""

FILES = ("-f", "-hostfile", "--hostfile", "-machinefile", "--machinefile")
"""Options with a file of hosts, one a line: ``a``, ``a:4`` or ``a slots=4``."""

PROBE = "ssh -o BatchMode=yes -o ConnectTimeout=5 -- {host} true"
"""The command that tests whether a host answers."""

PROBE_TIMEOUT_S = 20.0
"""Longest duration of the command, in s."""

_NAME = re.compile(r"(?!-)([\w.+-]+@(?!-))?[\w.+%\[\]-]+")
"""Of a host, or ``user@host``: nothing that a program takes for an option or a shell for code."""


@dataclass(frozen=True)
class Host:
    """A host with the text that describes it, and the ranks for which it has room."""

    name: str
    text: str
    slots: int = 1


@dataclass(frozen=True)
class HostPlacement:
    """The hosts and ranks in a command of mpirun.

    Attributes
    ----------
    hosts : tuple of Host
        Empty if the command names none.
    ranks : int
        0 if the command has no number of ranks.
    """

    hosts: tuple[Host, ...] = ()
    ranks: int = 0

    def without(self, lost: Sequence[str]) -> HostPlacement:
        """Return the placement on the other hosts, with as many ranks less as they have slots."""
        kept = tuple(host for host in self.hosts if host.name not in lost)
        before = sum(host.slots for host in self.hosts)
        ranks = self.ranks * sum(host.slots for host in kept) // max(before, 1)
        return HostPlacement(kept, max(ranks, 1) if self.ranks and kept else 0)


def read_placement(command: Sequence[str]) -> HostPlacement:
    """Return the hosts and ranks in the arguments of mpirun; none for other programs.

    Parameters
    ----------
    command : sequence of str
        Up to the program that mpirun starts.

    Raises
    ------
    ValueError, OSError
        If a number of ranks is none, the file of hosts cannot be read, or a name is that of no
        host: programs such as ssh take one that begins with a hyphen for an option.
    """
    hosts: list[Host] = []
    ranks = 0
    for option, value in _options(command):
        if option in RANKS:
            if not re.fullmatch("[1-9][0-9]{0,8}", value):
                raise ValueError(f"launch: {option} must be a number of ranks, got {value!r}")
            ranks = int(value)
        elif option in LISTS:
            hosts += [_host(option, text) for text in value.split(",") if text]
        else:
            text = read_file(f"launch: {option}", value, MAX_TEXT_B).decode(errors="replace")
            lines = (line.partition("#")[0].strip() for line in text.splitlines())
            hosts += [_host(value, line) for line in lines if line]
    return HostPlacement(tuple(hosts), ranks)


def place(command: Sequence[str], placement: HostPlacement, file: Path) -> list[str]:
    """Return the command of mpirun for another placement.

    Parameters
    ----------
    command, placement
        See `read_placement`.
    file : Path
        Where hosts are written if the command reads them from a file.
    """
    result = list(command)
    first = True
    for at, option, _, inside in _positions(command):
        if option in RANKS:
            new = str(placement.ranks)
        elif option in LISTS:
            new = ",".join(host.text for host in placement.hosts)
        else:
            file.write_text("".join(f"{host.text}\n" for host in placement.hosts if first))
            new, first = str(file), False
        result[at] = f"{option}={new}" if inside else new
    return result


def silent_hosts(
    hosts: Sequence[Host], probe: str = PROBE, run: Callable[..., object] = subprocess.run
) -> list[str]:
    """Return the names of the hosts that do not answer, in their order.

    Parameters
    ----------
    hosts : sequence of Host
    probe : str
        Command with ``{host}``, of status 0 if the host answers. This host is not asked.
    run : callable
        Runs it; for tests.

    Raises
    ------
    OSError
        If the command cannot be run.
    """
    own = {"localhost", "127.0.0.1", socket.gethostname(), socket.gethostname().partition(".")[0]}
    asked = [name for name in dict.fromkeys(host.name for host in hosts) if name not in own]

    def answers(name: str) -> bool:
        command = [word.replace("{host}", name) for word in shlex.split(probe)]
        try:
            done = run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=PROBE_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return False
        return getattr(done, "returncode", 1) == 0

    if not asked:
        return []
    with ThreadPoolExecutor(min(len(asked), 32)) as pool:
        found = [*pool.map(answers, asked)]
    return [name for name, answered in zip(asked, found, strict=True) if not answered]


def _host(where: str, text: str) -> Host:
    """Read "a", "a:4", "a:4:..." or "a slots=4"."""
    name = re.split(r"[:\s]", text)[0]
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"launch: {where}: expected names of hosts, got {name!r:.200}; write letters, digits, "
            "'.', '_' and '-', and no '-' first"
        )
    slots = re.search(r"(?:^[^:\s]+:|slots\s*=\s*)([1-9][0-9]{0,5})", text)
    return Host(name, text, int(slots[1]) if slots else 1)


def _options(command: Sequence[str]) -> list[tuple[str, str]]:
    return [(option, value) for _, option, value, _ in _positions(command)]


def _positions(command: Sequence[str]) -> list[tuple[int, str, str, bool]]:
    """Return position, option, value, and whether both are one argument, of each known option."""
    if not command or os.path.basename(command[0]) not in LAUNCHERS or ":" in command:
        return []  # ":" separates several programs, each with ranks of its own
    known, found = (*RANKS, *LISTS, *FILES), []
    for at, word in enumerate(command):
        option, equals, value = word.partition("=")
        if option in known and equals:
            found.append((at, option, value, True))
        elif word in known and at + 1 < len(command):
            found.append((at + 1, word, command[at + 1], False))
    return found
