"""What a campaign of many epochs costs: its time, hosts, energy and failures.

Nothing here predicts a step: all is computed from entries of the `Oracle`, and runs with failures
by `pydtnn.utils.failures`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from pydtnn.parallel.mesh import fewer
from pydtnn.tools.perfmodel.oracle.ranking import Entry
from pydtnn.tools.perfmodel.prediction import Prediction
from pydtnn.tools.perfmodel.projection import Projector
from pydtnn.utils.failures import continued, optimal_interval, restarted


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
