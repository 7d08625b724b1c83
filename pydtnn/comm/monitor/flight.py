"""The flight record of a rank: the newest records in its slot, as a file of a trace.

It is written by the process that watches the slot, so also for a rank that is stopped or killed.
It has the format of `tools.tracing.records`, without NumPy. What `--trace` records of a whole
run is then here for its end, and all that reads traces reads it.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import time
import zipfile
from pathlib import Path

from pydtnn.comm.monitor.slots import RECORD, Slot
from pydtnn.comm.monitor.table import RankRow

VERSION = 2
"""Of `pydtnn.tools.tracing.records`."""

FIELDS = (
    *(("kind", "|u1"), ("lane", "|u1"), ("depth", "<u2"), ("name", "<u4"), ("epoch", "<i4")),
    *(("step", "<i4"), ("start", "<i8"), ("duration", "<i8"), ("nbytes", "<i8"), ("peer", "<i4")),
    *(("tag", "<i4"), ("bucket", "<i4"), ("group", "<i4"), ("memory", "<i8")),
)
"""Of `pydtnn.tools.tracing.records.RECORD`."""

FORMAT = struct.Struct("<BBHIiiqqqiiiiq")
KIND, LANE, DEPTH, NAME, START, DURATION, GROUP = 0, 1, 2, 3, 6, 7, 12
"""Positions of fields."""

KINDS = 9
"""Number of `pydtnn.utils.observer.Kind`."""

YEAR_2026_NS = 1_767_225_600_000_000_000
"""Origin of the common clock: the files of ranks on several hosts have the time of day."""


def write_flight(slot: Slot, row: RankRow, size: int, why: str) -> None:
    """Write the records of a rank into the folder of its slot.

    Parameters
    ----------
    slot : Slot
        With a folder.
    row : Row
        What the rank is doing.
    size : int
        Number of all ranks.
    why : str
        Why the records are written.

    Raises
    ------
    OSError
        If the file cannot be written.
    """
    now, day = time.monotonic_ns(), time.time_ns()
    content, names = slot.read(), slot.names()
    data, written = slot.records()
    records, open_ones = _complete(data, len(names), now)
    about = {
        "version": VERSION,
        "rank": row.rank,
        "size": size,
        "host": row.host,
        "pid": content.pid,
        "lanes": ["main", *content.lanes],
        "command": "",
        "clock": {"offset": now - (day - YEAR_2026_NS), "drift": 0.0, "origin": 0, "error": 0},
        "allreduce": "",
        "layers": {},
        "machine": {},
        "flight": {
            "why": why,
            "time": day / 1e9,
            "written": written,
            "in progress": open_ones,
            "problem": row.problem,
            "doing": row.doing,
            "seconds": row.seconds,
            "epoch": content.epoch,
            "step": content.step,
            "call": None if content.call is None else vars(content.call),
        },
    }
    folder = Path(slot.folder)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"rank-{row.rank:04}.npz"
    unfinished = folder / f".rank-{row.rank:04}.{os.getpid()}.partial"
    try:
        with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            descr = str([*FIELDS])
            archive.writestr("records.npy", _npy(descr, f"({len(records) // RECORD},)", records))
            archive.writestr("names.npy", _texts(names))
            archive.writestr("about.npy", _texts([json.dumps(about)], shape="()"))
        unfinished.replace(file)
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink()


def remove_stale(folder: str, size: int) -> None:
    """Remove the files of ranks of an earlier run with more ranks."""
    with contextlib.suppress(OSError):
        for file in Path(folder).glob("rank-*.npz"):
            number = file.stem.removeprefix("rank-")
            if number.isdecimal() and int(number) >= size:
                file.unlink()


def _complete(data: bytes, names: int, now: int) -> tuple[bytes, int]:
    """Return records in the order of their ends, and how many, the last, are in progress.

    Those end now. Records that are being written are left out.
    """
    found = []
    for record in FORMAT.iter_unpack(data):
        valid = record[KIND] < KINDS and record[NAME] < names and record[GROUP] < names
        if not valid or not 0 <= record[START] <= now:
            continue
        open_one = record[DURATION] < 0
        if open_one:
            record = (*record[:DURATION], now - record[START], *record[DURATION + 1 :])
        found.append((open_one, record[START] + record[DURATION], -record[DEPTH], record))
    found.sort(key=lambda one: one[:3])
    return b"".join(FORMAT.pack(*one[3]) for one in found), sum(one[0] for one in found)


def _npy(descr: str, shape: str, data: bytes) -> bytes:
    """Return an array in NumPy's format, version 1.0."""
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}"
    length = -(-(len(header) + 11) // 64) * 64 - 10
    begin = b"\x93NUMPY\x01\x00" + struct.pack("<H", length)
    return begin + header.ljust(length - 1).encode() + b"\n" + data


def _texts(texts: list[str], shape: str = "") -> bytes:
    """Return an array of texts in NumPy's format."""
    longest = max(map(len, texts), default=1) or 1
    data = b"".join(text.ljust(longest, "\0").encode("utf-32-le") for text in texts)
    return _npy(f"'<U{longest}'", shape or f"({len(texts)},)", data)
