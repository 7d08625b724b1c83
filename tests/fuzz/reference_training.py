"""Data-parallel training of a small network, written once more: all ranks in one loop, in NumPy.

Nothing here is shared with pydtnn but the order of the samples, the initial weights and the names
of schemes. Every rank has a row of its own in arrays of shape (P, parameters).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

Array = np.ndarray


@dataclass
class Perceptron:
    """Linear layers with tanh between them, and the cross entropy of a softmax.

    Attributes
    ----------
    sizes : sequence of int
        Features, hidden layers, classes. Parameters lie one after the other: w (out, in), b (out).
    """

    sizes: Sequence[int]

    def split(self, flat: Array) -> list[tuple[Array, Array]]:
        parts, begin = [], 0
        for inner, outer in zip(self.sizes, self.sizes[1:], strict=False):
            middle = begin + inner * outer
            w, b = flat[begin:middle].reshape(outer, inner), flat[middle : middle + outer]
            parts.append((w, b))
            begin = middle + outer
        return parts

    def decays(self) -> Array:
        """1 for weights, 0 for biases."""
        sizes = zip(self.sizes, self.sizes[1:], strict=False)
        return np.concatenate([[1.0] * (i * o) + [0.0] * o for i, o in sizes])

    def outputs(self, flat: Array, x: Array) -> list[Array]:
        """The inputs of every layer, then the logits."""
        values = [x]
        layers = self.split(flat)
        for i, (w, b) in enumerate(layers):
            z = values[-1] @ w.T + b
            values.append(z if i == len(layers) - 1 else np.tanh(z))
        return values

    def judge(self, flat: Array, x: Array, y: Array) -> Array:
        """Summed loss, number of right answers, number of samples."""
        logits = self.outputs(flat, x)[-1]
        shifted = logits - logits.max(axis=1, keepdims=True)
        losses = np.log(np.exp(shifted).sum(axis=1)) - shifted[np.arange(len(y)), y]
        return np.array([losses.sum(), (logits.argmax(axis=1) == y).sum(), len(y)])

    def gradient(self, flat: Array, x: Array, y: Array) -> Array:
        """Of the summed loss."""
        *inputs, logits = self.outputs(flat, x)
        dz = np.exp(logits - logits.max(axis=1, keepdims=True))
        dz /= dz.sum(axis=1, keepdims=True)
        dz[np.arange(len(y)), y] -= 1
        found: list[Array] = []
        for (w, _), value in zip(self.split(flat)[::-1], inputs[::-1], strict=True):
            found = [(dz.T @ value).reshape(-1), dz.sum(axis=0), *found]
            dz = (dz @ w) * (1 - value**2)
        return np.concatenate(found)


@dataclass
class Rule:
    """An update of one rank's parameters; `options` are those of pydtnn's rule of that name."""

    name: str
    options: Mapping[str, Any]
    decays: Array
    step: int = 0
    m: Array = field(default_factory=lambda: np.zeros(()))
    v: Array = field(default_factory=lambda: np.zeros(()))

    def __call__(self, w: Array, g: Array) -> Array:
        """Return the parameters after this update."""
        self.step += 1
        lr = self.options["lr"](self.step - 1)
        decay, clip = self.options["weight_decay"] * self.decays, self.options["clip_norm"]
        norm = np.sqrt((g * g).sum())
        if clip is not None and norm > clip:
            g = g * (clip / norm)
        if self.name == "sgd":
            self.v = self.options["momentum"] * self.v + g + decay * w
            nesterov = self.options["nesterov"]
            g = g + decay * w + self.options["momentum"] * self.v if nesterov else self.v
            return w - lr * g
        epsilon = self.options["epsilon"]
        if self.name == "rmsprop":
            g = g + decay * w
            self.v = 0.99 * self.v + 0.01 * g * g
            return w - lr * g / (np.sqrt(self.v) + epsilon)
        if self.name == "adamw":
            w = w - lr * decay * w
        else:
            g = g + decay * w
        self.m, self.v = 0.9 * self.m + 0.1 * g, 0.999 * self.v + 0.001 * g * g
        m, v = self.m / (1 - 0.9**self.step), self.v / (1 - 0.999**self.step)
        return w - lr * m / (np.sqrt(v) + epsilon)


@dataclass
class Ranks:
    """What all ranks hold.

    Attributes
    ----------
    w : ndarray, shape (P, parameters)
    rules : list of Rule
    options : mapping
        Of the scheme.
    samples : ndarray, shape (P,)
        That each rank has trained on since parameters were averaged.
    steps : int
    centre, velocity : ndarray
        Of elastic averaging and of outer optimizers.
    waiting : list of ndarray
        Sums of gradients that have not been applied yet, the oldest first.
    memory : dict
        What compressors keep between steps, by name, shape (P, parameters).
    """

    w: Array
    rules: Sequence[Rule]
    options: Mapping[str, Any]
    samples: Array
    centre: Array
    velocity: Array = field(default_factory=lambda: np.zeros(()))
    waiting: list[Array] = field(default_factory=list)
    memory: dict[Any, Any] = field(default_factory=dict)
    steps: int = 0

    def apply(self, grads: Sequence[Array]) -> None:
        pairs = zip(self.rules, self.w, grads, strict=True)
        self.w = np.array([rule(w, g) for rule, w, g in pairs])
        self.steps += 1

    def apply_own_means(self, grads: Array, counts: Array) -> None:
        """Each rank applies the mean of its samples' gradients; without samples, it only counts."""
        for rank, (rule, n) in enumerate(zip(self.rules, counts, strict=True)):
            if n:
                self.w[rank] = rule(self.w[rank], grads[rank] / n)
            else:
                rule.step += 1
        self.steps += 1

    def mean(self) -> Array:
        """The average of the parameters by samples, of rank 0's own where there is none."""
        total = self.samples.sum()
        return self.samples @ self.w / total if total else self.w[0]


