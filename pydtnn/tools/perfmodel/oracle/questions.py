"""Questions to the oracle: what a time needs, what a campaign costs, and how training scales.

Nothing here predicts a step: all answers are computed from entries of the `Oracle`, and runs with
failures by `pydtnn.utils.failures`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, sqrt

from pydtnn.parallel.mesh import fewer
from pydtnn.tools.perfmodel.oracle.ranking import Entry, Oracle
from pydtnn.tools.perfmodel.oracle.what_if import SWEEPS, change
from pydtnn.tools.perfmodel.platform import Platform
from pydtnn.tools.perfmodel.prediction import Prediction
from pydtnn.tools.perfmodel.projection import Projector
from pydtnn.training.workload import Workload
from pydtnn.utils.failures import continued, optimal_interval, restarted

PROPERTIES = ("bandwidth", "latency", "flops", "memory")
"""Properties of a platform that an answer may change, as `--sweep` names them."""

RANGE = 1024.0
"""How many times better or worse than the platform's an answer may be."""

EXACT = 1e-4
"""By how much the time of an answer may differ from the one that was asked for."""

ERRORS = {"flops": 0.05, "memory": 0.05, "bandwidth": 0.2, "latency": 0.2}
"""By how much rates may be wrong: of the steps in `benchmarks/results/oracle.txt` without messages,
95 % are predicted within 3 %, and of those in `oracle-cluster.txt` within 19 %."""

Measure = Callable[[Prediction], float]
"""Returns the time that is asked for: that of a step or of an epoch, in s."""

Candidates = Callable[[int], Iterable[Workload]]
"""Returns the strategies for a number of ranks."""


@dataclass(frozen=True)
class Answer:
    """What a time needs.

    Attributes
    ----------
    what : str
    value : str
        The answer; empty if the time is never reached.
    entry : Entry or None
        The strategy, with the prediction for the answer, or the fastest one without an answer.
    oracle : Oracle
        That of the platform which the answer describes.
    sums : tuple of str
        How it was computed.
    """

    what: str
    value: str
    entry: Entry | None
    oracle: Oracle
    sums: tuple[str, ...] = ()


