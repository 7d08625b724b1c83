"""What the lessons on pipelines share: stages, the execution of a schedule, and its picture.

A schedule is a list for each rank: ``("F", i)`` and ``("B", i)`` are forward and backward of
micro-batch i; in lesson 22 B computes the gradient of the stage's input only, and ``("W", i)`` that
of its parameters.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from nets import BATCH, RATE, STEPS, batch, cross_entropy, join
from ranks import Array, Rank

Action = tuple[str, int]
Schedule = Callable[[int, int, int], list[Action]]

LAYERS, FEATURES, MICRO_BATCHES = 12, 16, 6


def layer(index: int) -> Array:
    """Return w (I, O) of a layer: 64 features first, 4 classes last."""
    rng = np.random.default_rng(index)
    inputs = 64 if index == 0 else FEATURES
    outputs = 4 if index == LAYERS - 1 else FEATURES
    return rng.standard_normal((inputs, outputs)) * 1.3 / np.sqrt(inputs)


def train(rank: Rank, schedule: Schedule) -> tuple[Array, int]:
    """Train layers ``y = tanh(x w)`` of which each rank has a stage, as a schedule says.

    Returns
    -------
    parameters : ndarray
        Those of all stages.
    most : int
        Largest number of micro-batches whose activations this rank has kept at a time.
    """
    mine = np.array_split(np.arange(LAYERS), rank.size)[rank.rank]
    weights, most = [layer(i) for i in mine], 0
    first, last = rank.rank == 0, rank.rank == rank.size - 1
    actions = schedule(rank.rank, rank.size, MICRO_BATCHES)
    halves = any(kind == "W" for kind, _ in actions)
    for step in range(STEPS):
        images, labels = batch(step)
        micro_x = np.split(images.reshape(BATCH, -1), MICRO_BATCHES)  # (N / M, 64) each
        micro_labels = np.split(labels, MICRO_BATCHES)
        grads = [np.zeros_like(w) for w in weights]
        kept: dict[int, list[Array]] = {}  # inputs of the layers of a micro-batch
        left: dict[int, list[Array]] = {}  # and the gradients of their outputs, for W
        for kind, i in actions:
            if kind == "F":
                xs = [micro_x[i] if first else rank.receive(rank.rank - 1)]  # (N / M, I)
                for w in weights:
                    xs.append(np.tanh(xs[-1] @ w))
                kept[i], most = xs, max(most, len(kept) + 1)
                if not last:
                    rank.send(xs[-1], rank.rank + 1)
            elif kind == "B":
                xs, dys = kept[i], []
                dy = cross_entropy(xs[-1], micro_labels[i])[1] if last else None
                dy = rank.receive(rank.rank + 1) if dy is None else dy
                for w, y in zip(reversed(weights), reversed(xs), strict=False):
                    dys.append(dy * (1 - y * y))  # (N / M, O), of the product
                    dy = dys[-1] @ w.T  # (N / M, I)
                if not first:
                    rank.send(dy, rank.rank - 1)
                left[i] = dys[::-1]
            if kind == ("W" if halves else "B"):
                for g, x, dy in zip(grads, kept.pop(i), left.pop(i), strict=False):
                    g += x.T @ dy
        for w, g in zip(weights, grads, strict=True):
            w -= RATE / BATCH * g
    return join(rank.allgather_lists(weights)), most


def serial(size: int) -> Array:
    """Return the parameters of the same layers trained on whole batches by one process."""
    weights = [layer(i) for i in range(LAYERS)]
    for step in range(STEPS):
        images, labels = batch(step)
        xs = [images.reshape(BATCH, -1)]
        for w in weights:
            xs.append(np.tanh(xs[-1] @ w))
        _, dy = cross_entropy(xs[-1], labels)
        for i in reversed(range(LAYERS)):
            dy = dy * (1 - xs[i + 1] ** 2)
            dx = dy @ weights[i].T
            weights[i] = weights[i] - RATE / BATCH * xs[i].T @ dy
            dy = dx
    return join(weights)


def ends(plan: list[list[Action]], seconds: dict[str, int]) -> list[list[tuple[int, Action]]]:
    """Return when each action of each rank begins, if messages take no time."""
    size = len(plan)
    done: dict[tuple[str, int, int], int] = {}
    clock, position = [0] * size, [0] * size
    begins: list[list[tuple[int, Action]]] = [[] for _ in plan]
    while any(position[r] < len(plan[r]) for r in range(size)):
        before = sum(position)
        for r in range(size):
            while position[r] < len(plan[r]):
                kind, i = plan[r][position[r]]
                needs = {"F": ("F", i, r - 1), "B": ("B", i, r + 1), "W": ("B", i, r)}[kind]
                if kind == "B" and r == size - 1:
                    needs = ("F", i, r)
                if needs[2] >= 0 and needs not in done:
                    break
                begin = max(clock[r], done.get(needs, 0))
                begins[r].append((begin, (kind, i)))
                clock[r] = done[kind, i, r] = begin + seconds[kind]
                position[r] += 1
        assert sum(position) > before, "the ranks wait for each other for ever"
    return begins


def picture(plan: list[list[Action]], seconds: dict[str, int]) -> str:
    """Draw a line for each rank: time goes to the right, dots are bubbles."""
    begins = ends(plan, seconds)
    total = max(begin + seconds[kind] for row in begins for begin, (kind, _) in row)
    lines = []
    for row in begins:
        text = ["."] * total
        for begin, (kind, i) in row:
            name = {"F": str(i), "B": "abcdefghijklmnop"[i], "W": "-"}[kind]
            text[begin : begin + seconds[kind]] = name * seconds[kind]
        lines.append("".join(text))
    idle = sum(line.count(".") for line in lines) / (total * len(lines))
    words = "digits forward, letters backward" + ", - gradients of parameters" * ("W" in seconds)
    return "\n".join([*lines, f"bubbles: {idle:.0%} of the time ({words}, dots bubbles)"])


def bytes_sent(size: int) -> int:
    """Return the bytes of rank 0: its outputs of a batch in each step, and its stage in the end."""
    stage = np.array_split(np.arange(LAYERS), size)[0]
    outputs = BATCH * FEATURES * (size > 1)
    return 8 * (STEPS * outputs + (size - 1) * sum(layer(i).size for i in stage))


FORMULA = "8 (steps x N x features + (P - 1) x parameters of the first stage)"
