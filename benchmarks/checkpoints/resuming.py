"""What a flipped bit in a checkpoint does to the accuracy of training that resumes from it.

After Rojas, Kahira, Meneses, Bautista-Gomez, Badia, "A Study of Checkpointing in Large Scale
Training of Deep Neural Networks", 2020, and Rojas et al., CLUSTER 2021: a bit of one random element
is flipped, of the weights or of the momentum, and training goes on. Our own checkpoints are refused
then; here the arrays in memory are changed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.common.work import WORK, create_trainer
from pydtnn.data import Batch
from pydtnn.kernels import create_backend

BITS = {
    "sign": 31,
    "exponent, highest bit": 30,
    "exponent, lowest bit": 23,
    "mantissa, highest bit": 22,
    "mantissa, lowest bit": 0,
}

STEPS, MORE, SAMPLES, NOISE = 60, 20, 1024, 1.0


def flips(repetitions: int) -> list[dict[str, Any]]:
    """Return, for each place of a bit, the accuracies after it is flipped and `MORE` steps."""
    work = WORK["cnn"]
    rng = np.random.default_rng(0)
    centers = rng.normal(size=(work.classes, *work.shape)).astype("float32")
    target = rng.integers(work.classes, size=SAMPLES)
    noise = rng.normal(size=(SAMPLES, *work.shape)).astype("float32")
    x = centers[target] + NOISE * noise
    fresh = rng.integers(work.classes, size=SAMPLES)
    test = centers[fresh] + NOISE * rng.normal(size=(SAMPLES, *work.shape)).astype("float32")
    trainer = create_trainer(work, create_backend("cpu", threads=1))
    model, optimizer = trainer.model, trainer.optimizer
    trainer.exchange.start(model.buckets)

    def train(first: int, steps: int) -> None:
        for step in range(first, first + steps):
            rows = np.arange(step * work.batch, (step + 1) * work.batch) % SAMPLES
            trainer.train_step(Batch(x[rows], target[rows], rows, 0, work.batch))

    def accuracy() -> float:
        return float((model.predict(test).argmax(-1) == fresh).mean())

    train(0, STEPS)
    states = {"weights": model, "momentum": optimizer}
    saved: dict[str, dict[str, Any]] = {}
    for name, part in states.items():
        saved[name] = {
            key: value.copy() if isinstance(value, np.ndarray) else value
            for key, value in part.state().items()
        }
    rows: list[dict[str, Any]] = []
    cases = [("none", "none", 0), *((p, bit, n) for p in saved for bit, n in BITS.items())]
    for place, bit, number in cases:
        before, after = [], []
        for repetition in range(1 if place == "none" else repetitions):
            draw = np.random.default_rng(repetition)
            for name, part in states.items():
                state = {
                    k: v.copy() if isinstance(v, np.ndarray) else v for k, v in saved[name].items()
                }
                if name == place:
                    arrays = [v for k, v in sorted(state.items()) if np.ndim(v) > 1]
                    sizes = np.array([array.size for array in arrays])
                    array = arrays[draw.choice(len(arrays), p=sizes / sizes.sum())]
                    array.reshape(-1).view(np.uint32)[draw.integers(array.size)] ^= np.uint32(
                        1 << number
                    )
                part.load(state)
            with np.errstate(all="ignore"):
                before.append(accuracy())
                train(STEPS, MORE)
                after.append(accuracy())
        rows.append({"place": place, "bit": bit, "before": before, "after": after})
    return rows