def summed(ranks: Ranks, grads: Array, counts: Array) -> None:
    """Every rank applies the mean of all samples' gradients."""
    ranks.apply([grads.sum(axis=0) / counts.sum()] * len(grads))


def stale(ranks: Ranks, grads: Array, counts: Array) -> None:
    ranks.waiting.append(grads.sum(axis=0) / counts.sum())
    late = len(ranks.waiting) > ranks.options["delay"]
    ranks.apply([ranks.waiting.pop(0) if late else 0 * grads[0]] * len(grads))


def local(ranks: Ranks, grads: Array, counts: Array) -> None:
    if ranks.steps < ranks.options.get("after", 0):
        summed(ranks, grads, counts)
        ranks.samples[:] = 0
    else:
        ranks.apply_own_means(grads, counts)
    if ranks.steps % ranks.options["period"] == 0:
        ranks.w[:] = ranks.mean()
        ranks.samples[:] = 0


def diloco(ranks: Ranks, grads: Array, counts: Array) -> None:
    ranks.apply_own_means(grads, counts)
    if ranks.steps % ranks.options["period"] == 0:
        rate, momentum = ranks.options["rate"], ranks.options["momentum"]
        change = ranks.centre - ranks.mean()
        ranks.velocity = momentum * ranks.velocity + change
        ranks.centre = ranks.centre - rate * (change + momentum * ranks.velocity)
        ranks.w[:] = ranks.centre
        ranks.samples[:] = 0


def streaming_diloco(ranks: Ranks, grads: Array, counts: Array, power: float = 0) -> None:
    """Of buckets whose parameters are the options `buckets`, by default one with all."""
    ranks.apply_own_means(grads, counts)
    rate, momentum, mixing = (ranks.options[name] for name in ("rate", "momentum", "mixing"))
    period, delay = ranks.options["period"], ranks.options["delay"]
    ranks.velocity = ranks.velocity + np.zeros_like(ranks.centre)
    buckets = ranks.options.get("buckets", [slice(None)])
    for index, own in enumerate(buckets):
        when = ranks.steps + index * period // len(buckets)
        if when % period == 0:
            weights = ranks.samples**power / (ranks.samples**power).sum()
            ranks.memory[index] = ranks.centre[own] - weights @ ranks.w[:, own]
        if (when - delay) % period == 0 and index in ranks.memory:
            change = ranks.memory.pop(index)
            ranks.velocity[own] = momentum * ranks.velocity[own] + change
            ranks.centre[own] -= rate * (change + momentum * ranks.velocity[own])
            ranks.w[:, own] = mixing * ranks.w[:, own] + (1 - mixing) * ranks.centre[own]


