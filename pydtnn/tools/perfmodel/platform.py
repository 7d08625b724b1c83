"""A cluster in numbers: hosts, compute, network, memory and storage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import yaml

from pydtnn.tools.perfmodel import fields
from pydtnn.tools.perfmodel.entries import DTYPES, UPDATE, check, check_bandwidth, read_rate
from pydtnn.tools.perfmodel.network import Network
from pydtnn.tools.perfmodel.topology import TOPOLOGIES, Topology
from pydtnn.utils.files import write_file
from pydtnn.utils.names import unknown

FOLDER = Path(__file__).parent / "platforms"


@dataclass(frozen=True)
class Cluster:
    """Equal hosts.

    Attributes
    ----------
    hosts : int
    ranks_per_host, cores_per_host : int
    memory_per_rank : float
        In B.
    """

    hosts: int = fields.count()
    ranks_per_host: int = fields.count()
    cores_per_host: int = fields.count()
    memory_per_rank: float = fields.quantity("B")


@dataclass(frozen=True)
class Slower:
    """Ranks `first` to `last` compute `factor` times as long as `Compute` states."""

    first: int = fields.index()
    last: int = fields.index()
    factor: float = fields.positive()


@dataclass(frozen=True)
class Kernels:
    """A device whose kernels were not measured here: what they achieve of the data sheet.

    Attributes
    ----------
    device : str
        Its name: platforms with the same one have the same numbers.
    products, memory : float
        Parts of the peak that large matrix products achieve, and of the memory's bandwidth.
    fill, launch : float
        Time besides of each wave of tiles, and of each kernel, in s.
    units : int
        Processors of the device that compute a tile each.
    """

    device: str = fields.text()
    products: float = fields.positive()
    memory: float = fields.positive()
    fill: float = fields.quantity("s", positive=False)
    launch: float = fields.quantity("s", positive=False)
    units: int = fields.count()


@dataclass(frozen=True)
class Compute:
    """Speed of one rank with its threads.

    Attributes
    ----------
    threads : int
        Threads of a rank, for which all figures hold.
    peak : mapping of str to float
        Peak rate by dtype, in flop/s.
    memory_bandwidth : float
        Bandwidth of one rank while the others of its host wait, in B/s.
    host_bandwidth : float or None
        Bandwidth of all ranks of a host together, in B/s; by default that of one rank for each.
    call : float
        Time of Python per pass of a layer, in s.
    step : float
        Time of Python per step outside of layers, in s.
    rates : mapping of str to float
        Achieved rates by class of kernels, in flop/s; without them, peaks are used.
    bandwidths : mapping of str to float
        Achieved bandwidths by class of kernels, and of the "update" by an optimizer, in B/s.
    slower : tuple of Slower
        Ranks of other hosts, whose compute takes longer, or less with a factor below 1.
    slowest_pass, slowest_step : float
        Time of the slowest rank of the measured ones in a pass of a layer, and in a step, relative
        to the mean of all: ranks that wait for each other after each of them take this time.
    kernels : Kernels or None
        Of an accelerator, with which classes of kernels without a rate are predicted.
    """

    threads: int = fields.count()
    peak: Mapping[str, float] = fields.quantities("flop/s", optional=False)
    memory_bandwidth: float = fields.quantity("B/s")
    host_bandwidth: float | None = fields.quantity("B/s", default=None)
    call: float = fields.quantity("s", default=0.0, positive=False)
    step: float = fields.quantity("s", default=0.0, positive=False)
    rates: Mapping[str, float] = fields.quantities("flop/s")
    bandwidths: Mapping[str, float] = fields.quantities("B/s")
    slower: tuple[Slower, ...] = fields.parts(Slower)
    slowest_pass: float = fields.positive(default=1.0)
    slowest_step: float = fields.positive(default=1.0)
    kernels: Kernels | None = fields.part(Kernels, default=None)

    def __post_init__(self) -> None:
        """Check the names of peaks, rates and bandwidths."""
        for name in self.peak:
            check("peak", "dtype", name, DTYPES)
        for name in self.rates:
            read_rate(name)
        for name in self.bandwidths:
            check_bandwidth(name)


@dataclass(frozen=True)
class Link:
    """Latency in s and bandwidth in B/s of a message that is alone on its route.

    Attributes
    ----------
    latency, bandwidth : float
    shared : float or None
        Capacity that all ranks of a host share, in B/s: of its memory for messages inside the host
        (by default without limit), of each direction of its network card for those between hosts
        (by default the bandwidth).
    """

    latency: float = fields.quantity("s", positive=False)
    bandwidth: float = fields.quantity("B/s")
    shared: float | None = fields.quantity("B/s", default=None)


@dataclass(frozen=True)
class RankClass:
    """The link between hosts for groups of up to a number of ranks.

    Attributes
    ----------
    ranks : int
    latency, bandwidth : float
        In s and B/s.
    """

    ranks: int = fields.count()
    latency: float = fields.quantity("s", positive=False)
    bandwidth: float = fields.quantity("B/s")


@dataclass(frozen=True)
class MessageSpeed:
    """The network, and the time of a rank's processor for messages.

    Attributes
    ----------
    inside, between : Link
        Inside a host and between hosts.
    add : float or None
        Rate at which a rank adds received bytes, in B/s; None: additions take no time.
    copy : float or None
        Rate at which a rank's processor copies the bytes of its messages between hosts, in B/s;
        None: a network card copies them.
    call : float
        Time of the processor per call of the communicator, on a core of its own, in s.
    allreduce : float or None
        Rate of the library's allreduce inside a host, during which the processors of p ranks add
        and copy 1 - 1 / p of the array, in B/s; None: it takes the time of messages.
    eager : float or None
        Length in B up to which messages between hosts travel while their ranks compute; longer ones
        proceed in calls of the communicator only. None: all of them travel.
    wake : float or None
        Time by which a sleep is longer than it should be, in s, if ranks sleep while they wait;
        None: they poll, and keep their part of a core from others.
    test : float
        Time of the processor for a sleep and the test after it, in s, if ranks sleep.
    classes : tuple of RankClass
        Links between hosts by number of ranks, in ascending order; above the last one, `between`.
    rails : int
        Network cards of a host, each on a network of its own; rank i of a host uses card i modulo
        their number.
    """

    inside: Link = fields.part(Link)
    between: Link = fields.part(Link)
    add: float | None = fields.quantity("B/s", default=None)
    copy: float | None = fields.quantity("B/s", default=None)
    call: float = fields.quantity("s", default=0.0, positive=False)
    allreduce: float | None = fields.quantity("B/s", default=None)
    eager: float | None = fields.quantity("B", default=None)
    wake: float | None = fields.quantity("s", default=None, positive=False)
    test: float = fields.quantity("s", default=0.0, positive=False)
    classes: tuple[RankClass, ...] = fields.parts(RankClass)
    rails: int = fields.count(default=1)


@dataclass(frozen=True)
class Storage:
    """Speed of data loading and of checkpoints.

    Attributes
    ----------
    sample : float
        Time of a loader's thread per sample, in s.
    loader : float
        Rate of a loader's thread for the values of samples, in B/s as float32.
    write : float
        Rate of checkpoints, in B/s.
    """

    sample: float = fields.quantity("s", default=0.0, positive=False)
    loader: float | None = fields.quantity("B/s", default=None)
    write: float | None = fields.quantity("B/s", default=None)

    def delay(self, samples: int, nbytes: int, threads: int, step: float) -> float:
        """Return the time by which the loader makes a step longer, in s.

        Parameters
        ----------
        samples : int
            Of a rank in a step.
        nbytes : int
            Of a sample as float32.
        threads : int
            That prepare batches while a step runs; with 0, a step waits for its batch.
        step : float
            Time of the step without the loader, in s.
        """
        loading = samples * (self.sample + (nbytes / self.loader if self.loader else 0.0))
        return max(loading / threads - step, 0.0) if threads else loading

    def checkpoint(self, nbytes: float) -> float:
        """Return the time to write a checkpoint in s; 0 without a rate."""
        return nbytes / self.write if self.write else 0.0


@dataclass(frozen=True)
class Platform:
    """A cluster of hosts with equal networks.

    Attributes
    ----------
    name : str
    cluster : Cluster
    compute : Compute
    messages : Messages
    storage : Storage
    topology : Topology or None
        The switches between hosts; None: one switch that is never the bottleneck.
    """

    name: str = fields.text()
    cluster: Cluster = fields.part(Cluster)
    compute: Compute = fields.part(Compute)
    messages: MessageSpeed = fields.part(MessageSpeed)
    storage: Storage = fields.part(Storage, default=Storage())
    topology: Topology | None = fields.one_of(TOPOLOGIES)

    def __post_init__(self) -> None:
        """Check that the topology has the hosts."""
        if self.topology is not None and self.topology.hosts < self.cluster.hosts:
            raise ValueError(
                f"cluster.hosts: expected at most the {self.topology.hosts} hosts of the topology, "
                f"got {self.cluster.hosts}; correct one of them"
            )

    @classmethod
    def load(cls, source: str | Path) -> Platform:
        """Read a platform file.

        With an entry ``base``, the name or file of another platform, it states what differs.

        Parameters
        ----------
        source : str or Path
            A name of `platform_names`, or the path of a YAML file.

        Raises
        ------
        ValueError
            If the name is unknown, or the file is invalid.
        OSError
            If the file cannot be read.

        Examples
        --------
        >>> Platform.load("cpu-1gbit").messages.between.bandwidth
        125000000.0
        """
        path, content = _content(source)
        return fields.read(cls, content, path.name)

    @staticmethod
    def comment(name: str) -> str:
        """Return the comment at the beginning of the file of a platform of the package."""
        lines = (FOLDER / f"{name}.yaml").read_text().splitlines()
        return " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))

    def save(self, path: str | Path, comments: Sequence[str] = ()) -> None:
        """Write the platform as a file that `load` reads, with 4 significant digits.

        Parameters
        ----------
        path : str or Path
        comments : sequence of str
            Lines at the beginning.
        """
        head = "".join(f"# {line}\n" for line in comments)
        content = yaml.safe_dump(fields.write(self), sort_keys=False, allow_unicode=True, width=100)
        write_file("platform", path, (head + content).encode())

    def hosts(self, ranks: int) -> tuple[int, ...]:
        """Return the number of the host of each of several ranks, which fill host after host.

        Raises
        ------
        ValueError
            If a topology does not have so many hosts.

        >>> Platform.load("abci").hosts(6)
        (0, 0, 0, 0, 1, 1)
        """
        self.check_hosts(ranks)
        return tuple(rank // self.cluster.ranks_per_host for rank in range(ranks))

    def check_hosts(self, ranks: int) -> str:
        """Return a note if a job needs more hosts than the platform has; empty otherwise.

        Raises
        ------
        ValueError
            If they would have no place in the topology.

        >>> Platform.load("cpu-10gbit").check_hosts(64)
        'cpu-10gbit has 32 hosts, 64 ranks need 64: further ones of the same kind are assumed'
        """
        hosts, needed = self.cluster.hosts, -(-ranks // self.cluster.ranks_per_host)
        if needed <= hosts:
            return ""
        missing = f"{self.name} has {hosts} host{'s' * (hosts > 1)}, {ranks} ranks need {needed}"
        if self.topology is not None:
            raise ValueError(f"{missing}; use fewer ranks, or a larger topology")
        return f"{missing}: further ones of the same kind are assumed"

    def factors(self, ranks: int) -> dict[int, float]:
        """Return the factors on the compute of ranks that are slower or faster than others."""
        return {
            rank: one.factor
            for one in self.compute.slower
            for rank in range(one.first, min(one.last + 1, ranks))
        }

    def slowdown(self, ranks: int) -> float:
        """Return how much longer the slowest rank computes than one with cores of its own.

        >>> Platform.load("abci").slowdown(8)
        1.0
        """
        cluster, factors = self.cluster, self.factors(ranks)
        cores = max(cluster.cores_per_host // self.compute.threads, 1)
        beside = ceil(min(ranks, cluster.ranks_per_host) / cores)
        return beside * max([1.0] * (len(factors) < ranks) + [*factors.values()])

    @property
    def rank_bandwidth(self) -> float:
        """Memory bandwidth of a rank while all others of its host compute, too, in B/s."""
        own, whole = self.compute.memory_bandwidth, self.compute.host_bandwidth
        return own if whole is None else min(own, whole / self.cluster.ranks_per_host)

    @property
    def update_bandwidth(self) -> float:
        """Memory bandwidth of an optimizer's update, in B/s: the achieved one if it is known."""
        return self.compute.bandwidths.get(UPDATE, self.rank_bandwidth)

    def between(self, ranks: int) -> Link:
        """Return the link between hosts for a group of ranks."""
        usual = self.messages.between
        one = next((one for one in self.messages.classes if ranks <= one.ranks), usual)
        return Link(one.latency, one.bandwidth, usual.shared)

    def network(self, ranks: int) -> Network:
        """Return the network between ranks: routes, cards, and the memory of each host."""
        hosts, inside, between = self.hosts(ranks), self.messages.inside, self.between(ranks)
        return Network.create(
            hosts,
            latency=between.latency,
            bandwidth=between.bandwidth,
            local_latency=inside.latency,
            local_bandwidth=inside.bandwidth,
            card=between.shared,
            memory=inside.shared,
            add=0.0 if self.messages.add is None else 1 / self.messages.add,
            topology=self.topology,
            rails=self.messages.rails,
        )