class Questions:
    """Answers about a run on a platform.

    Parameters
    ----------
    oracle : Oracle
    candidates : callable
        Returns the strategies for a number of ranks.
    measure : callable
        Returns the time that is asked for, from a projection.
    """

    def __init__(self, oracle: Oracle, candidates: Candidates, measure: Measure) -> None:
        self.oracle, self._candidates, self._measure = oracle, candidates, measure

    def _on(self, platform: Platform) -> Oracle:
        """Return the oracle of another platform."""
        return Oracle(self.oracle.projector.on(platform), self.oracle.per_rank)

    def seconds(self, entry: Entry | None) -> float:
        """Return the time that is asked for; infinite if the strategy is not possible."""
        if entry is None or entry.projection is None or not entry.possible:
            return inf
        return self._measure(entry.projection)

    def fastest(self, oracle: Oracle, works: Iterable[Workload]) -> Entry | None:
        """Return the fastest entry that is possible."""
        return min(map(oracle.entry, works), key=self.seconds, default=None)

    def ranks(self, target: float, ranks: Sequence[int]) -> Answer:
        """Find the smallest number of ranks, between those given by bisection.

        Numbers in between are tried with the kinds of strategies that are the fastest for the
        numbers around them.

        Parameters
        ----------
        target : float
            In s.
        ranks : sequence of int
            Those that are tried first, in ascending order.
        """
        found: dict[int, Entry | None] = {}

        def enough(number: int, kinds: Sequence[str] = ()) -> bool:
            works = self._candidates(number)
            chosen = [work for work in works if not kinds or work.kind in kinds]
            found[number] = self.fastest(self.oracle, chosen)
            return self.seconds(found[number]) <= target * (1 + EXACT)

        high = next((n for n in sorted(ranks) if enough(n)), 0)
        if not high:
            number = min(found, key=lambda n: self.seconds(found[n]))
            return Answer("ranks", "", found[number], self.oracle, self._tried(found))
        low = max((n for n in found if n < high), default=high - 1)
        kinds = [entry.work.kind for n in (low, high) if (entry := found.get(n))]
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if enough(middle, kinds) else (middle, high)
        return Answer("ranks", f"{high} ranks", found[high], self.oracle, self._tried(found))

    def _tried(self, found: dict[int, Entry | None]) -> tuple[str, ...]:
        return tuple(
            f"{number} ranks: {1e3 * self.seconds(entry):.4g} ms"
            + (f" with {entry.work.strategy}" if entry and entry.possible else " (impossible)")
            for number, entry in sorted(found.items())
        )

    def property(self, axis: str, target: float, ranks: int) -> Answer:
        """Find the least value of a property with which a number of ranks is fast enough.

        The fastest strategy at the best value is followed to the value at which it takes the time;
        as long as another one is faster there, that one is followed to a still lower value.

        Parameters
        ----------
        axis : str
            One of `PROPERTIES`.
        target : float
            In s.
        ranks : int
        """
        better = -1.0 if axis == "latency" else 1.0
        works = [*self._candidates(ranks)]
        sums: list[str] = []

        def at(factor: float) -> Oracle:
            return self._on(change(axis, factor**better, self.oracle.projector.platform)[0])

        def answer(factor: float, entry: Entry | None, reached: bool = True) -> Answer:
            text = change(axis, factor**better, self.oracle.projector.platform)[1].text
            times = f"{factor:.3g} times better" if factor >= 1 else f"{1 / factor:.3g} times worse"
            value = f"{text} ({times})" if reached else ""
            return Answer(SWEEPS[axis].partition(" (")[0], value, entry, at(factor), tuple(sums))

        entry, high = self.fastest(at(RANGE), works), RANGE
        if entry is None or self.seconds(entry) > target:
            return answer(high, entry, reached=False)
        while True:
            low, single = 1 / RANGE, entry.work
            while high / low > 1 + EXACT / 10:
                middle = sqrt(low * high)
                fast = self.seconds(self.fastest(at(middle), [single])) <= target
                low, high = (low, middle) if fast else (middle, high)
            sums.append(f"{single.strategy}: from {answer(high, None).value} on")
            entry = self.fastest(at(high), works)
            assert entry is not None
            # The time of a strategy may jump over the target where messages change their order.
            known = entry.work == single or high <= 1.001 / RANGE
            if known or self.seconds(entry) >= target * (1 - EXACT):
                return answer(high, entry)

    def memory(self, target: float, ranks: int) -> Answer:
        """Find the least memory of a rank with which a number of ranks is fast enough."""
        platform = self.oracle.projector.platform

        def with_memory(nbytes: float) -> Oracle:
            cluster = replace(platform.cluster, memory_per_rank=nbytes)
            return self._on(replace(platform, cluster=cluster))

        oracle = with_memory(1e18)
        entries = [oracle.entry(work) for work in self._candidates(ranks)]
        fast = [one for one in entries if self.seconds(one) <= target * (1 + EXACT)]
        if not fast:
            return Answer("memory of a rank", "", min(entries, key=self.seconds), oracle)
        fast.sort(key=_bytes)
        sums = tuple(
            f"{one.work.strategy}: {_bytes(one) / 1e6:.4g} MB, {1e3 * self.seconds(one):.4g} ms"
            for one in fast[:8]
        )
        least = _bytes(fast[0])
        value = f"{least / 1e6:.4g} MB"
        return Answer("memory of a rank", value, fast[0], with_memory(least), sums)

    def interval(self, work: Workload) -> tuple[float, float]:
        """Return the time of a strategy if all rates are better, or worse, by `ERRORS`, in s."""
        projector = self.oracle.projector
        found = []
        for sign in (1, -1):
            platform: Platform = projector.platform
            for axis, error in ERRORS.items():
                way = -sign if axis == "latency" else sign
                platform, _ = change(axis, (1 + error) ** way, platform)
            found.append(self._measure(projector.on(platform).project(work)))
        return found[0], found[1]


def _bytes(entry: Entry) -> float:
    return inf if entry.projection is None else entry.projection.memory.total


@dataclass(frozen=True)
class Terms:
    """What a campaign is computed from, besides the prediction of an epoch.

    Attributes
    ----------
    epochs : int
    sample_bytes : float
        Of a sample in a file, in B.
    read : float or None
        Rate at which all ranks together read samples, in B/s; None: as fast as they are needed.
    mtbf : float or None
        Mean time between two failures of a host, in s; None: none fails.
    restart : float
        Time from a failure until training continues, without the work that is repeated, in s.
    survive : bool
        Whether the others continue without a host that fails; otherwise the run ends, and is
        started again on as many hosts.
    watts, price : float
        Of a host, in W, and for an hour.
    """

    epochs: int
    sample_bytes: float = 0.0
    read: float | None = None
    mtbf: float | None = None
    restart: float = 60.0
    survive: bool = False
    watts: float = 0.0
    price: float = 0.0


@dataclass(frozen=True)
class Campaign:
    """The time and the cost of all epochs.

    Attributes
    ----------
    parts : mapping of str to float
        Time in s of everything that takes any; their sum is `seconds`.
    hosts : int
        At the beginning.
    host_hours : float
    failures : float
        Number that is expected.
    energy, cost : float
        In J, and in the unit of the price.
    sums : tuple of str
        How all of it was computed.
    """

    parts: dict[str, float]
    hosts: int
    host_hours: float
    failures: float
    energy: float
    cost: float
    sums: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """From the start to the end."""
        return sum(self.parts.values())


