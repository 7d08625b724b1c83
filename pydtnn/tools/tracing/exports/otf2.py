"""Traces in the Open Trace Format 2, which Vampir opens."""

from __future__ import annotations

from operator import itemgetter
from pathlib import Path
from typing import Any

from pydtnn.tools.tracing.exports.chrome import threads, transitions
from pydtnn.tools.tracing.timeline import ActivityRecord, Message, Timeline
from pydtnn.utils.files import check_new
from pydtnn.utils.imports import import_optional
from pydtnn.utils.observer import Kind

COMPLETED, NESTED, POSTED = range(3)
"""Order of events at the same time: messages are posted and completed inside of calls."""


def write_otf2(timeline: Timeline, folder: Path) -> None:
    """Write a trace as an archive, ``traces.otf2`` in a new folder.

    Activities are regions, and messages are events of non-blocking point-to-point communication.
    Messages that only one side has recorded are left out.

    Raises
    ------
    OSError
        If the folder exists or cannot be created.
    ImportError
        If the package otf2 is not installed.
    """
    otf2 = import_optional("otf2", "otf2", "trace export: OTF2")
    check_new("trace export", folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with otf2.writer.open(str(folder), timer_resolution=1_000_000_000) as archive:
        _Otf2Archive(otf2, archive.definitions, timeline).write(archive)


class _Otf2Archive:
    """Definitions and events of an archive."""

    def __init__(self, otf2: Any, definitions: Any, timeline: Timeline) -> None:
        self.otf2, self.definitions, self.timeline = otf2, definitions, timeline
        machine = definitions.system_tree_node("machine")
        nodes = {
            host: definitions.system_tree_node(host, class_name="node", parent=machine)
            for host in dict.fromkeys(_host(about) for about in timeline.about)
        }
        groups = [
            definitions.location_group(f"rank {rank}", system_tree_parent=nodes[_host(about)])
            for rank, about in enumerate(timeline.about)
        ]
        self.locations = {
            (rank, lane): definitions.location(timeline.lanes[rank][lane], group=groups[rank])
            for rank, lane in threads(timeline)
        }
        paradigm = otf2.Paradigm.MPI
        mains = [self.locations[rank, 0] for rank in range(timeline.size)]
        kinds = otf2.GroupType.COMM_LOCATIONS, otf2.GroupType.COMM_GROUP
        definitions.group("locations", group_type=kinds[0], paradigm=paradigm, members=mains)
        ranks = list(range(timeline.size))
        self.everyone = definitions.group(
            "all ranks", group_type=kinds[1], paradigm=paradigm, members=ranks
        )
        self.regions: dict[tuple[int, int], Any] = {}
        self.communicators: dict[int, Any] = {}

    def write(self, archive: Any) -> None:
        messages: dict[tuple[int, int], list[tuple[int, int, Any]]]
        messages = {thread: [] for thread in self.locations}
        self._add_messages(messages)
        for thread, location in self.locations.items():
            writer = archive.event_writer_from_location(location)
            for _, _, event in sorted(
                [*messages[thread], *self._activities(*thread)], key=itemgetter(0, 1)
            ):
                writer.write(event)

    def _activities(self, rank: int, lane: int) -> list[tuple[int, int, Any]]:
        events = self.otf2.events
        return [
            (time, NESTED, (events.Enter if begins else events.Leave)(time, self._region(row)))
            for time, row, begins in transitions(self.timeline, rank, lane)
        ]

    def _region(self, row: ActivityRecord) -> Any:
        key = row.kind, row.name
        if key not in self.regions:
            communicates = row.kind in (Kind.CALL, Kind.WAIT)
            paradigm = self.otf2.Paradigm.MPI if communicates else self.otf2.Paradigm.USER
            region = self.definitions.region(self.timeline.title(*key), paradigm=paradigm)
            self.regions[key] = region
        return self.regions[key]

    def _communicator(self, group: int) -> Any:
        if group not in self.communicators:
            name = self.timeline.names[group]
            self.communicators[group] = self.definitions.comm(name, group=self.everyone)
        return self.communicators[group]

    def _add_messages(self, found: dict[tuple[int, int], list[tuple[int, int, Any]]]) -> None:
        events = self.otf2.events
        for number, (sent, received) in enumerate(self.timeline.messages.pairs()):
            rest = self._communicator(sent.group), sent.tag, sent.nbytes
            posted = events.MpiIsend(sent.start, sent.target, *rest, number)
            done = events.MpiIsendComplete(sent.stop, number)
            found[sent.source, sent.lane] += _pair(sent, posted, done)
            posted = events.MpiIrecvRequest(received.start, number)
            done = events.MpiIrecv(received.stop, sent.source, *rest, number)
            found[sent.target, received.lane] += _pair(received, posted, done)


def _pair(side: Message, posted: Any, done: Any) -> list[tuple[int, int, Any]]:
    """Return the events of a message on one side, the completion last."""
    place = COMPLETED if side.stop > side.start else POSTED
    return [(side.start, POSTED, posted), (side.stop, place, done)]


def _host(about: dict[str, Any]) -> str:
    return str(about.get("host", "unknown"))
