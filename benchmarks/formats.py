"""Accuracy with formats of fewer bits, and the time of a step: a ResNet on CIFAR-10, a GPT on text.

    PYDTNN_DATA=folder python -m benchmarks.formats --of nvfp4 --seed 1

All runs of a network start from the same weights and train on the same samples. Times are medians
of ratios to the float32 step that ran just before.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np

from pydtnn import Model, Trainer, load_dataset
from pydtnn.data.text import TokenDataset
from pydtnn.layers import StepContext
from pydtnn.models import create_net
from pydtnn.optimizers import SGD, AdamW
from pydtnn.schedules import Triangular

FP8 = "activations=e4m3fn{0},weights=e4m3fn{0},gradients=e5m2{0}"
FP4 = "activations=e2m1:32,weights=e2m1:32,gradients="

CASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"formats": "activations=e8m7,weights=e8m7,gradients=e8m7"},
    "e4m3fn, gradients e5m2": {"formats": FP8.format("")},
    "the same, :none": {"formats": FP8.format(":none")},
    "the same, optimizer e4m3fn:32:stochastic": {
        "formats": FP8.format("") + ",optimizer=e4m3fn:32:stochastic"
    },
    "weights e2m1:32": {"formats": "weights=e2m1:32"},
    "e2m1:32, gradients e5m2": {"formats": FP4 + "e5m2"},
    "e2m1:32, gradients stochastic": {"formats": FP4 + "e2m1:32:stochastic"},
    "mxfp4": {"formats": "mxfp4"},
    "nvfp4": {"formats": "nvfp4"},
    **{
        f"nvfp4, {without}": {"formats": f"nvfp4,{without}"}
        for without in (
            "products=apart",
            "gradients=e2m1:16:e4m3fn",
            "weights=e2m1:16:e4m3fn",
            "float32=",
        )
    },
}
LENGTH, BATCH = 64, 64


def resnet(given: argparse.Namespace, options: dict[str, Any]) -> tuple[Model, float, float]:
    """Train ResNet-8 on CIFAR-10; return its loss and accuracy on the test images."""
    train, test = load_dataset("cifar10")
    model = Model(create_net("resnet8", 10, (32, 32, 3)), (32, 32, 3), seed=given.seed, **options)
    rule = SGD(Triangular(0.1, given.images), momentum=0.9, weight_decay=1e-4)
    trainer = Trainer(model, rule, loss="cross_entropy", progress=False)
    trainer.fit(train, epochs=1, steps_per_epoch=given.images, global_batch_size=BATCH)
    found = trainer.evaluate(test)
    return model, found["loss"], found["accuracy"]


def gpt(given: argparse.Namespace, options: dict[str, Any]) -> tuple[Model, float, float]:
    """Train a GPT on text, bytes as tokens; return its loss and accuracy on the next bytes."""
    train, test = load_dataset("text", length=LENGTH)
    net = create_net("gpt_nano", 256, (LENGTH,))
    model = Model(net, (LENGTH,), seed=given.seed, **options)
    trainer = Trainer(
        model, AdamW(Triangular(1e-3, given.steps)), loss="cross_entropy", progress=False
    )
    trainer.fit(train, epochs=1, steps_per_epoch=given.steps, global_batch_size=16)
    part = TokenDataset(test.tokens[: 512 * LENGTH + 1], LENGTH, like=train)
    found = trainer.evaluate(part)
    return model, found["loss"], found["accuracy"]


def seconds(model: Model, x: np.ndarray, context: StepContext) -> float:
    """Return the time of a forward and a backward pass."""
    start = time.perf_counter()
    y, saved = model.forward(x, context)
    model.backward(y / y.size, saved)
    return time.perf_counter() - start


def ratios(models: list[Model], x: np.ndarray, runs: int) -> list[float]:
    """Return the time of each model's passes in multiples of that of the first."""
    context = StepContext(training=True, samples=np.arange(len(x)))
    found: list[list[float]] = [[] for _ in models]
    for run in range(runs + 1):
        times = [seconds(model, x, context) for model in models]
        if run:
            for ratio, t in zip(found, times, strict=True):
                ratio.append(t / times[0])
    return [statistics.median(each) for each in found]


def main() -> None:
    """Print a table for each network."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=250, help="steps of 64 images")
    parser.add_argument("--steps", type=int, default=200, help="steps of 16 texts of 64 bytes")
    parser.add_argument("--runs", type=int, default=11)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--of", default="", help="formats whose names contain this, and float32")
    given = parser.parse_args()
    cases = {name: o for name, o in CASES.items() if given.of in name or not o}
    rng = np.random.default_rng(0)
    images = rng.standard_normal((BATCH, 32, 32, 3), np.float32)
    tokens = rng.integers(0, 256, (16, LENGTH)).astype("float32")
    for name, train, x in (("ResNet-8", resnet, images), ("GPT", gpt, tokens)):
        runs = [train(given, options) for options in cases.values()]
        times = ratios([model for model, *_ in runs], x, given.runs)
        print(f"\n| {name}: formats | loss | accuracy | time of a step |\n|---|---|---|---|")
        for case, (_, loss, accuracy), ratio in zip(cases, runs, times, strict=True):
            print(f"| {case} | {loss:.3f} | {100 * accuracy:.1f} % | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
