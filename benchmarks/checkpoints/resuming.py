"""What a flipped bit in a checkpoint does to the accuracy of training that resumes from it.

After Rojas, Kahira, Meneses, Bautista-Gomez, Badia, "A Study of Checkpointing in Large Scale
Training of Deep Neural Networks", 2020, and Rojas et al., CLUSTER 2021: a bit of one random element
is flipped, of the weights or of the momentum, and training goes on. Our own checkpoints are refused
then; here the arrays in memory are changed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.common.work import CIFAR, Work, create_trainer
from pydtnn.data import Batch
from pydtnn.kernels import create_backend
from pydtnn.training import NotFiniteError

BITS = {
    "sign": 31,
    "exponent, highest bit": 30,
    "exponent, lowest bit": 23,
    "mantissa, highest bit": 22,
    "mantissa, lowest bit": 0,
}

WORK = Work("resnet8", CIFAR, 10, 64)

STEPS, MORE, SAMPLES, NOISE = 60, 20, 1024, 2.0
"""Steps before and after the flip, samples, and their noise: not all can be told apart."""


def patterns(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return images of ten smooth patterns with noise, and their classes: to train, to test."""
    centers = np.kron(rng.normal(size=(WORK.classes, 4, 4, 3)), np.ones((1, 8, 8, 1)))
    target, fresh = rng.integers(WORK.classes, size=(2, SAMPLES))
    x, test = (
        ((centers[of] + NOISE * rng.normal(size=(SAMPLES, *WORK.shape))) / NOISE).astype("float32")
        for of in (target, fresh)
    )
    return x, target, test, fresh


def flip(state: dict[str, Any], bit: int, rng: np.random.Generator) -> None:
    """Flip a bit of a random element of the matrices and filters of a state."""
    arrays = [value for _, value in sorted(state.items()) if np.ndim(value) > 1]
    sizes = np.array([array.size for array in arrays])
    array = arrays[rng.choice(len(arrays), p=sizes / sizes.sum())]
    array.reshape(-1).view(np.uint32)[rng.integers(array.size)] ^= np.uint32(1 << bit)


def flips(repetitions: int) -> Iterator[dict[str, Any]]:
    """Yield, for each place of a bit, the accuracies after it is flipped, and after more steps.

    A run that ends because its loss is not finite has no second accuracy.
    """
    x, target, test, fresh = patterns(np.random.default_rng(0))
    batch = WORK.batch
    trainer = create_trainer(WORK, create_backend("cpu", threads=1))
    trainer.exchange.start(trainer.model.buckets)
    parts = {"weights": trainer.model, "momentum": trainer.optimizer}

    def train(first: int, steps: int) -> None:
        for step in range(first, first + steps):
            rows = np.arange(step * batch, (step + 1) * batch) % SAMPLES
            trainer.train_step(Batch(x[rows], target[rows], rows, 0, batch))

    def accuracy() -> float:
        return float((trainer.model.predict(test).argmax(-1) == fresh).mean())

    train(0, STEPS)
    saved = {name: copy.deepcopy(part.state()) for name, part in parts.items()}
    for place, bit in [("none", "none"), *((place, bit) for place in parts for bit in BITS)]:
        before, after = [], []
        for repetition in range(repetitions if place in parts else 1):
            for name, part in parts.items():
                state = copy.deepcopy(saved[name])
                if name == place:
                    flip(state, BITS[bit], np.random.default_rng(repetition))
                part.load(state)
            with np.errstate(all="ignore"):
                before.append(accuracy())
                try:
                    train(STEPS, MORE)
                    after.append(accuracy())
                except NotFiniteError:
                    continue
        yield {"place": place, "bit": bit, "before": before, "after": after}
