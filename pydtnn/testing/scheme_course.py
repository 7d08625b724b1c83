"""A short training run: what is peculiar to it, and what a rank saw of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pydtnn.data import ArrayDataset

SAMPLES = 23
BATCH = 11
"""Of all ranks: its parts are uneven, and the last batch of an epoch is a single sample."""

STEPS = 18
MIDDLE = 10
"""Where a run is saved and resumed: within an epoch."""

BAD_STEP = 4
"""Whose loss is NaN where a step is to be abandoned."""

FAILING_STEP = 2
"""In which a method of the scheme raises where it is to fail."""


@dataclass(frozen=True)
class Plan:
    """What is peculiar to one run.

    Attributes
    ----------
    bucket_bytes : int
        1 makes a bucket of every parameter.
    delays : int or None
        Seed of random delays.
    bad_step : bool
        Whether the loss of `BAD_STEP` is NaN on the last rank.
    save, resume : path or None
        Folder into which `MIDDLE` is saved, or from which the run goes on.
    fails : str or int or None
        What raises on the last rank: a method of the scheme, in `FAILING_STEP`, or the call of its
        communicator with this number, counted from the first step.
    """

    bucket_bytes: int = 1
    delays: int | None = None
    bad_step: bool = False
    save: Path | None = None
    resume: Path | None = None
    fails: str | int | None = None


@dataclass
class Course:
    """What one rank saw of a run.

    Attributes
    ----------
    equal : bool
        Whether the scheme says that all ranks hold the same parameters between steps.
    names : list of str
        For each element of the parameters, the name of its parameter.
    buckets, gradient_bytes : int
        Number of buckets, and bytes of all gradients.
    values : list of ndarray
        All parameters after each step.
    final : ndarray
        All parameters at the end, averaged where the ranks' differ.
    first_loss, last_loss : float
        Of all samples, before the first step and after the last.
    calls : list of str
        What the rank called in all steps.
    messages, bytes : int
        Traffic of all steps; bytes in B.
    waited, wall : float
        Time that all steps spent in communication, and their whole time, in s.
    under_way, unmet : list of str
        Operations whose end the rank had not seen at the end of the run, and those of them that the
        other ranks had not met.
    """

    equal: bool
    names: list[str]
    buckets: int
    gradient_bytes: int
    values: list[np.ndarray] = field(default_factory=list)
    final: np.ndarray = field(default_factory=lambda: np.empty(0))
    first_loss: float = 0.0
    last_loss: float = 0.0
    calls: list[str] = field(default_factory=list)
    messages: int = 0
    bytes: int = 0
    waited: float = 0.0
    wall: float = 0.0
    under_way: list[str] = field(default_factory=list)
    unmet: list[str] = field(default_factory=list)


def problem(seed: int) -> ArrayDataset:
    """Make a classification that a small network gets better at within a few steps."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(SAMPLES, 5))
    return ArrayDataset(x, (x @ rng.normal(size=(5, 3))).argmax(axis=1))
