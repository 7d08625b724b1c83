"""A short training run: its special conditions and its results on one rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from pydtnn.data import ArrayDataset

SAMPLES = 23
BATCH = 11
"""Global batch size: its parts are uneven, and the last batch of an epoch is a single sample."""

STEPS = 18
MIDDLE = 10
"""Step at which a run is saved and resumed: within an epoch."""

BAD_STEP = 4
"""Step with a loss of NaN if a step is to be abandoned."""

FAILING_STEP = 2
"""Step in which a method of the scheme raises if it is to fail."""


@dataclass(frozen=True)
class Plan:
    """Special conditions of one run.

    Attributes
    ----------
    bucket_bytes : int
        1 gives one bucket per parameter.
    delays : int or None
        Seed of random delays.
    bad_step : bool
        Whether the loss of `BAD_STEP` is NaN on the last rank.
    save, resume : path or None
        Folder to which the state after `MIDDLE` is saved, or from which the run resumes.
    fails : str or int or None
        Failure on the last rank: a method of the scheme, in `FAILING_STEP`, or the call of its
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
    """Results of a run on one rank.

    Attributes
    ----------
    equal : bool
        Whether the scheme declares that all ranks have the same parameters between steps.
    names : list of str
        For each element of the parameters, the name of its parameter.
    buckets, gradient_bytes : int
        Number of buckets, and bytes of all gradients.
    values : list of ndarray
        All parameters after each step.
    final : ndarray
        All parameters at the end, averaged if they differ between ranks.
    first_loss, last_loss : float
        Loss of all samples, before the first step and after the last.
    calls : list of str
        Calls of the rank in all steps.
    messages, bytes : int
        Traffic of all steps; bytes in B.
    waited, wall : float
        Time that all steps spent in communication, and their whole time, in s.
    pending, unmatched : list of str
        Operations that were not complete on the rank at the end of the run, and those of them
        without a counterpart on other ranks.
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
    pending: list[str] = field(default_factory=list)
    unmatched: list[str] = field(default_factory=list)


def problem(seed: int) -> ArrayDataset:
    """Create a classification task that a small network learns within a few steps."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(SAMPLES, 5))
    return ArrayDataset(x, (x @ rng.normal(size=(5, 3))).argmax(axis=1))