def slow_momentum(ranks: Ranks, grads: Array, counts: Array) -> None:
    ranks.apply_own_means(grads, counts)
    if ranks.steps % ranks.options["period"] == 0:
        lr = ranks.rules[0].options["lr"](ranks.steps - 1)
        change = ranks.centre - ranks.mean()
        ranks.velocity = ranks.options["momentum"] * ranks.velocity + change / lr
        ranks.centre = ranks.centre - ranks.options["rate"] * lr * ranks.velocity
        ranks.w[:] = ranks.centre
        ranks.samples[:] = 0


def elastic(ranks: Ranks, grads: Array, counts: Array) -> None:
    if ranks.steps % ranks.options["period"] == 0:
        pulls = ranks.options["beta"] / len(grads) * (ranks.w - ranks.centre)
        ranks.w = ranks.w - pulls
        ranks.centre = ranks.centre + pulls.sum(axis=0)
    ranks.apply_own_means(grads, counts)


def gossip(ranks: Ranks, grads: Array, counts: Array) -> None:
    size, step = len(grads), ranks.steps
    ranks.apply(grads * (size / counts.sum()))
    hops = {
        "ring": {1 % size, -1 % size} - {0},
        "complete": set(range(1, size)),
        "exponential": set(powers := [1 << k for k in range(10) if 1 << k < size]),
        "one_peer": {powers[step % len(powers)]} if powers else set(),
    }[ranks.options["graph"]]
    heard = [ranks.w] + [np.roll(ranks.w, hop, axis=0) for hop in hops]
    ranks.w = np.mean(heard, axis=0)
    ranks.samples[:] = 1


def one_bit_adam(ranks: Ranks, grads: Array, counts: Array) -> None:
    """Sums of gradients, then of signs of momenta, in one bucket: weights, then biases.

    Of both the last layer is first. Parameters, whose lengths are those of runs of equal decay,
    have blocks of 128 and are cut where the parts of two ranks meet.
    """
    rule, size = ranks.rules[0], len(grads)
    if ranks.steps < ranks.options["warm_up"]:
        summed(ranks, grads, counts)
        return
    ends = [0, *np.flatnonzero(np.diff(rule.decays)) + 1, len(rule.decays)]
    runs = [np.arange(a, b) for a, b in pairwise(ends)]
    order = np.concatenate([*runs[-2::-2], *runs[::-2]])
    part_of = np.repeat(np.arange(size), [len(p) for p in np.array_split(order, size)])
    parameter_of = np.searchsorted(ends, order, "right")
    starts = np.zeros(len(order), int)  # of each block, in the order of the bucket
    for i in range(1, len(order)):
        new = part_of[i] != part_of[i - 1] or parameter_of[i] != parameter_of[i - 1]
        starts[i] = i if new or i - starts[i - 1] == 128 else starts[i - 1]

    def compressed(x: Array) -> Array:
        scale = np.bincount(starts, abs(x)) / np.maximum(np.bincount(starts), 1)
        return np.where(x >= 0, 1, -1) * scale[starts]

    beta1, beta2 = 0.9, 0.999
    kept = ranks.memory.get("kept", np.zeros_like(grads))
    served = ranks.memory.get("served", np.zeros(len(order)))
    sent = kept + (beta1 / size * rule.m + (1 - beta1) * grads / counts.sum())[:, order]
    received = np.array([compressed(x) for x in sent])
    total = received.sum(axis=0) + served
    ranks.memory = {"kept": sent - received, "served": total - compressed(total)}
    m, lr = np.empty_like(grads[0]), rule.options["lr"](rule.step)
    m[order] = compressed(total)
    v = rule.v / (1 - beta2 ** ranks.options["warm_up"])
    step = m / (1 - beta1 ** (rule.step + 1)) / (np.sqrt(v) + rule.options["epsilon"])
    ranks.w = ranks.w - lr * (step + rule.options["weight_decay"] * rule.decays * ranks.w)
    for each in ranks.rules:
        each.m, each.step = m, each.step + 1
    ranks.steps += 1


