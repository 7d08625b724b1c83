"""Traces as files: the records of each rank in one file of a folder.

A folder contains ``rank-0000.npz``, ``rank-0001.npz``, ... Each is an archive of NumPy arrays that
is read without pickles: `records`, an array of `RECORD`; `names`, the strings to which the field
`name` refers; and `about`, a JSON object with the facts of the run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pydtnn.utils.observer import Kind

RECORD = np.dtype(
    [
        ("kind", "u1"),  # `pydtnn.utils.observer.Kind`
        ("lane", "u1"),  # thread: 0 is the main one
        ("depth", "u2"),  # number of activities of the thread that it is nested in
        ("name", "u4"),  # position in `names`
        ("epoch", "i4"),  # -1 outside of training steps
        ("step", "i4"),  # within the epoch; -1 outside of training steps
        ("start", "i8"),  # ns of this rank's clock
        ("duration", "i8"),  # ns
        ("nbytes", "i8"),  # B
        ("peer", "i4"),  # rank among all; -1 if it is no message
        ("tag", "i4"),  # of a message
        ("bucket", "i4"),  # -1 for none
        ("group", "i4"),  # of a call or wait: position in `names` of its ranks' name; -1 for none
        ("memory", "i8"),  # B in use by the backend at the end; -1 if unknown
    ]
)
"""An activity or a message. Records are in the order in which they ended."""

VERSION = 2
"""Version of the files."""


@dataclass
class RankTrace:
    """The trace of one rank.

    Attributes
    ----------
    records : ndarray of RECORD
    names : list of str
    about : dict
        "version", "rank", "size", "host", "pid", "lanes" (names of the threads), "command",
        "clock": {"offset": ns, "drift": ns per ns, "origin": ns, "error": ns}, "sent": bytes that
        the communicator counted while it was recorded, "layers": {name: {"type", "parameters",
        "forward_flops", "backward_flops", "forward_bytes", "backward_bytes"}} for the samples of
        one step, "machine" (facts of the host).
    """

    records: np.ndarray
    names: list[str]
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """Number of the rank."""
        return int(self.about["rank"])

    def to_common(self, times: np.ndarray) -> np.ndarray:
        """Convert times of this rank's clock to the clock of rank 0, both in ns.

        With offset o, drift d and origin t0: t - o - d (t - t0).
        """
        clock = self.about["clock"]
        drifted = clock["drift"] * (times - clock["origin"])
        return times - clock["offset"] - np.rint(drifted).astype("i8")


def file_of(folder: Path, rank: int) -> Path:
    """Return the file of a rank."""
    return folder / f"rank-{rank:04}.npz"


def write_trace(
    folder: Path, records: np.ndarray, names: Sequence[str], about: Mapping[str, Any]
) -> None:
    """Write the trace of a rank into a folder, which exists."""
    path = file_of(folder, int(about["rank"]))
    with path.open("wb") as file:
        text = json.dumps({"version": VERSION, **about})
        np.savez_compressed(
            file, records=records.astype(RECORD), names=np.array(names, "U"), about=np.array(text)
        )


def read_traces(folder: str | Path) -> list[RankTrace]:
    """Read the traces of all ranks, in the order of the ranks.

    Raises
    ------
    ValueError
        If the folder has no traces, those of a rank are missing, or a file is damaged.
    """
    folder = Path(folder)
    paths = sorted(folder.glob("rank-*.npz"))
    if not paths:
        raise ValueError(f"trace: {folder} has no rank-*.npz; give the folder of --trace")
    traces = [_read(path) for path in paths]
    size = traces[0].about["size"]
    other = [trace.rank for trace in traces if trace.about["size"] != size]
    if other:
        raise ValueError(
            f"trace: {folder} has files of several runs: rank {other[0]} was one of "
            f"{traces[other[0]].about['size']} ranks, rank 0 one of {size}; keep those of one run"
        )
    if [trace.rank for trace in traces] != [*range(size)]:
        found = ", ".join(str(trace.rank) for trace in traces)
        raise ValueError(f"trace: {folder} has the files of ranks {found} of {size}; copy all")
    return traces


def _read(path: Path) -> RankTrace:
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            records, names = file["records"], file["names"].tolist()
            about = json.loads(str(file["about"]))
    except Exception as error:
        raise ValueError(f"trace: {path} is damaged ({error}); trace the run again") from error
    if not isinstance(about, dict) or about.get("version") != VERSION or records.dtype != RECORD:
        raise ValueError(f"trace: {path} is of another version; trace the run again")
    problem = _problem(path, records, names, about)
    if problem:
        raise ValueError(f"trace: {path} is damaged ({problem}); trace the run again")
    return RankTrace(records, names, about)


def _problem(path: Path, records: np.ndarray, names: list[str], about: Mapping[str, Any]) -> str:
    """Return what is wrong with the content of a file; empty if it is consistent."""
    rank, size, lanes = (about.get(key) for key in ("rank", "size", "lanes"))
    if type(rank) is not int or type(size) is not int or not 0 <= rank < size:
        return f"its rank is {rank} of {size}"
    if path != file_of(path.parent, rank):
        return f"it contains rank {rank}"
    clock = about.get("clock")
    keys = ("offset", "drift", "origin")
    if not isinstance(clock, dict) or not all(
        isinstance(clock.get(key), int | float) and np.isfinite(clock[key]) for key in keys
    ):
        return "it has no clock"
    if not isinstance(lanes, list) or records.ndim != 1:
        return "it has no threads"
    limits = {"kind": len(Kind), "lane": len(lanes), "name": len(names), "group": len(names)}
    for key, limit in limits.items():
        if len(records) and records[key].max() >= limit:
            return f"a record has {key} {records[key].max()} of {limit}"
    if (records["duration"] < 0).any():
        return "a record has a negative duration"
    messages = records[np.isin(records["kind"], (Kind.SENT, Kind.RECEIVED))]
    if (messages["peer"] >= size).any():
        return f"a message has a peer that is not one of {size} ranks"
    return ""
