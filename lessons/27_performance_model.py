"""27 A performance model by hand: four numbers predict a step.

A step of lesson 02 computes and then sums. Its time is

    T = F / (P R) + c + 2 (P - 1) (a + n / P w)

with F floating-point operations of a batch, R operations per second of a rank in these products, c
the time of a step's work that does not depend on the batch (the update among it), a the latency of
a message (s), w the time per byte that is received and added, and n bytes of gradients. R, c, a and
w are measured before, apart from each other; the prediction is printed beside the fastest step, as
the measurements are the fastest of several, too (Hockney, "The communication challenge for MPP",
1994; Valiant, 1990).

Only the bytes are asserted: times differ from machine to machine. The model has no term for ranks
that wait for a core, or, as threads do, for the interpreter: on a busy machine, or with more ranks
than cores, it is off by factors. Start it by `OPENBLAS_NUM_THREADS=1 mpirun -np 2` on a quiet one;
where prediction and measurement still differ, ask which number is wrong.
"""

import time
from itertools import pairwise

import numpy as np

from nets import BATCH, RATE, batch, gradients, join, parameters, part, split
from ranks import Array, Rank, main

SIZES, STEPS, REPEATS = [64, 256, 256, 4], 8, 15
LONG = 40_000  # elements of the longer message, about as many as those of the sums
FLOPS = 6 * sum(i * o for i, o in pairwise(SIZES))
"""Of a sample: forward and two products of backward, of a multiplication and an addition each."""


def seconds(function) -> float:
    """Return the least time of a call, in s."""
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return min(times)


def update(params: list[Array], total: Array) -> None:
    """Make a step with the gradient (n,) of a batch."""
    for p, g in zip(params, split(total, params), strict=True):
        p -= RATE / BATCH * g


def compute_costs() -> tuple[float, float]:
    """Return the time of a sample and of a step without samples, in s, from two batches."""
    params, (x, labels) = parameters(SIZES), batch(0, 10 * BATCH)
    zero = np.zeros(join(params).size)

    def step(samples: int) -> None:
        join(gradients(params, x[:samples], labels[:samples])[1])
        update(params, zero)

    few, many = seconds(lambda: step(BATCH)), seconds(lambda: step(10 * BATCH))
    per_sample = max(many - few, 0.01 * many) / (9 * BATCH)
    return per_sample, max(few - BATCH * per_sample, 0)


def message_costs(rank: Rank) -> tuple[float, float]:
    """Return the latency, in s, and the time per byte, in s/B, of messages that are added."""

    def around(elements: int) -> float:
        array = np.zeros(elements)

        def once() -> None:
            rank.send(array, (rank.rank + 1) % rank.size)
            np.add(array, rank.receive((rank.rank - 1) % rank.size), out=array)

        return seconds(once)

    short, long = around(1), around(LONG)
    return short, max(long - short, 0) / (8 * LONG)


def train(rank: Rank) -> Array:
    """Train as in lesson 02, and print its time per step beside the predicted one."""
    params, times = parameters(SIZES), []
    per_sample, fixed = compute_costs()
    latency, per_byte = message_costs(rank) if rank.size > 1 else (0.0, 0.0)
    nbytes = join(params).nbytes
    sums = 2 * (rank.size - 1) * (latency + nbytes / rank.size * per_byte)
    # exercise: the time of a step
    predicted = BATCH / rank.size * per_sample + fixed + sums
    for step in range(STEPS):
        x, labels = (part(a, rank.rank, rank.size) for a in batch(step))
        begin = time.perf_counter()
        update(params, rank.allreduce(join(gradients(params, x, labels)[1])))
        times.append(time.perf_counter() - begin)
    if rank.rank == 0 and rank.size > 1:
        print(f"R {FLOPS / per_sample / 1e9:.2f} GFLOP/s, c {1e6 * fixed:.0f} us,", end=" ")
        print(f"a {1e6 * latency:.0f} us, 1 / w {1 / max(per_byte, 1e-15) / 1e9:.2f} GB/s")
        print(f"a step: predicted {1e6 * predicted:.0f} us, at best {1e6 * min(times):.0f} us")
    return join(params)


def bytes_sent(size: int) -> int:
    """Return the bytes of the sums, and of the messages that were measured."""
    sums = STEPS * 2 * (size - 1) * -(-join(parameters(SIZES)).size // size)
    return 8 * (sums + (size > 1) * REPEATS * (1 + LONG))


if __name__ == "__main__":
    main(
        train,
        bytes_sent,
        "8 (steps x 2 (P - 1) ceil(n / P) + the messages that were measured)",
        "pydtnn/tools/perfmodel/projection.py: Projector",
    )
