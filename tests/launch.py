"""Programs under mpiexec: the right one, with what it needs, and never left behind."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

OPENMPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",  # a container's only user
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",  # more ranks than cores (5.0)
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",  # the same for 4.1
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "OMPI_MCA_pml": "ob1",  # without the search for networks ranks start in 0.14 instead of 1.2 s
    "OMPI_MCA_btl": "self,sm",
    "OMPI_MCA_mpi_yield_when_idle": "1",  # ranks that wait leave the core to those that work
}
"""What Open MPI needs on a small machine."""

MPICH = {
    "MPIR_CVAR_POLLS_BEFORE_YIELD": "10",
    "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1",  # as above: 4 ranks on 2 cores reduce 4 times as fast
}
"""What MPICH is faster with there."""


@dataclass(frozen=True)
class Finished:
    """What a program left: its exit status and what its ranks wrote."""

    returncode: int
    stdout: str
    stderr: str


@functools.cache
def mpiexec() -> str | None:
    """Find the mpiexec of this Python's environment, or else of the PATH."""
    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if beside.exists() else shutil.which("mpiexec")


@functools.cache
def why_not() -> str:
    """Say why programs cannot be started on several ranks; empty where they can."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    if mpiexec() is None:
        return "no mpiexec beside Python or in the PATH"
    return ""


@functools.cache
def is_openmpi() -> bool:
    """Whether mpiexec is Open MPI's."""
    version = subprocess.run([str(mpiexec()), "--version"], capture_output=True, text=True)
    return "Open MPI" in version.stdout or "OpenRTE" in version.stdout


class Program:
    """A Python program that runs on several ranks; ends with the `with` block, whatever happens.

    Parameters
    ----------
    ranks : int
        Number of ranks.
    arguments : list of str
        What follows `python`.
    environment : dict, optional
        Variables beside those of this process.
    directory : path, optional
        Where it runs; the root of the repository by default.
    options : sequence of str
        Options of mpiexec.
    """

    def __init__(
        self,
        ranks: int,
        arguments: list[str],
        environment: dict[str, str] | None = None,
        directory: str | Path = ROOT,
        options: Sequence[str] = (),
    ) -> None:
        # pytest may remove a variable meanwhile, if this thread is not that of the tests
        own = {name: os.environ.get(name) for name in [*os.environ]}
        variables = OPENMPI if is_openmpi() else MPICH
        variables = {
            **variables,
            **{k: v for k, v in own.items() if v is not None},
            **(environment or {}),
        }
        variables.pop("PYTHONUNBUFFERED", None)  # `print` would write a line in parts that mix
        # Files, not pipes: a rank that outlives mpiexec would keep a pipe open.
        self._stdout = tempfile.TemporaryFile()  # noqa: SIM115  closed by __exit__
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115
        ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # tests run under nohup
        self._process = subprocess.Popen(
            [
                *(["env", "--default-signal=HUP"] if ignored else []),
                *(str(mpiexec()), *options),
                *("-n", str(ranks), sys.executable, *arguments),
            ],
            stdin=subprocess.DEVNULL,
            stdout=self._stdout,
            stderr=self._stderr,
            cwd=directory,
            env=variables,
            start_new_session=True,
        )

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()
        self._stdout.close()
        self._stderr.close()

    def wait(self, seconds: float = 600.0) -> bool:
        """Wait for the end, at most so long; return whether it has come."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def signal(self, number: int) -> None:
        """Send a signal to mpiexec, as Ctrl-C in a terminal does."""
        self._process.send_signal(number)

    def descendants(self) -> list[int]:
        """All processes that mpiexec has started."""
        return descendants(self._process.pid)

    def kill(self) -> None:
        """End mpiexec and all that it started."""
        if self._process.poll() is not None:
            return
        family = self.descendants()
        self._process.terminate()  # mpiexec tidies up if it can
        self.wait(3.0)
        for process in [*family, self._process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._process.wait()

    def finished(self) -> Finished:
        """What the program left so far."""
        texts = []
        for file in (self._stdout, self._stderr):
            # The program, which shares the position, must not write where this has moved it to.
            data = os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0)
            # Open MPI's launcher ends its own messages with a null character.
            texts.append(data.decode(errors="replace").replace("\0", ""))
        code = self._process.poll()
        return Finished(-1 if code is None else code, *texts)


def run(
    ranks: int,
    arguments: list[str],
    *,
    timeout: float = 600.0,
    environment: dict[str, str] | None = None,
    directory: str | Path = ROOT,
) -> Finished:
    """Run `python arguments` on several ranks to its end.

    Raises
    ------
    TimeoutError
        Where it lasts longer than `timeout` seconds; it is killed, and the message has its output.
    """
    begin = time.monotonic()
    with Program(ranks, arguments, environment, directory) as program:
        ended = program.wait(timeout)
        finished = program.finished()
    if not ended:
        raise TimeoutError(
            f"{ranks} ranks of {arguments} were killed after {time.monotonic() - begin:.0f} s:\n"
            f"{finished.stdout}\n{finished.stderr}"
        )
    return finished


def descendants(process: int) -> list[int]:
    """The children of a process, and theirs (ranks may have process groups of their own)."""
    children = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = stat.read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue  # ended meanwhile
        children[int(parent)].append(int(stat.parent.name))
    found = [process]
    for one in found:
        found.extend(children[one])
    return found[1:]
