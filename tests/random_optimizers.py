"""Random rules, parameters and gradients, for tests of optimizers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pydtnn.kernels import Backend
from pydtnn.layers.initializers import LeCun
from pydtnn.layers.parameters import Parameter, ParameterBuffer
from pydtnn.optimizers import Optimizer, get_optimizer

STEPS = 20


@dataclass
class Training:
    """A rule with options, and what it is given: shapes, first values, gradients, rates.

    Attributes
    ----------
    name : str
        Of the rule.
    options : dict
        Without the learning rate.
    shapes : dict of str to tuple
    decays : dict of str to bool
        Which parameters decay.
    lrs : ndarray, shape (STEPS,)
    bucket_bytes : int
    seed : int
    """

    name: str
    options: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    decays: dict[str, bool]
    lrs: np.ndarray
    bucket_bytes: int
    seed: int

    def values(self) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(self.seed)
        return {name: rng.normal(size=shape) for name, shape in self.shapes.items()}

    def gradients(self, step: int) -> dict[str, np.ndarray]:
        """Of very different sizes, some of them exactly 0."""
        rng = np.random.default_rng([self.seed, step])
        sizes = 10.0 ** rng.uniform(-3, 1, len(self.shapes))
        given = {}
        for (name, shape), size in zip(self.shapes.items(), sizes, strict=True):
            given[name] = size * rng.normal(size=shape) * (rng.random(shape) > 0.1)
        return given

    def clipped(self, step: int) -> dict[str, np.ndarray]:
        """What clipping leaves of them: ``min(1, limit / norm)``."""
        given, limit = self.gradients(step), self.options.get("clip_norm")
        norm = np.sqrt(sum((g * g).sum() for g in given.values()))
        factor = 1.0 if limit is None or norm <= limit else limit / norm
        return {name: factor * g for name, g in given.items()}

    def decay_of(self, name: str) -> float:
        return self.options["weight_decay"] if self.decays[name] else 0.0

    def run(self, backend: Backend, dtype: str = "float64") -> list[dict[str, np.ndarray]]:
        """Make the steps with our optimizer; return the parameters after each."""
        parameters = [
            Parameter(name, shape, LeCun("normal"), decay=self.decays[name])
            for name, shape in self.shapes.items()
        ]
        buffer = ParameterBuffer(
            [(p, len(parameters) - i) for i, p in enumerate(parameters)],
            backend=backend,
            dtype=dtype,
            bucket_bytes=(self.bucket_bytes,),
        )
        by_name = {p.name: p for p in parameters}
        for name, value in self.values().items():
            by_name[name].master[...] = value
        rule: Optimizer = get_optimizer(
            self.name, lr=lambda step: float(self.lrs[step]), **self.options
        )
        rule.bind(backend, [buffer])
        history = []
        for step in range(STEPS):
            for name, gradient in self.gradients(step).items():
                by_name[name].grad[...] = gradient
            rule.step()
            history.append({p.name: p.master.astype("float64") for p in parameters})
        return history


def random_training(rng: np.random.Generator, name: str) -> Training:
    """Draw the options of a rule, up to six parameters of any size, and rates that change."""
    count = int(rng.integers(1, 7))
    shapes = {
        f"p{i}": tuple(int(n) for n in rng.integers(1, 9, size=rng.integers(1, 4)))
        for i in range(count)
    }
    options: dict[str, Any] = {"weight_decay": float(rng.choice([0.0, 1e-4, 0.1]))}
    if rng.random() < 0.5:
        options["clip_norm"] = float(10 ** rng.uniform(-2, 2))
    if name == "sgd" and rng.random() < 0.8:
        options["momentum"] = float(rng.uniform(0.01, 0.99))
        options["nesterov"] = bool(rng.random() < 0.5)
    if name == "rmsprop":
        options["rho"] = float(rng.choice([0.0, rng.uniform(0.5, 0.999)]))
    if name == "adagrad":
        options["initial"] = float(rng.choice([0.0, rng.uniform(0.01, 1)]))
    if name in ("adam", "adamw", "nadam", "lamb", "lion"):
        options["beta1"] = float(rng.choice([0.0, rng.uniform(0.5, 0.99)]))
        options["beta2"] = float(rng.choice([0.0, rng.uniform(0.5, 0.9999)]))
    if name == "nadam":
        options["momentum_decay"] = float(rng.choice([0.0, 0.004, rng.uniform(0, 0.5)]))
    if name not in ("sgd", "lars", "lion"):
        options["epsilon"] = float(10 ** rng.uniform(-8, -2))
    if name == "lars":
        options |= {"momentum": float(rng.uniform(0, 0.99)), "trust": float(rng.uniform(1e-3, 0.1))}
    if name in ("lars", "lamb"):
        options["always_adapt"] = bool(rng.random() < 0.5)
    return Training(
        name,
        options,
        shapes,
        {p: bool(rng.random() < 0.7) for p in shapes},
        10 ** rng.uniform(-3, -1) * rng.uniform(0.1, 1, STEPS),
        int(rng.choice([1, 256, 1 << 20])),
        int(rng.integers(1 << 30)),
    )


def assert_same_course(
    given: list[dict[str, np.ndarray]], expected: list[dict[str, np.ndarray]], tolerance: float
) -> None:
    """Compare all steps, each parameter in units of its largest element."""
    for step, (ours, theirs) in enumerate(zip(given, expected, strict=True)):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            error, size = np.abs(ours[name] - value).max(), np.abs(value).max()
            assert error <= tolerance * max(size, 1), f"step {step}, {name}: off by {error:.2g}"
