"""What if, from a trace: computation as recorded, messages as on a platform.

The calls of each rank are made again by a virtual rank (`run_virtual`), with arrays of the recorded
lengths. Between them its clock advances by the recorded time outside of the communicator. Messages,
and the sums that progress when a request is tested or awaited, are those of the communicator
itself, so they may take another time, or follow another algorithm, than in the recorded run.

References
----------
Labarta et al., DiP: a parallel program development environment, Euro-Par 1996 (Dimemas), which
replays the computation of a trace on another network. Lin et al., Understanding stragglers in large
model training using what-if analysis, OSDI 2025: the time of a step without slow ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pydtnn.comm.communicator import Communicator
from pydtnn.comm.schedules.auto import RULE, create_allreduce
from pydtnn.comm.schedules.network import Network
from pydtnn.perfmodel.compute.base import ComputeCosts
from pydtnn.perfmodel.oracle.what_if import change
from pydtnn.perfmodel.platform import Platform
from pydtnn.perfmodel.virtual.clock import RankClock
from pydtnn.perfmodel.virtual.run import IDLE, Processor, run_virtual
from pydtnn.tracing.analysis.blocks import Labels, find_blocks, label
from pydtnn.tracing.analysis.times import slow_ranks
from pydtnn.tracing.timeline import Timeline
from pydtnn.utils import clock
from pydtnn.utils.observer import Kind
from pydtnn.utils.request import Completed, Request, Together
from pydtnn.utils.units import align

POSTS = ("isend", "irecv", "exchange")
"""Operations that post messages between two ranks."""

SHORT = 1024
"""Bytes up to which an array of a sum is taken to be of float64."""


@dataclass
class _Message:
    """One side of a message between two ranks, at recorded times in ns."""

    peer: int
    tag: int
    nbytes: int
    sends: bool
    start: int
    stop: int


@dataclass
class _Call:
    """A call or wait of a rank, or a test of its requests, at a recorded time in ns."""

    time: int
    stop: int = 0
    name: str = "test"
    group: str = ""
    nbytes: int = 0
    waits: bool = False
    counts: list[int] = field(default_factory=list)
    messages: list[_Message] = field(default_factory=list)


@dataclass
class _Rank:
    """What a rank does: its calls by time, and its computation as a function of recorded time."""

    calls: list[_Call]
    times: np.ndarray
    computed: np.ndarray

    def compute(self, start: int, stop: int) -> float:
        """Return the computation between two recorded times, in s."""
        before, after = np.interp((start, stop), self.times, self.computed)
        return 1e-9 * float(after - before)


class _Recorded(ComputeCosts):
    """No costs of segments: the computation is that of the trace."""

    def seconds(self, label: Any, layer: Any, batch: int) -> float:
        return 0.0


class Replay:
    """A trace that can be replayed on networks.

    Parameters
    ----------
    timeline : Timeline

    Raises
    ------
    ValueError
        If it has no step that all ranks have recorded.
    """

    def __init__(self, timeline: Timeline) -> None:
        if not len(timeline.steps):
            raise ValueError(
                "replay: expected a trace with training steps that all ranks have recorded, got "
                "none; use --trace without --trace-steps, or with several steps"
            )
        self.timeline = timeline
        self._labels = label(timeline)
        self._inside, self._calls = self._find_calls()
        self._groups = self._find_groups()

    @property
    def recorded(self) -> float:
        """Median duration of the recorded steps, in s."""
        return median_step(1e-9 * self.timeline.steps.stop)

    def run(
        self,
        network: Network,
        processor: Processor = IDLE,
        *,
        allreduce: Any = RULE,
        without: Collection[int] = (),
    ) -> np.ndarray:
        """Return the time at which each rank ends each step, ``(steps, ranks)``, in s.

        Parameters
        ----------
        network : Network
            With the host of every rank.
        processor : Processor, optional
            What messages cost the processor of a rank; by default nothing.
        allreduce : str or callable
            Algorithm of all sums; see `create_allreduce`.
        without : collection of int
            Ranks that compute, in every layer and phase of a step, as long as the median of the
            others does.

        Raises
        ------
        ValueError
            If the recorded calls of the ranks do not match.
        """
        factors = _factors(self._labels, self.timeline, without)
        ranks = [self._rank(rank, factors) for rank in range(self.timeline.size)]
        stops = self.timeline.steps.stop
        groups = self._groups

        def program(comm: Communicator) -> list[float]:
            own = _Repeated(create_allreduce(allreduce, comm), groups)
            return own.run(ranks[comm.rank], stops[:, comm.rank].tolist())

        try:
            run = run_virtual(program, network=network, costs=_Recorded(), processor=processor)
        except RuntimeError as error:
            raise ValueError(
                f"replay: the recorded calls of the ranks do not match: {error}; record whole steps"
            ) from error
        return np.array(run.results).T

    # -- what the trace contains ------------------------------------------------------------------

    def _find_calls(self) -> tuple[np.ndarray, list[list[_Call]]]:
        """Return which activities are calls or waits, and those of each rank within its steps."""
        timeline, steps = self.timeline, self.timeline.steps
        blocks, names = find_blocks(timeline), timeline.names
        inside = np.zeros(len(timeline.activities), bool)
        inside[blocks.activity] = True
        calls: list[list[_Call]] = [[] for _ in range(timeline.size)]
        for one in timeline.rows(blocks.activity):
            if steps.place(one.rank, np.array([one.start]))[0] >= 0:
                name, group = names[one.name], names[one.group] if one.group >= 0 else "all"
                waits = one.kind == Kind.WAIT
                calls[one.rank].append(_Call(one.start, one.stop, name, group, one.nbytes, waits))
        self._add_messages(calls)
        self._add_counts(calls)
        # Between two layers of backward, requests are tested; it is recorded if one is complete.
        for one in timeline.rows(np.flatnonzero(timeline.activities["kind"] == Kind.BACKWARD)):
            calls[one.rank].append(_Call(one.start, one.start))
        return inside, [sorted(found, key=lambda call: call.time) for found in calls]

    def _add_messages(self, calls: list[list[_Call]]) -> None:
        """Add messages between two ranks to the calls that post them."""
        posts = [[one for one in own if one.name in POSTS and not one.waits] for own in calls]
        starts = [np.array([call.time for call in own], "i8") for own in posts]

        def poster(rank: int, time: int, group: int) -> _Call | None:
            place = int(np.searchsorted(starts[rank], time, side="right")) - 1
            call = posts[rank][place] if place >= 0 else None
            if call is None or time > call.stop or call.group != self.timeline.names[group]:
                return None  # of a schedule, or outside of the steps
            return call

        for sent, received in self.timeline.messages.pairs():
            sender = poster(sent.source, sent.start, sent.group)
            receiver = poster(received.target, received.start, received.group)
            if sender and receiver:
                for call, one, peer in (
                    (sender, sent, sent.target),
                    (receiver, received, sent.source),
                ):
                    side = _Message(peer, one.tag, one.nbytes, one is sent, one.start, one.stop)
                    call.messages.append(side)

    def _add_counts(self, calls: list[list[_Call]]) -> None:
        """Add the bytes of all ranks to the calls that gather parts of different length."""
        gathers: dict[str, list[list[_Call]]] = {}
        for own in calls:
            mine: dict[str, list[_Call]] = {}
            for call in own:
                if call.name == "allgather":
                    mine.setdefault(call.group, []).append(call)
            for group, found in mine.items():
                gathers.setdefault(group, []).append(found)
        for members in gathers.values():
            for meeting in zip(*members, strict=False):
                parts = [call.nbytes // max(len(members) - 1, 1) for call in meeting]
                for call in meeting:
                    call.counts = parts

    def _find_groups(self) -> dict[str, list[int]]:
        """Return the ranks of each group that calls are made in, by its name."""
        found: dict[str, list[int]] = {}
        for rank, own in enumerate(self._calls):
            for group in dict.fromkeys(call.group for call in own if call.group):
                found.setdefault(group, []).append(rank)
        return dict(sorted(found.items()))

    def _rank(self, rank: int, factors: np.ndarray) -> _Rank:
        """Return what a rank does, with factors ``(labels, steps, ranks)`` on its computation."""
        timeline, steps = self.timeline, self.timeline.steps
        chosen = timeline.select(rank=rank, main=True)
        activities = timeline.activities[chosen]
        start, stop = activities["start"], activities["stop"]
        bounds = [steps.start[:, rank], steps.stop[:, rank]]
        times = np.unique(np.concatenate([start, stop, *bounds]))
        innermost = np.full(len(times) - 1, -1)
        first, last = np.searchsorted(times, start), np.searchsorted(times, stop)
        for place, (a, b) in enumerate(zip(first.tolist(), last.tolist(), strict=True)):
            innermost[a:b] = place
        step = steps.place(rank, times[:-1])
        codes = np.where(innermost >= 0, self._labels.codes[chosen[innermost]], -1)
        called = np.append(self._covered(chosen, first, last, len(times) - 1), False)[:-1]
        rate = np.where(codes >= 0, factors[codes, step, rank], 1.0)
        rate[called | (step < 0)] = 0.0
        computed = np.append(0.0, np.cumsum(rate * np.diff(times)))
        return _Rank(self._calls[rank], times, computed)

    def _covered(
        self, chosen: np.ndarray, first: np.ndarray, last: np.ndarray, length: int
    ) -> np.ndarray:
        """Return which intervals between recorded times are within calls and waits."""
        change = np.zeros(length + 1, int)
        blocks = self._inside[chosen]
        np.add.at(change, first[blocks], 1)
        np.add.at(change, last[blocks], -1)
        return np.cumsum(change)[:-1] > 0


def _factors(labels: Labels, timeline: Timeline, without: Collection[int]) -> np.ndarray:
    """Return the factors on the computation of each label, step and rank."""
    seconds = labels.seconds(timeline)
    factors = np.ones_like(seconds)
    others = [rank for rank in range(timeline.size) if rank not in without]
    if without and others:
        usual = np.median(seconds[:, :, others], axis=2)
        for rank in without:
            own = seconds[:, :, rank]
            both = (own > 0) & (usual > 0)
            factors[:, :, rank][both] = usual[both] / own[both]
    return factors


class _Repeated:
    """The calls of a virtual rank, which are those of a recorded one."""

    def __init__(self, comm: Communicator, groups: dict[str, list[int]]) -> None:
        self._comm, self._own = comm, comm.rank
        self._zeros = np.zeros(1 << 16, "uint8")
        self._pending: dict[tuple[str, str], list[tuple[_Call, Request]]] = {}
        self._groups: dict[str, tuple[Communicator, list[int]]] = {}
        for name, members in groups.items():
            own = comm.split(0 if self._own in members else 1 + self._own)
            self._groups[name] = own, members

    def run(self, rank: _Rank, stops: Sequence[int]) -> list[float]:
        """Repeat the calls; return the time after each step, in s."""
        self._comm.barrier()
        own, ends = clock.current(), []
        assert isinstance(own, RankClock)
        origin, before = clock.now(), int(rank.times[0])
        calls = [*rank.calls, *(_Call(stop, name="") for stop in stops)]
        for call in sorted(calls, key=lambda one: one.time):
            own.spend(rank.compute(before, call.time))
            before = call.time
            if call.name:
                self._make(call)
            else:
                self._complete(call.time)
                ends.append(clock.now() - origin)
        for requests in self._pending.values():
            for _, request in requests:
                request.wait()
        return ends

    def _make(self, call: _Call) -> None:
        comm, members = self._groups.get(call.group, (self._comm, []))
        key, length = (call.group, call.name), self._length(call, comm.size)
        if call.waits:
            self._wait(call)
        elif call.name == "test":
            for requests in self._pending.values():
                for _, request in requests[:1]:
                    request.test()
        elif call.name == "iallreduce":
            request = comm.iallreduce(self._array(length))
            self._pending.setdefault(key, []).append((call, request))
        elif call.name in POSTS:
            request = self._post(comm, members, call.messages)
            self._pending.setdefault(key, []).append((call, request))
        elif call.name == "reduce_scatter":
            counts = [length // comm.size // 4] * comm.size
            array, out = np.zeros(sum(counts), "float32"), np.zeros(counts[0], "float32")
            comm.reduce_scatter(array, counts, out)
        elif call.name == "allgather" and call.counts:
            parts = np.zeros(call.counts[comm.rank], "uint8")
            comm.allgather(parts, call.counts, np.zeros(sum(call.counts), "uint8"))
        elif call.name in ("allreduce", "broadcast"):
            getattr(comm, call.name)(self._array(length))
        elif call.name in ("barrier", "gather_object"):
            comm.barrier()

    def _wait(self, call: _Call) -> None:
        """Wait for the request whose last message was complete in a recorded wait, or before it."""
        requests = self._pending.get((call.group, call.name), [])
        ends = [max((one.stop for one in post.messages), default=0) for post, _ in requests]
        within = [place for place, end in enumerate(ends) if call.time <= end <= call.stop]
        earlier = [place for place, end in enumerate(ends) if end < call.time]
        if requests:
            requests.pop((within or earlier or [0])[0])[1].wait()

    def _complete(self, time: int) -> None:
        """Wait for messages that were complete at the recorded end of a step.

        A trace does not show that a rank would have waited for them: tests had found them complete.
        """
        for (_, name), requests in self._pending.items():
            for post, request in [*requests] if name in POSTS else ():
                if max((one.stop for one in post.messages), default=0) <= time:
                    request.wait()
                    requests.remove((post, request))

    def _post(self, comm: Communicator, members: list[int], messages: list[_Message]) -> Request:
        posted: list[Request] = []
        for one in messages:
            peer, array = members.index(one.peer), np.zeros(one.nbytes, "uint8")
            post = comm.isend if one.sends else comm.irecv
            posted.append(post(array, peer, one.tag))
        return Together(posted) if posted else Completed()

    def _length(self, call: _Call, size: int) -> int:
        """Return the length of the whole array of a collective call, in B."""
        if size == 1 or call.name in POSTS:
            return 0
        passes = 2 if call.name in ("allreduce", "iallreduce") else 1
        return round(call.nbytes * size / (passes * (size - 1)))

    def _array(self, nbytes: int) -> np.ndarray:
        """Return an array of zeros, which all calls share: their values do not matter.

        A trace has no types: gradients are mostly float32, short sums, as of losses, float64.
        """
        if nbytes > len(self._zeros):
            self._zeros = np.zeros(nbytes, "uint8")
        size = 8 if nbytes < SHORT and nbytes % 8 == 0 else 4 if nbytes % 4 == 0 else 1
        return self._zeros[:nbytes].view(f"f{size}" if size > 1 else "u1")


def median_step(ends: np.ndarray) -> float:
    """Return the median time between the ends of steps on the last rank, in s."""
    last = ends.max(axis=1)
    return float(np.median(np.diff(last))) if len(last) > 1 else float(last[0])


def what_if(
    timeline: Timeline,
    platforms: Sequence[Platform],
    *,
    bandwidths: Sequence[float] = (),
    allreduces: Sequence[Any] = (),
    without: Collection[int] | None = None,
) -> list[str]:
    """Return a table of the time of a step on platforms, and with one change or all of them.

    Parameters
    ----------
    timeline : Timeline
    platforms : sequence of Platform
        If the trace was recorded on several hosts of equal size, ranks are placed as they were.
    bandwidths : sequence of float
        Factors on the bandwidth between hosts.
    allreduces : sequence of str or callable
        Other algorithms of all sums.
    without : collection of int, optional
        Ranks that compute as long as the median of the others; empty: those that are slow.

    Raises
    ------
    ValueError
        As `Replay`; if no rank is slow, or a rank does not exist.
    """
    found, size = Replay(timeline), timeline.size
    slow = {one.rank for one in slow_ranks(timeline)} if without == () else {*(without or ())}
    if without is not None and not (slow and slow < {*range(size)}):
        named = f"ranks {sorted(slow)}" if slow else "none that is slow"
        raise ValueError(
            f"replay: expected some of {size} ranks to replace, got {named}; name them after "
            "--without, and leave at least one"
        )
    recorded = found.recorded
    rows = [["", "step", "of recorded"], ["recorded", f"{1e3 * recorded:.4g} ms", "100 %"]]
    changes: list[tuple[str, dict[str, Any]]] = [("", {})]
    changes += [(f"bandwidth x {one:g}", {"bandwidth": one}) for one in bandwidths]
    changes += [(f"allreduce {one}", {"allreduce": one}) for one in allreduces]
    if slow:
        words = ", ".join(map(str, sorted(slow)))
        changes.append((f"without slow rank {words}", {"without": slow}))
    together = {name: value for _, own in reversed(changes) for name, value in own.items()}
    if len(together) > 1:
        changes.append(("all of them, the first of each", together))
    for platform in platforms:
        placed = _placed(platform, timeline)
        for words, options in changes:
            options = dict(options)
            other, _ = change("bandwidth", options.pop("bandwidth", 1.0), placed)
            ends = found.run(other.network(size), Processor.of(other), **options)
            seconds = median_step(ends)
            name = f"{platform.name}, {words}" if words else platform.name
            rows.append([name, f"{1e3 * seconds:.4g} ms", f"{100 * seconds / recorded:.0f} %"])
    hosts = len({*placed.hosts(size)})
    steps = f"{len(timeline.steps)} steps of {size} ranks on {hosts} host{'s' * (hosts > 1)}"
    return [f"{steps}: computation as recorded, messages as on the platform", *align(rows, 1)]


def _placed(platform: Platform, timeline: Timeline) -> Platform:
    """Return a platform with as many ranks on a host as the trace has on each of several."""
    hosts = [about.get("host") for about in timeline.about]
    each = hosts.count(hosts[0])
    equal = all(hosts[i] == hosts[i - i % each] for i in range(len(hosts)))
    if each == len(hosts) or not equal or len({*hosts}) * each != len(hosts):
        return platform
    return replace(platform, cluster=replace(platform.cluster, ranks_per_host=each))
