"""Random optimizers: compiled kernels against the reference, LARS and LAMB against the papers."""

from __future__ import annotations

import numpy as np
import pytest

from pydtnn.kernels import create_backend
from tests.conftest import instruction_sets
from tests.random_optimizers import STEPS, Training, assert_same_course, random_training

NUMPY = create_backend("numpy")
RULES = ("sgd", "rmsprop", "adagrad", "lion", "adam", "adamw", "nadam", "lars", "lamb", "muon")

Course = list[dict[str, np.ndarray]]


def of_the_papers(training: Training) -> Course:
    """You, Gitman and Ginsburg 2017, algorithm 1, or You et al. 2020, algorithm 2."""
    options, w, lars = training.options, training.values(), training.name == "lars"
    m = {name: np.zeros_like(value) for name, value in w.items()}
    v = {name: np.zeros_like(value) for name, value in w.items()}
    course = []
    for step in range(STEPS):
        for name, g in training.clipped(step).items():
            decay, lr = training.decay_of(name), training.lrs[step]
            u, factor = g + decay * w[name], options.get("trust", 1.0)
            size = np.linalg.norm(g) + decay * np.linalg.norm(w[name])
            if not lars:
                beta1, beta2 = options["beta1"], options["beta2"]
                m[name] = beta1 * m[name] + (1 - beta1) * g
                v[name] = beta2 * v[name] + (1 - beta2) * g * g
                root = np.sqrt(v[name] / (1 - beta2 ** (step + 1))) + options["epsilon"]
                u = m[name] / (1 - beta1 ** (step + 1)) / root + decay * w[name]
                size = np.linalg.norm(u)
            norm_w = np.linalg.norm(w[name])
            if (decay or options["always_adapt"]) and norm_w and (np.any(g) if lars else size):
                lr = lr * factor * norm_w / size
            if lars:
                u = v[name] = options["momentum"] * v[name] + lr * u
                lr = 1.0
            w[name] = w[name] - lr * u
        course.append(dict(w))
    return course


@pytest.mark.fuzz("optimizers")
@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_rules_for_large_batches_are_those_of_the_papers(cases, name):
    for case in cases:
        training = random_training(case.rng, name)
        expected = of_the_papers(training)
        for backend in (NUMPY, create_backend("cpu", threads=1)):
            # twenty steps, whose rounding a small epsilon enlarges
            case.compare(assert_same_course, training.run(backend), expected, 1e-9)


@pytest.mark.fuzz("optimizers")
def test_compiled_rules_are_those_of_the_reference(cases):
    backends = [
        create_backend("cpu", isa=isa, threads=threads)
        for isa in instruction_sets()
        for threads in (1, 2)
    ]
    for case in cases:
        training = random_training(case.rng, RULES[case.number % len(RULES)])
        for dtype, tolerance in (("float64", 1e-9), ("float32", 1e-3)):
            expected = training.run(NUMPY, dtype)
            for backend in backends:
                given = training.run(backend, dtype)
                case.compare(assert_same_course, given, expected, tolerance)