def sign_vote(ranks: Ranks, grads: Array, counts: Array) -> None:
    """What most ranks vote for, as signs of their momentum."""
    u = ranks.options["momentum"] * ranks.memory.get("u", 0) + grads / counts.sum()
    ranks.memory["u"] = u
    ranks.apply([np.sign(np.sign(u).sum(axis=0))] * len(grads))


def dgc(ranks: Ranks, grads: Array, counts: Array) -> None:
    """The largest elements of each rank's sums of its momentum."""
    share, warm_up = ranks.options["share"], ranks.options["warm_up"]
    if warm_up:
        share = max(share, 0.25 ** (1 + ranks.steps // warm_up))
    u = ranks.options["momentum"] * ranks.memory.get("u", 0) + grads / counts.sum()
    v = ranks.memory.get("v", 0) + u
    ranks.memory = {"u": u, "v": v}
    total, ends = np.zeros_like(grads[0]), np.cumsum(ranks.options.get("sizes", [len(v[0])]))
    for own_u, own_v in zip(u, v, strict=True):
        for part in np.split(np.arange(len(total)), ends[:-1]):
            kept = part[np.argsort(abs(own_v[part]))[-int(np.ceil(share * len(part))) :]]
            total[kept] += own_v[kept]
            own_u[kept] = own_v[kept] = 0
    ranks.apply([total] * len(grads))


COMPRESSED: dict[str, Callable[[Ranks, Array, Array], None]] = {"sign_vote": sign_vote, "dgc": dgc}
"""The same of all-reduce with a compressor; `sizes` are the lengths of buckets, by default one."""

STEPS: dict[str, Callable[[Ranks, Array, Array], None]] = {
    "allreduce": summed,
    "sharded": summed,
    "sharded_gradients": summed,
    "sharded_parameters": summed,
    "stale": stale,
    "local_sgd": local,
    "post_local_sgd": local,
    "diloco": diloco,
    "streaming_diloco": streaming_diloco,
    "slow_momentum": slow_momentum,
    "elastic": elastic,
    "one_bit_adam": one_bit_adam,
    "gossip": gossip,
}
"""One step of all ranks, of the gradients of their summed losses and their numbers of samples."""


def train(
    net: Perceptron,
    start: Array,
    rules: Sequence[Rule],
    scheme: str,
    options: Mapping[str, Any],
    epochs: Sequence[Sequence[Sequence[tuple[Array, Array]]]],
    validation: tuple[Array, Array],
) -> tuple[Array, list[dict[str, float]]]:
    """Train; return the parameters of all ranks in the end and a history.

    Parameters
    ----------
    epochs
        Of every epoch, step and rank its samples (x, y).
    """
    size = len(rules)
    ranks = Ranks(np.tile(start, (size, 1)), rules, options, np.zeros(size), start.copy())
    history = []
    for steps in epochs:
        totals = np.zeros(3)
        for parts in steps:
            totals += sum(net.judge(w, *part) for w, part in zip(ranks.w, parts, strict=True))
            counts = np.array([len(y) for _, y in parts], float)
            pairs = zip(ranks.w, parts, strict=True)
            grads = np.array([net.gradient(w, *part) for w, part in pairs])
            ranks.samples += counts
            (STEPS | COMPRESSED)[scheme](ranks, grads, counts)
        mean = average(ranks, scheme)
        logs = dict(zip(("loss", "accuracy"), totals / totals[2], strict=False))
        loss, right, n = net.judge(mean, *validation)
        history.append(logs | {"val_loss": loss / n, "val_accuracy": right / n})
    return np.tile(average(ranks, scheme), (size, 1)), history


def average(ranks: Ranks, scheme: str) -> Array:
    """The parameters that are evaluated, and those that training ends with."""
    return ranks.centre if scheme == "elastic" else ranks.mean()
