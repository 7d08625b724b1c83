"""The step of a transformer of equal blocks, from the products and messages of one of them.

A block is computed as Megatron does (Narayanan et al. 2021, sections 2.3 and 3; Korthikanti et al.
2023): columns and rows of its matrices are divided among tensor ranks, whose results are summed
twice in each pass. All blocks take the same time, so that the schedule of `pydtnn`'s pipelines is
carried out with the time of one, times their number in a stage: nothing is built.
"""

from __future__ import annotations

from copy import copy
from math import ceil
from typing import NamedTuple

from benchmarks.published.rows import Published
from pydtnn.model.pipeline.check import StageTime, carry_out, plan_of
from pydtnn.tools.perfmodel import Platform
from pydtnn.tools.perfmodel.compute.accelerator import Accelerator
from pydtnn.tools.perfmodel.patterns import AxisGroups, Wires, ring_seconds, rows_of

ADAM = 28.0
"""Bytes of an update for a parameter: two slots and a value in float32, read and written, and the
value in 16 bits, written; the gradient is read besides."""


SOFTMAX = 12
"""Operations in float32 for a score in a kernel of attention: scale, mask, maximum, difference,
exponential (4), sum, conversion and those that correct earlier sums; as many in backward."""


ALIGNED = 16
"""Bytes of which rows of matrices in 16 bits must be a multiple for kernels of tensor cores (cuBLAS
Library, "Tensor Core Usage"); others sum in float32 at its rate."""


class Messages:
    """Times of messages along the axes of a run, on a platform's links."""

    def __init__(self, row: Published, platform: Platform) -> None:
        per_host, total = platform.cluster.ranks_per_host, row.devices
        axes = {"tensor": (row.tensor, 1), "data": (row.data, row.tensor)}
        axes["pipeline"] = row.pipeline, row.tensor * row.data
        self.groups = {name: AxisGroups(*own, per_host, total) for name, own in axes.items()}
        self.wires = Wires.of(platform, total)

    def collective(self, kind: str, axis: str, nbytes: float) -> float:
        """Return the time of a collective, in s."""
        return ring_seconds(kind, self.groups[axis], self.wires, nbytes)

    def ahead(self, nbytes: float) -> float:
        """Return the time of a message to the next stage, in s."""
        return sum(rows_of("to_next", self.groups["pipeline"], self.wires)[0].link(nbytes)[:2])


class PassTimes(NamedTuple):
    """Forward and backward of a micro-batch, in s; messages of tensor ranks are part of them."""

    forward: float
    backward: float


def block_times(row: Published, device: Accelerator, messages: Messages) -> PassTimes:
    """Return the times of a block, with what is computed again."""
    tokens, t, item = row.micro_batch * row.sequence, row.tensor, device.itemsize
    queries, keys, first, inner = (size / t for size in row.matrices)
    heads, size = row.micro_batch * row.heads / t, row.matrices[0] / row.heads
    matrices = [(queries + keys, row.hidden), (row.hidden, queries), (first, row.hidden)]
    matrices.append((row.hidden, inner))
    part = t if row.sequence_parallel else 1  # of the arrays between sums
    arrays = tokens * item * (11 * row.hidden / part + 2 * (queries + keys) + first + 2 * inner)
    scores = heads * row.sequence**2
    flash = row.attention == "flash"
    moved = {"moved": tokens * item * (2 * queries + keys)} if flash else {}
    core = copy(device)
    if size * item % ALIGNED:
        core.rate = device.kernels.products * 2 * device.vector
    causal = 0.5 if flash and row.network != "bert" else 1.0
    pair = (row.sequence, row.sequence, size, heads * causal)
    of_scores = (row.sequence, size, row.sequence, heads * causal)
    attention = core.product(*pair, **moved)
    attention += attention if flash else core.product(*of_scores)  # one kernel, block by block
    softmax = device.moved(scores * (4 * item + 1), 2)  # and dropout
    softmax_backward = device.moved(scores * (5 * item + 1), 2)
    if flash:
        softmax = softmax_backward = SOFTMAX * causal * scores / device.vector
    forward = sum(device.product(tokens, n, k) for n, k in matrices) + device.moved(arrays, 6)
    backward = device.moved(1.5 * arrays, 9)
    backward += sum(
        device.product(tokens, k, n) + device.product(k, n, tokens) for n, k in matrices
    )
    both = attention + softmax
    sums = 2 * messages.collective("allreduce", "tensor", tokens * row.hidden * item)
    exposed = 0.0 if row.tensor_overlap else sums
    again = {"none": 0.0, "selective": both, "full": forward + both + exposed}[row.recompute]
    return PassTimes(
        forward + both + exposed,
        backward + (2.5 if flash else 2.0) * attention + softmax_backward + exposed + again,
    )


