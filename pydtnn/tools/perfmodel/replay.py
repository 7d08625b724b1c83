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
from dataclasses import replace
from typing import Any

import numpy as np

from pydtnn.comm.communicator import Communicator
from pydtnn.comm.schedules.auto import ALLREDUCES, RULE, create_allreduce
from pydtnn.comm.schedules.network import Network
from pydtnn.tools.perfmodel.compute.base import NoCosts
from pydtnn.tools.perfmodel.oracle.what_if import change
from pydtnn.tools.perfmodel.platform import Platform
from pydtnn.tools.perfmodel.virtual.clock import RankClock
from pydtnn.tools.perfmodel.virtual.run import IDLE, Processor, run_virtual
from pydtnn.tools.tracing.analysis.calls import POSTS, Programs, RankProgram, Side, TracedCall
from pydtnn.tools.tracing.analysis.times import slow_ranks
from pydtnn.tools.tracing.timeline import Timeline
from pydtnn.utils import clock
from pydtnn.utils.request import Completed, Request, Together
from pydtnn.utils.units import align

SHORT = 1024
"""Bytes up to which an array of a sum is taken to be of float64."""


class Replay:
    """A trace that can be replayed on networks.

    Parameters
    ----------
    timeline : Timeline

    Raises
    ------
    ValueError
        If it has no step that all ranks have recorded, or steps are CUDA graphs.
    """

    def __init__(self, timeline: Timeline) -> None:
        if not len(timeline.steps):
            raise ValueError(
                "replay: expected a trace with training steps that all ranks have recorded, got "
                "none; use --trace without steps, or with several steps"
            )
        if "replay" in timeline.names:
            raise ValueError(
                "replay: expected a trace with the calls of each step, got CUDA graphs; record one "
                "with --device cuda:graph=false"
            )
        self.timeline = timeline
        self._programs = Programs(timeline)

    @property
    def recorded(self) -> float:
        """Median duration of the recorded steps, in s."""
        steps = self.timeline.steps
        return median_step(1e-9 * (steps.stop - steps.start[0].min()))

    def run(
        self,
        network: Network,
        processor: Processor = IDLE,
        *,
        allreduce: Any = None,
        without: Collection[int] = (),
    ) -> np.ndarray:
        """Return the time at which each rank ends each step, ``(steps, ranks)``, in s.

        Parameters
        ----------
        network : Network
            With the host of every rank.
        processor : Processor, optional
            What messages cost the processor of a rank; by default nothing.
        allreduce : str or callable, optional
            Algorithm of all sums (`create_allreduce`); by default that of the trace, if its name is
            known, and otherwise the rule.
        without : collection of int
            Ranks that compute, in every layer and phase of a step, as long as the median of the
            others does.

        Raises
        ------
        ValueError
            If the recorded calls of the ranks do not match.
        """
        ranks, groups = self._programs.of(without), self._programs.groups
        stops = self.timeline.steps.stop
        recorded = self.timeline.about[0].get("allreduce")
        algorithm = allreduce or (recorded if recorded in ALLREDUCES else RULE)

        def program(comm: Communicator) -> list[float]:
            own = _Repeated(create_allreduce(algorithm, comm), groups)
            return own.run(ranks[comm.rank], stops[:, comm.rank].tolist())

        try:
            run = run_virtual(program, network=network, costs=NoCosts(), processor=processor)
        except RuntimeError as error:
            raise ValueError(
                f"replay: the recorded calls of the ranks do not match: {error}; record whole steps"
            ) from error
        return np.array(run.results).T


class _Repeated:
    """The calls of a virtual rank, which are those of a recorded one."""

    def __init__(self, comm: Communicator, groups: dict[str, list[int]]) -> None:
        self._comm, self._own = comm, comm.rank
        self._zeros = np.zeros(1 << 16, "uint8")
        self._pending: dict[tuple[str, str], list[tuple[TracedCall, Request]]] = {}
        self._groups: dict[str, tuple[Communicator, list[int]]] = {}
        for name, members in groups.items():
            own = comm.split(0 if self._own in members else 1 + self._own)
            self._groups[name] = own, members

    def run(self, rank: RankProgram, stops: Sequence[int]) -> list[float]:
        """Repeat the calls; return the time after each step, in s."""
        self._comm.barrier()
        own, ends = clock.current(), []
        assert isinstance(own, RankClock)
        origin, before = clock.now(), int(rank.times[0])
        calls = [*rank.calls, *(TracedCall(stop, stop, name="") for stop in stops)]
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

    def _make(self, call: TracedCall) -> None:
        comm, members = self._groups.get(call.group, (self._comm, []))
        key, length = (call.group, call.name), call.length(comm.size)
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

    def _wait(self, call: TracedCall) -> None:
        """Wait for the request whose last message was complete in a recorded wait, or before it."""
        requests = self._pending.get((call.group, call.name), [])
        if requests:
            requests.pop(call.awaited([post for post, _ in requests]))[1].wait()

    def _complete(self, time: int) -> None:
        """Wait for messages that were complete at the recorded end of a step.

        A trace does not show that a rank would have waited for them: tests had found them complete.
        """
        for (_, name), requests in self._pending.items():
            for post, request in [*requests] if name in POSTS else ():
                if max((one.stop for one in post.messages), default=0) <= time:
                    request.wait()
                    requests.remove((post, request))

    def _post(self, comm: Communicator, members: list[int], messages: list[Side]) -> Request:
        posted: list[Request] = []
        for one in messages:
            peer, array = members.index(one.peer), np.zeros(one.nbytes, "uint8")
            post = comm.isend if one.sends else comm.irecv
            posted.append(post(array, peer, one.tag))
        return Together(posted) if posted else Completed()

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
