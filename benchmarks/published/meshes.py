"""The meshes that authors chose beside all others of as many devices, by the predicted step."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy

from benchmarks.published import transformer
from benchmarks.published.rows import Published, platform_of

STATE = 16
"""Bytes of a parameter: value and gradient in 16 bits, value and two moments in float32."""

MICRO_BATCHES = (1, 2, 4, 8, 16)


def memory(row: Published) -> float:
    """Return what a rank stores, in B, as Korthikanti et al. 2023, section 4, with recomputation.

    These are the state, the inputs of the blocks for each micro-batch in flight, and the
    activations of one block.
    """
    own = row.layers * row.block / (row.tensor * row.pipeline)
    own += row.hidden * row.vocabulary / row.tensor
    values = row.sequence * row.micro_batch * row.hidden
    turns = row.pipeline * (1 + (row.pipeline - 1) / (row.pipeline * row.chunks))
    in_flight = min(turns if row.chunks > 1 else row.pipeline, _micro_batches(row))
    scores = 5 * row.heads * row.sequence / row.hidden
    block = values * (10 + (24 + scores) / row.tensor)
    return STATE * own + 2 * values * row.layers / row.pipeline * in_flight + block


def _micro_batches(row: Published) -> int:
    return row.batch // (row.data * row.micro_batch)


def meshes(row: Published) -> Iterator[Published]:
    """Yield the run with each mesh, number of chunks and micro-batch that is possible."""
    platform = platform_of(row.platform)
    tensor = [n for n in (1, 2, 4, 8) if n <= platform.cluster.ranks_per_host]
    pipeline = [n for n in range(1, row.layers + 1) if row.layers % n == 0]
    for t, p in ((t, p) for t in tensor for p in pipeline):
        if row.devices % (t * p):
            continue
        for chunks in {1, 2, 4, row.chunks} if p > 1 else {1}:
            for micro_batch in MICRO_BATCHES:
                one = copy(row)
                one.tensor, one.pipeline, one.chunks, one.micro_batch = t, p, chunks, micro_batch
                whole = row.layers % (p * chunks) == 0 and row.batch % (one.data * micro_batch) == 0
                even = chunks == 1 or _micro_batches(one) % p == 0
                if whole and even and memory(one) <= platform.cluster.memory_per_rank:
                    yield one


def name(row: Published) -> str:
    """Return a mesh as text.

    >>> name(Published(tensor=8, pipeline=2, devices=32, chunks=1, micro_batch=4))
    'tensor 8, pipeline 2, data 2, micro-batch 4'
    """
    chunks = f" x {row.chunks}" if row.chunks > 1 else ""
    text = f"tensor {row.tensor}, pipeline {row.pipeline}{chunks}, data {row.data}"
    return f"{text}, micro-batch {row.micro_batch}"


def regret(row: Published) -> tuple[float, Published, int]:
    """Return by how much the mesh of a row exceeds the fastest, that one, and their number."""
    platform = platform_of(row.platform)
    times = [(transformer.seconds(one, platform), one) for one in meshes(row)]
    least, best = min(times, key=lambda one: one[0])
    return transformer.seconds(row, platform) / least - 1, best, len(times)