def plan_campaign(entry: Entry, projector: Projector, terms: Terms) -> Campaign:
    """Compute the time and the cost of a campaign.

    Raises
    ------
    ValueError
        If the strategy is not possible, hosts fail and the platform has no rate of checkpoints, or
        no host remains.
    """
    one, work = entry.projection, entry.work
    if one is None or not entry.possible:
        raise ValueError(f"ask: {work.strategy} is not possible: {entry.reason}")
    hosts, steps = _hosts(one), terms.epochs * work.steps
    reading = work.batch * terms.sample_bytes / terms.read if terms.read else 0.0
    delay = max(reading - one.seconds, 0.0)
    parts = {name: steps * value for name, value in one.step.parts(one.loader).items()}
    parts["shared file system"] = steps * delay
    sums = [
        f"steps: {terms.epochs} epochs x {work.samples:,} / {work.batch} samples = {steps:,}",
        f"step: {one.seconds:.5g} s, with {work.strategy}",
    ]
    if terms.read:
        sums.append(
            f"reading: {work.batch} samples x {terms.sample_bytes:.4g} B / {terms.read:.4g} B/s = "
            f"{reading:.4g} s, beside the step, which becomes {delay:.4g} s longer"
        )
    if terms.mtbf is None or terms.survive:
        parts["checkpoints"] = terms.epochs * one.checkpoint
        sums.append(f"checkpoints: {terms.epochs} x {one.checkpoint:.4g} s, one after each epoch")
    failures = 0.0
    if terms.mtbf is not None:
        fail = _continue if terms.survive else _restart
        failures, more = fail(parts, one, terms, terms.mtbf, projector)
        sums += more
    seconds = sum(parts.values())
    # with failures, the mean number of hosts is that of failures times mtbf
    hours = (failures * terms.mtbf if terms.mtbf else hosts * seconds) / 3600
    sums += [
        f"host hours: {seconds:.6g} s x {3600 * hours / seconds:.4g} hosts / 3600 = {hours:.5g} h",
        f"energy: {hours:.5g} h x {terms.watts:g} W = {hours * terms.watts / 1e3:.5g} kWh",
        f"cost: {hours:.5g} h x {terms.price:g} = {hours * terms.price:.5g}",
    ]
    parts = {name: value for name, value in parts.items() if value}
    energy, cost = 3600 * hours * terms.watts, hours * terms.price
    return Campaign(parts, hosts, hours, failures, energy, cost, tuple(sums))


Parts = dict[str, float]
Failed = tuple[float, list[str]]


def _restart(parts: Parts, one: Prediction, terms: Terms, mtbf: float, on: Projector) -> Failed:
    """Add checkpoints and failures to the parts of a run; return the failures, and the sums."""
    if not one.checkpoint:
        raise ValueError(
            "ask: --mtbf: expected a rate of checkpoints, storage.write, of "
            f"{on.platform.name}, got none; add it to the platform file"
        )
    hosts, useful = _hosts(one), sum(parts.values())
    interval = optimal_interval(one.checkpoint, mtbf / hosts)
    whole = restarted(useful, interval, one.checkpoint, terms.restart, mtbf / hosts)
    parts["checkpoints"] = useful / interval * one.checkpoint
    parts["failures"] = whole.seconds - useful - parts["checkpoints"]
    return whole.failures, [
        f"time between failures: {mtbf:.4g} s of a host / {hosts} hosts = M = {mtbf / hosts:.4g} s",
        f"checkpoints (Young, Daly): C = {one.checkpoint:.4g} s, after T = {interval:.4g} s each",
        f"whole time (Daly): {useful / interval:.4g} x M exp(R / M) (exp((T + C) / M) - 1), "
        f"R = {terms.restart:.4g} s: {whole.seconds:.6g} s",
        f"failures: {whole.seconds:.6g} s / M = {whole.failures:.3g}",
    ]


def _continue(parts: Parts, one: Prediction, terms: Terms, mtbf: float, on: Projector) -> Failed:
    """Add snapshots, failures and the time of fewer hosts; see `_restart`."""
    work, hosts, per_host = one.work, _hosts(one), one.platform.cluster.ranks_per_host
    repeated, sums = one.seconds / 2, []
    if work.cut or work.compress or work.scheme != "allreduce":
        copy = 2 * one.state / one.platform.between(work.ranks).bandwidth
        interval = optimal_interval(copy, mtbf / hosts)
        parts["snapshots"], repeated = sum(parts.values()) / interval * copy, interval / 2
        sums = [f"snapshots: 2 x {one.state:.4g} B, {copy:.4g} s, every {interval:.4g} s"]

    def speed(left: int) -> float:
        axes = fewer(work.axes, min(left * per_host, work.ranks))
        return one.seconds / on.project(replace(work, axes=axes)).seconds

    useful, lost = sum(parts.values()), terms.restart + repeated
    whole = continued(useful, hosts, mtbf, lost, speed)
    parts["failures"] = whole.failures * lost
    parts["fewer hosts"] = whole.seconds - useful - parts["failures"]
    failures = f"{hosts} hosts x (1 - exp(-{whole.seconds:.6g} s / {mtbf:.4g} s))"
    return whole.failures, [
        *sums,
        f"a failure: {lost:.4g} s, {terms.restart:.4g} s of them until the others continue",
        f"failures: {failures} = {whole.failures:.3g}",
    ]


def _hosts(one: Prediction) -> int:
    return ceil(one.work.ranks / one.platform.cluster.ranks_per_host)