def _content(source: object, bases: tuple[Path, ...] = ()) -> tuple[Path, object]:
    """Return the path of a platform and its entries, those of its base included."""
    path = Path(str(source))
    if isinstance(source, str) and path.suffix not in (".yaml", ".yml") and path.name == source:
        if source not in platform_names():
            raise ValueError(
                unknown("platform", source, platform_names()) + " A file's name ends with .yaml."
            )
        path = FOLDER / f"{source}.yaml"
    if bases and not path.is_absolute():
        path = bases[-1].parent / path
    if path in bases:
        raise ValueError(f"{path.name}: expected a base that is not based on it; correct it")
    content = fields.load("platform", path)
    messages = content.get("messages") if isinstance(content, dict) else None
    if isinstance(messages, dict) and "collectives" in messages:
        raise ValueError(
            f"{path.name}: messages.collectives has been removed: delete it; calls of the MPI "
            "library have the times of closed formulas"
        )
    if isinstance(content, dict) and "base" in content:
        content = _merge(_content(content.pop("base"), (*bases, path))[1], content)
    return path, content


def _merge(base: object, own: object) -> object:
    """Return the entries of a file and those of its base that it does not replace."""
    if not isinstance(base, Mapping) or not isinstance(own, Mapping):
        return own
    return {**base, **{name: _merge(base.get(name), value) for name, value in own.items()}}


def platform_names() -> list[str]:
    """Return the names of the platforms that are part of the package, in alphabetical order."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))
