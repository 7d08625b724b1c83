"""Traces as files: the records of each rank in one file of a folder.

A folder contains ``rank-0000.npz``, ``rank-0001.npz``, ... Each is an archive of NumPy arrays that
is read without pickles: `records`, an array of `RECORD`; `names`, the strings to which the field
`name` refers; and `about`, a JSON object with the facts of the run.
"""

from __future__ import annotations

import io
import json
import math
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pydtnn.utils.files import check_expansion, open_file
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
        ("tag", "i4"),  # of a message; of a collective call, its number in its group from 1; or -1
        ("bucket", "i4"),  # -1 for none
        ("group", "i4"),  # of a call or wait: position in `names` of its ranks' name; -1 for none
        ("memory", "i8"),  # B in use by the backend at the end; -1 if unknown
    ]
)
"""An activity or a message. Records are in the order in which they ended."""

VERSION = 2
"""Version of the files."""

ARRAYS = ("records", "names", "about")
"""The arrays in a file."""

COSTS = ("forward_flops", "backward_flops", "forward_bytes", "backward_bytes")
"""Facts of a layer that rates are computed from."""

MAX_DEPTH = 1000
"""Largest depth of nested activities: the time to find parents is proportional to it."""

MAX_RANKS = 2**20
"""Largest number of ranks, which memory for lists of ranks is proportional to."""

MAX_TIME_NS = 2**60
"""Latest time of a clock, in ns; differences of two times of two ranks are int64."""


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
        the communicator counted while it was recorded, "allreduce": the algorithm of its sums,
        "layers": {name: {"type", "parameters",
        "forward_flops", "backward_flops", "forward_bytes", "backward_bytes"}} for the samples of
        one step, "machine" (facts of the host), "failures" (of ranks, as texts).
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
    """Write the trace of a rank into a folder, which is created if necessary."""
    folder.mkdir(parents=True, exist_ok=True)
    path = file_of(folder, int(about["rank"]))
    with path.open("wb") as file:
        text = json.dumps({"version": VERSION, **about})
        np.savez_compressed(
            file, records=records.astype(RECORD), names=np.array(names, "U"), about=np.array(text)
        )


def read_traces(folder: str | Path, *, complete: bool = True) -> list[RankTrace]:
    """Read the traces of all ranks, in the order of the ranks.

    Parameters
    ----------
    folder : str or Path
    complete : bool
        Whether there must be one of every rank.

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
    other = [trace for trace in traces if trace.about["size"] != size]
    if other:
        raise ValueError(
            f"trace: {folder} has files of several runs: rank {other[0].rank} was one of "
            f"{other[0].about['size']} ranks, rank {traces[0].rank} one of {size}; keep those of "
            "one run"
        )
    if complete and [trace.rank for trace in traces] != [*range(size)]:
        found = ", ".join(str(trace.rank) for trace in traces)
        raise ValueError(f"trace: {folder} has the files of ranks {found} of {size}; copy all")
    return traces


def _read(path: Path) -> RankTrace:
    try:
        with open_file("trace", path) as stream, zipfile.ZipFile(stream) as file:
            sizes = [file.getinfo(f"{name}.npy").file_size for name in ARRAYS]
            check_expansion("it", os.fstat(stream.fileno()).st_size, sum(sizes))
            records, names, text = (_array(file.read(f"{name}.npy")) for name in ARRAYS)
            names, about = names.tolist(), json.loads(str(text))
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"trace: {path} is damaged ({reason}); trace the run again") from error
    if not isinstance(about, dict) or about.get("version") != VERSION or records.dtype != RECORD:
        raise ValueError(f"trace: {path} is of another version; trace the run again")
    problem = _problem(path, records, names, about)
    if problem:
        raise ValueError(f"trace: {path} is damaged ({problem}); trace the run again")
    return RankTrace(records, names, about)


def _array(data: bytes) -> np.ndarray:
    """Return the array of a file in NumPy's format, of which nothing is read before its length."""
    stream = io.BytesIO(data)
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0
    shape, _, dtype = (read if version == (1, 0) else np.lib.format.read_array_header_2_0)(stream)
    if math.prod(shape) * dtype.itemsize != len(data) - stream.tell():
        raise ValueError(f"{len(data):,} B for an array of shape {shape}")
    return np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)


def _problem(path: Path, records: np.ndarray, names: list[str], about: Mapping[str, Any]) -> str:
    """Return what is wrong with the content of a file; empty if it is consistent."""
    rank, size, lanes = (about.get(key) for key in ("rank", "size", "lanes"))
    if type(rank) is not int or type(size) is not int or not 0 <= rank < size <= MAX_RANKS:
        return f"its rank is {rank} of {size}"
    if path != file_of(path.parent, rank):
        return f"it contains rank {rank}"
    clock = about.get("clock")
    limits = {"offset": MAX_TIME_NS, "drift": 0.25, "origin": MAX_TIME_NS}
    if not isinstance(clock, dict) or not (
        all(_is_number(clock.get(key), -limit, limit) for key, limit in limits.items())
        and _is_number(clock.get("error", 0), 0, MAX_TIME_NS)
    ):
        return "it has no clock"
    if records.ndim != 1 or not isinstance(lanes, list) or {*map(type, lanes)} - {str}:
        return "it has no threads"
    if {*map(type, names)} - {str}:
        return "it has no names"
    if problem := _problem_of_facts(about):
        return problem
    limits = {"kind": len(Kind), "lane": len(lanes), "name": len(names), "group": len(names)}
    for key, limit in limits.items():
        if len(records) and records[key].max() >= limit:
            return f"a record has {key} {records[key].max()} of {limit}"
    if (records["duration"] < 0).any():
        return "a record has a negative duration"
    if (records["start"] < 0).any() or (records["start"] > MAX_TIME_NS - records["duration"]).any():
        return f"a record is not within {MAX_TIME_NS} ns"
    if (records["depth"] > MAX_DEPTH).any():
        return f"a record has depth {records['depth'].max()} of {MAX_DEPTH}"
    messages = records[np.isin(records["kind"], (Kind.SENT, Kind.RECEIVED))]
    if (messages["peer"] >= size).any():
        return f"a message has a peer that is not one of {size} ranks"
    return ""


def _problem_of_facts(about: Mapping[str, Any]) -> str:
    """Return what is wrong with the facts of the run; empty if they are consistent."""
    for key in ("host", "command", "allreduce"):
        if not isinstance(about.get(key, ""), str):
            return f"its {key} is not a text"
    layers, machine = about.get("layers", {}), about.get("machine", {})
    if not isinstance(layers, dict) or not isinstance(machine, dict):
        return "its layers or machine are no objects"
    failures = about.get("failures", [])
    if not isinstance(failures, list) or {*map(type, failures)} - {str}:
        return "its failures are no texts"
    for name, facts in layers.items():
        if not isinstance(facts, dict) or not isinstance(facts.get("type"), str):
            return f"the layer {name!r:.100} has no type"
        for key in COSTS:
            if not _is_number(facts.get(key), 0, 1e30):
                return f"the layer {name!r:.100} has no {key}"
    for key in ("flops_per_second", "bytes_per_second"):
        if not _is_number(machine.get(key, 0), 0, 1e30):
            return f"its {key} is not a number"
    return ""


def _is_number(value: Any, low: float, high: float) -> bool:
    return type(value) in (int, float) and low <= value <= high
