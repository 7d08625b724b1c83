"""The inputs that a model was trained on, so that later ones are treated in the same way."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from pydtnn.data.batch import parts, shapes_of
from pydtnn.data.dataset import Dataset, read_samples
from pydtnn.data.statistics import Normalize, Statistics
from pydtnn.utils.names import shorten

Array = NDArray[Any]

ROWS, BYTES = 256, 32 << 20
"""Maximum number of samples of a data set of floats whose range is measured, and of their bytes."""

LEVELS = 16
"""Different values that are not normalised by chance: interpolated pixels are no multiples."""

PIXEL_MARGIN, FLOAT_MARGIN = 0.5, 10.0
"""Accepted distance from the range, in multiples of its width. The range of normalised pixels is
known, that of other samples is measured on a few of them."""


@dataclass(frozen=True, eq=False)
class Input:
    """One input of the samples of a training set.

    Attributes
    ----------
    shape : tuple of int
        Shape of one sample.
    dtype : str
        Type of the elements before normalisation, such as "uint8".
    statistics : Statistics or None
        Mean and deviation for normalisation; None if samples were only converted.
    range : (float, float) or None
        Smallest and largest value after normalisation; None if it is not finite.
    """

    shape: tuple[int, ...]
    dtype: str
    statistics: Statistics | None
    range: tuple[float, float] | None

    @property
    def pixels(self) -> bool:
        """Whether the samples were uint8 pixels."""
        return self.dtype == "uint8"

    @property
    def limits(self) -> tuple[float, float]:
        """Smallest and largest value of floats that are accepted as normalised."""
        low, high = self.range or (0.0, 0.0)
        if not low < high:
            return -np.inf, np.inf
        margin = (high - low) * (PIXEL_MARGIN if self.pixels else FLOAT_MARGIN)
        return low - margin, high + margin

    def normalize(self, x: Array, dtype: DTypeLike) -> Array:
        """Normalise raw uint8 samples as in training, with the same bytes."""
        return Normalize(self.statistics, self.shape, dtype)(x)

    def check(self, who: str, x: Array) -> None:
        """Raise ValueError if samples cannot be raw uint8 pixels or floats normalised as these.

        No sample normalised with the statistics of the training set is refused, whether of the
        original pixels or of interpolated ones.

        Raises
        ------
        ValueError
            With the expected and the actual range.
        """
        if x.dtype == np.uint8 and not self.pixels:
            raise ValueError(
                f"{who}: expected floats, as in training, got uint8; convert x as the training set "
                "was converted"
            )
        if x.dtype == np.uint8 or self.range is None or x.size == 0:
            return
        low, high = float(x.min()), float(x.max())
        least, largest = self.limits
        if low < least or high > largest:
            self._refuse(who, f"values from {low:.4g} to {high:.4g}")
        if low >= 0 and high <= 255 and self._are_raw(x):
            self._refuse(who, "pixels that are not normalised")

    def _are_raw(self, x: Array) -> bool:
        """Return whether values in the range of normalised pixels are pixels, perhaps over 255.

        They are if 0 and 1 are the extremes, or if at least 16 levels occur and all are integers or
        multiples of 1/255, unless all are normalised pixels.
        """
        if self.statistics is None or not self.pixels or x.dtype.itemsize == 2:
            return False  # the precision of 16 bits does not distinguish them
        x = np.asarray(x, np.float64)
        raw = (x.min() == 0 and x.max() == 1) or any(
            _are_integers(unit * x) and len(np.unique(np.rint(unit * x))) >= LEVELS
            for unit in (1, 255)
        )
        return raw and not _are_integers(255 * (x * self.statistics.std + self.statistics.mean))

    def _refuse(self, who: str, given: str) -> None:
        low, high = self.range or (0.0, 0.0)
        raw, advice = "", "normalise x as the training set was normalised"
        if self.pixels:
            raw, advice = "uint8 pixels, or ", "pass pixels as uint8 from 0 to 255"
        raise ValueError(
            f"{who}: expected {raw}floats normalised as in training, from {low:.4g} to {high:.4g}, "
            f"got {given}; {advice}, or check_range=False if these values are intended"
        )


@dataclass(frozen=True, eq=False)
class Inputs:
    """The inputs and classes of the samples of a training set.

    Attributes
    ----------
    parts : tuple of Input
        One per input of a sample.
    class_names : tuple of str or None
        Names of the classes; a tuple of such tuples for several targets.
    encoding : str or None
        See `pydtnn.data.Dataset`.
    tasks : tuple of str
        For each output of the model "classes", "labels" or "numbers", see `Loss.task`; empty if it
        is not known.
    """

    parts: tuple[Input, ...]
    class_names: Any = None
    encoding: str | None = None
    tasks: tuple[str, ...] = ()


def inputs_of(dataset: Dataset) -> Inputs:
    """Describe the samples of a training set; reads a few of them."""
    shapes = shapes_of(dataset.input_shape)
    statistics = _of_each(dataset.statistics, len(shapes))
    first, _ = read_samples(dataset, np.arange(min(len(dataset), 1)))
    kinds = [np.asarray(part).dtype for part in parts(first)]
    ranges = [
        _pixel_range(known) if kind == np.uint8 else None
        for kind, known in zip(kinds, statistics, strict=True)
    ]
    if any(kind != np.uint8 for kind in kinds):
        size = sum(np.asarray(part).nbytes for part in parts(first))
        count = max(min(ROWS, BYTES // max(size, 1)), 1)
        rows = np.unique(np.linspace(0, len(dataset) - 1, count).astype(np.int64))
        x = parts(dataset.normalize(read_samples(dataset, rows)[0], np.float64))
        ranges = [
            _measured(part) if known is None else known
            for known, part in zip(ranges, x, strict=True)
        ]
    made = zip(shapes, map(str, kinds), statistics, ranges, strict=True)
    return Inputs(tuple(Input(*row) for row in made), dataset.class_names, dataset.encoding)


def check_same(who: str, dataset: Dataset, known: Inputs | Dataset, what: str, advice: str) -> None:
    """Raise ValueError if shapes, class names or encoding are not those of a training set.

    What is not known of one of them is not compared; nor are statistics (`same_normalization`).

    Parameters
    ----------
    who : str
        First word of the error.
    dataset : Dataset
    known : Inputs or Dataset
        The training set.
    what : str
        Describes it, such as "the training to continue".
    advice : str
        What to do.
    """
    given, expected = _facts(dataset), _facts(known)
    different = [
        f"{name} {given[name]} instead of {value}"
        for name, value in expected.items()
        if given.get(name, value) != value
    ]
    if different:
        raise ValueError(
            f"{who}: expected data like those of {what}, got {dataset.name} with "
            f"{shorten(different, 3)}; {advice}"
        )


def _facts(of: Inputs | Dataset) -> dict[str, object]:
    """Return what is known of samples and targets by name; names in one of their Unicode forms."""
    shapes = [p.shape for p in of.parts] if isinstance(of, Inputs) else shapes_of(of.input_shape)
    facts: dict[str, object] = {"samples of shape": " and ".join(map(str, shapes))}
    if of.encoding is not None:
        facts["encoding"] = of.encoding
    of_one = all(isinstance(name, str) for name in of.class_names or [None])
    for target, names in enumerate((of.class_names,) if of_one else of.class_names or ()):
        suffix = "" if of_one else f" of target {target}"
        for number, name in enumerate(names or ()):
            facts[f"class {number}{suffix}"] = unicodedata.normalize("NFC", name)
        if names is not None:
            facts[f"number of classes{suffix}"] = len(names)
    return facts


def same_normalization(first: Dataset, other: Inputs) -> bool:
    """Return whether a data set is normalised with the statistics of a training set.

    Also for another number of inputs, which are not comparable.
    """
    known = _of_each(first.statistics, len(other.parts))
    theirs = tuple(part.statistics for part in other.parts)
    return len(known) != len(theirs) or known == theirs


def _of_each(statistics: Any, count: int) -> tuple[Statistics | None, ...]:
    return statistics if isinstance(statistics, tuple) else (statistics,) * count


def _pixel_range(statistics: Statistics | None) -> tuple[float, float]:
    if statistics is None:
        return 0.0, 255.0
    mean, std = statistics.mean, statistics.std
    return float((-mean / std).min()), float(((1 - mean) / std).max())


def _measured(x: Array) -> tuple[float, float] | None:
    return (float(x.min()), float(x.max())) if x.size and np.isfinite(x).all() else None


def _are_integers(x: Array) -> bool:
    """Return whether all values are integers, up to the rounding of float32."""
    return bool((np.abs(x - np.rint(x)) < 1e-3).all())