def ends_times(row: Published, device: Accelerator) -> tuple[PassTimes, PassTimes]:
    """Return the times of the embedding and of the logits with their loss."""
    tokens, item = row.micro_batch * row.sequence, device.itemsize
    values = tokens * row.hidden * item
    embedding = PassTimes(device.moved(3 * values, 2), device.moved(3 * values, 2))
    predicted, words = tokens * row.predicted, row.vocabulary / row.tensor
    products = (predicted, words, row.hidden), (predicted, row.hidden, words)
    loss = device.moved(predicted * words * 20, 5)  # in float32: maximum, exponentials, sum
    last = device.product(row.hidden, words, predicted)
    forward = device.product(*products[0]) + loss
    return embedding, PassTimes(forward, device.product(*products[1]) + last + loss)


def pipeline_seconds(row: Published, times: dict[int, StageTime], micro_batches: int) -> float:
    """Return the time of all micro-batches in the stages of a pipeline, in s.

    When all ranks are busy, as many micro-batches as there are ranks always take the same time.
    """
    ranks = row.pipeline
    name = f"interleaved:{row.chunks}" if row.chunks > 1 else "1f1b"

    def of(number: int) -> float:
        return carry_out(plan_of(name, ranks, number), lambda a: times[a.stage]).duration

    followed = min(micro_batches, micro_batches % ranks + 3 * ranks)
    turns = (micro_batches - followed) // ranks
    whole = of(followed)
    return whole + (turns * (whole - of(followed - ranks)) if turns else 0.0)


def seconds(row: Published, platform: Platform) -> float:
    """Predict the time of a step, in s."""
    device, messages = Accelerator(platform, row.precision), Messages(row, platform)
    block = block_times(row, device, messages)
    ends = ends_times(row, device)
    micro_batches = row.batch // (row.data * row.micro_batch)
    stages = row.pipeline * row.chunks
    most = ceil((row.layers + 2 * row.embedding_stages) / stages)
    parameters = most * row.chunks * row.block / row.tensor
    if stages == 1:
        parameters += row.hidden * row.vocabulary / row.tensor * (2 - row.tied)
    passes = _exchanges(row, messages, parameters)
    values = row.micro_batch * row.sequence * row.hidden * device.itemsize
    ahead = messages.ahead(values / (row.tensor if row.scatter else 1)) if stages > 1 else 0.0

    times = {}
    for stage in range(stages):
        first, last = stage == 0, stage == stages - 1
        blocks = most - row.embedding_stages * (first + last)
        if last and not row.embedding_stages:
            blocks = row.layers - most * (stages - 1)
        own = [
            blocks * each + first * a + last * b for each, a, b in zip(block, *ends, strict=True)
        ]
        times[stage] = StageTime(own[0] + (not last) * ahead, own[1] + (not first) * ahead)
    compute = pipeline_seconds(row, times, micro_batches)
    backward = most * row.chunks * block.backward
    gathers = passes.forward
    hidden = max(backward * (1 - 1 / (most * row.chunks)), 0.0) if row.overlap else 0.0
    if row.sharded == 3:  # parameters are gathered, and gradients summed, in every micro-batch
        both = gathers + passes.backward
        exposed = gathers + both
        if row.overlap:
            forward = most * block.forward
            exposed = max(gathers - forward, 0.0) + max(both - backward, 0.0) + both / most
        exposed *= micro_batches
    else:
        exposed = max(passes.backward - hidden, passes.backward / most * row.overlap)
        exposed += gathers
    if row.tied and row.pipeline > 1:
        nbytes = row.hidden * row.vocabulary / row.tensor * row.gradient
        exposed += messages.ahead(nbytes)
    update = parameters / (row.data if row.sharded else 1)
    return compute + exposed + device.moved(update * (ADAM + row.gradient), 4)


def _exchanges(row: Published, messages: Messages, parameters: float) -> PassTimes:
    """Return the times of gathers of parameters, and of sums of gradients."""
    gather = messages.collective("allgather", "data", parameters * 2)
    reduce = messages.collective("reduce_scatter", "data", parameters * row.gradient)
    if row.sharded:
        return PassTimes(gather, reduce)
    return PassTimes(0.0, messages.collective("allreduce", "data", parameters * row.gradient))
