"""The files of a checkpoint, assembled from the pieces of all ranks.

Each file is written by one rank: the one that has most of its elements, or of several the one that
has been given fewest bytes. Ranks that have all elements therefore write equal shares, and ranks of
a mesh mostly what they have. The rest is sent to the writer, in blocks, so that no rank needs
memory for more than a block.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple, Protocol

import numpy as np

from pydtnn.comm import Communicator
from pydtnn.model.pieces import Piece, Region
from pydtnn.training.checkpoint.layout import DataFile, FileSegment, Layout
from pydtnn.utils.request import Request

BLOCK_BYTES = 1 << 20
"""Length of the blocks in which files are assembled and read, in B."""

TAG = 29_000
"""Tag of the messages with elements."""

Holders = Mapping[Region, Sequence[int]]
"""The ranks that have the elements of each region."""


class FileBlock(NamedTuple):
    """Elements of one array that are assembled together.

    Attributes
    ----------
    file : DataFile
    segment : Segment
    start, stop : int
        The elements, in those of the flattened array.
    sources : tuple of (Region, int)
        What is copied there, and from which rank.
    """

    file: DataFile
    segment: FileSegment
    start: int
    stop: int
    sources: tuple[tuple[Region, int], ...]


@dataclass(frozen=True)
class FilePlan:
    """Which rank writes which file, and which elements it receives for it.

    Attributes
    ----------
    layout : Layout
    writers : tuple of int
        The rank that writes each file.
    blocks : tuple of tuple of Block
        Those of each rank, in the order in which it assembles them.
    """

    layout: Layout
    writers: tuple[int, ...]
    blocks: tuple[tuple[FileBlock, ...], ...]

    def files(self, rank: int) -> list[DataFile]:
        """Return the files that a rank writes."""
        return [
            file
            for file, writer in zip(self.layout.files, self.writers, strict=True)
            if writer == rank
        ]


class Sink(Protocol):
    """Receives the files of a rank, block by block."""

    def room(self, file: DataFile, nbytes: int) -> np.ndarray:
        """Return memory (uint8) for the next bytes of a file."""

    def put(self, file: DataFile, data: np.ndarray) -> None:
        """Take these bytes: in the memory that `room` has returned, or those of training."""


def cut(layout: Layout, file: DataFile) -> Iterator[tuple[FileSegment, int, int]]:
    """Yield the blocks of a file: a segment, and the first and last element, exclusive."""
    for segment in file.segments:
        step = max(1, BLOCK_BYTES // layout.arrays[segment.array].itemsize)
        for start in range(segment.start, segment.stop, step):
            yield segment, start, min(start + step, segment.stop)


def create_plan(layout: Layout, holders: Holders, writers: Collection[int], size: int) -> FilePlan:
    """Choose the writers of files and the sources of their blocks, the same on all ranks.

    Parameters
    ----------
    layout : Layout
    holders : mapping of Region to sequence of int
        The ranks that have the elements of each region.
    writers : collection of int
        The ranks that can write in the folder.
    size : int
        Number of ranks.
    """
    regions: dict[str, list[Region]] = {}
    for region in holders:
        regions.setdefault(region.name, []).append(region)
    loads = dict.fromkeys(sorted(writers), 0)
    chosen: list[int] = []
    blocks: list[list[FileBlock]] = [[] for _ in range(size)]
    for file in layout.files:
        present = dict.fromkeys(loads, 0)
        for segment in file.segments:
            itemsize = layout.arrays[segment.array].itemsize
            for region in regions[segment.array]:
                count = region.elements(segment.start, segment.stop) * itemsize
                for rank in holders[region] if count else ():
                    if rank in present:
                        present[rank] += count
        most = max(present.values())
        writer = min((rank for rank in loads if present[rank] == most), key=loads.__getitem__)
        loads[writer] += file.size
        chosen.append(writer)
        for segment, start, stop in cut(layout, file):
            sources = _sources(regions[segment.array], holders, writer, start, stop)
            blocks[writer].append(FileBlock(file, segment, start, stop, sources))
    return FilePlan(layout, tuple(chosen), tuple(map(tuple, blocks)))


def _sources(
    regions: Sequence[Region], holders: Holders, writer: int, start: int, stop: int
) -> tuple[tuple[Region, int], ...]:
    """Return the regions that contain elements of a block, and a rank that has each."""
    found = []
    for region in regions:
        count = region.elements(start, stop)
        if count:
            ranks = holders[region]
            rank = writer if writer in ranks else ranks[writer % len(ranks)]
            if count == stop - start:  # all of it
                return ((region, rank),)
            found.append((region, rank))
    return tuple(found)


def assemble(
    comm: Communicator, plan: FilePlan, pieces: Mapping[Region, Piece], sink: Sink
) -> None:
    """Copy the pieces of all ranks into the files. Collective: all ranks call it.

    Parameters
    ----------
    comm : Communicator
    plan : Plan
    pieces : mapping of Region to Piece
        Those of this rank.
    sink : Sink
        Receives the files that this rank writes.
    """
    for blocks in zip_longest(*plan.blocks):
        sends, kept = [], []
        for writer, block in enumerate(blocks):
            if block is None or writer == comm.rank:
                continue
            for region, source in block.sources:
                if source == comm.rank:
                    own = _pack(pieces[region], block)
                    kept.append(own)
                    sends.append(comm.isend(own, writer, TAG))
        block = blocks[comm.rank]
        if block is not None:
            _fill(comm, plan.layout, block, pieces, sink)
        for request in sends:
            request.wait()


def _fill(
    comm: Communicator,
    layout: Layout,
    block: FileBlock,
    pieces: Mapping[Region, Piece],
    sink: Sink,
) -> None:
    """Assemble one block of this rank."""
    if len(block.sources) == 1 and block.sources[0][1] == comm.rank:
        view = pieces[block.sources[0][0]].view(block.start, block.stop)
        if view is not None:
            sink.put(block.file, view)
            return
    dtype = np.dtype(layout.arrays[block.segment.array].dtype)
    data = sink.room(block.file, (block.stop - block.start) * dtype.itemsize)
    out = data.view(dtype)
    received: list[tuple[Region, np.ndarray, Request]] = []
    for region, source in block.sources:
        if source == comm.rank:
            pieces[region].give(block.start, block.stop, out)
        else:
            elements = np.empty(region.elements(block.start, block.stop), dtype)
            request = comm.irecv(elements.view(np.uint8), source, TAG)
            received.append((region, elements, request))
    for region, elements, request in received:
        request.wait()
        _unpack(region, block, elements, out)
    sink.put(block.file, data)


def _pack(piece: Piece, block: FileBlock) -> np.ndarray:
    """Return the elements of a block that a piece has, one after the other, as bytes."""
    parts = [
        np.asarray(piece.host(here)).reshape(-1)
        for _, _, _, here in piece.region.overlaps(block.start, block.stop)
    ]
    return np.concatenate(parts).view(np.uint8)


def _unpack(region: Region, block: FileBlock, elements: np.ndarray, out: np.ndarray) -> None:
    """Place the result of `_pack` in the elements of the block."""
    first = 0
    for run, shape, there, _ in region.overlaps(block.start, block.stop):
        target = out[run].reshape(shape)[there]
        target[...] = elements[first : first + target.size].reshape(target.shape)
        first += target.size
