"""Base class of data sets: samples read by index, and statistics that normalise them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from functools import cached_property, partial
from numbers import Integral
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from pydtnn.data.batch import each, has_several_inputs, parts, plain_parts, shapes_of
from pydtnn.data.order import as_indices, permutation, split
from pydtnn.data.statistics import Normalize, pixel_sums
from pydtnn.utils.names import SuggestsNames
from pydtnn.utils.validate import check_float, plain_array

Array = NDArray[Any]


class Dataset(SuggestsNames, ABC):
    """Samples by index; a subclass defines the attributes below, ``__len__`` and `read`.

    Attributes
    ----------
    name : str
    input_shape : tuple of int
        Shape of one sample, channels last: ``(H, W, C)`` for images. A tuple of shapes if a sample
        has several inputs.
    classes : int or None
        Number of classes; None if the targets are not labels. A tuple if a sample has several
        targets.
    class_names : tuple of str or None, default None
        Name of each class. A tuple of such tuples if a sample has several targets.
    encoding : str or None, default None
        Identifies what numbers mean, such as a tokenizer, the scale of targets or the orientation
        of photographs: training is continued with the same one.
    ignore_index : int or None
        A label without a class, which parts of masks have that augmentation moves in from outside.
    next_of : int or None
        The input, by number, of which the target at a position is the next token: networks whose
        outputs depend on later positions of it are not trained.
    pixels : bool, default True
        Whether `read` returns uint8 pixels, which are normalised with `mean` and `std`. If samples
        have several inputs, each uint8 input is normalised.
    like : Dataset or None
        The training set that provides the statistics; None for the training set itself.
    examined : bool or None, default None
        For samples that are decoded whenever they are read: whether all of them have been read
        once, to check them and to measure their statistics, which training begins with (see
        `pydtnn.training.examination`). `read` must accept no indices then. None for samples that
        need no such examination.
    verified : bool, default True
        Whether files have been compared with their checksums, or have none, see `verify`.
    """

    name: str
    input_shape: Any
    classes: Any
    class_names: Any = None
    encoding: str | None = None
    ignore_index: int | None = None
    next_of: int | None = None
    pixels: bool = True
    like: Dataset | None = None
    examined: bool | None = None
    verified: bool = True

    @abstractmethod
    def __len__(self) -> int:
        """Count the samples."""

    @abstractmethod
    def read(self, indices: Array) -> tuple[Any, Any]:
        """Return the samples and targets at `indices`; several threads may call it at once.

        Parameters
        ----------
        indices : ndarray of int64, shape ``(n,)``

        Returns
        -------
        x : ndarray, shape ``(n, *input_shape)``, uint8 or float
            A new array: augmentation changes it in place. A tuple of arrays if a sample has several
            inputs.
        y : ndarray of int64, shape ``(n,)`` or ``(n, T)``, or float targets, shape ``(n, ...)``
            A tuple of arrays if a sample has several targets, one for each output of a model.
        """

    def read_epoch(self, indices: Array, epoch: int) -> tuple[Any, Any]:
        """Return what `read` does, or other samples in each epoch, such as other masks."""
        return self.read(indices)

    def read_targets(self, indices: Array) -> Any:
        """Return the targets at `indices`, without the samples where that is faster."""
        return self.read(indices)[1]

    def verify(self, rank: int, size: int) -> Iterator[None]:
        """Compare files with their checksums: the share of one of several ranks.

        Yields after each part of a file, so that a file system that does not respond is noticed.

        Parameters
        ----------
        rank, size : int

        Raises
        ------
        ValueError
            If a file has changed.
        """
        return iter(())

    def shuffled(self, seed: int, epoch: int) -> NDArray[np.int64]:
        """Return the order of the samples in an epoch of training, the same on all ranks."""
        return permutation(seed, epoch, len(self))

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        """Return the sample and the target at an index, as `read` returns them.

        Raises
        ------
        TypeError, IndexError
            If it is not a whole number, or outside the data set.
        """
        if isinstance(index, bool) or not isinstance(index, Integral):
            raise TypeError(
                f"{self.name}: an index must be a whole number, got {index!r}; use "
                "dataset.subset(indices), or dataset.read(indices) for the arrays"
            )
        n = len(self)
        if not -n <= index < n:
            raise IndexError(f"{self.name}: an index must be in 0..{n - 1}, got {index}")
        x, y = self.read(np.array([int(index) % n]))
        return each(lambda part: part[0], x), each(lambda part: part[0], y)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        """Raise TypeError: samples and targets are separate arrays."""
        raise TypeError(
            f"{self.name}: a data set is not an array; use x, y = "
            "dataset.read(np.arange(len(dataset)))"
        )

    @cached_property
    def statistics(self) -> Any:
        """Mean and deviation of the training set, or None without normalisation.

        A tuple if samples have several inputs.
        """
        if self.like is not None:
            return self.like.statistics
        return self.measure() if self.pixels else None

    def measure(self) -> Any:
        """Compute the statistics from all samples: exact, in integers, one pass for each input."""
        if not has_several_inputs(self.input_shape):
            return pixel_sums(self.read, self.input_shape, range(len(self))).statistics()
        first, _ = self.read(np.arange(1))
        return tuple(
            pixel_sums(partial(self._one_input, k), shape, range(len(self))).statistics()
            if np.asarray(first[k]).dtype == np.uint8
            else None
            for k, shape in enumerate(self.input_shape)
        )

    def _one_input(self, number: int, indices: Array) -> tuple[Array, Any]:
        x, y = self.read(indices)
        return np.asarray(x[number]), y

    @property
    def mean(self) -> Any:
        """Mean of the training set per channel, float64 ``(C,)``, pixels in [0, 1]; or None."""
        return each(lambda s: s and s.mean, self.statistics)

    @property
    def std(self) -> Any:
        """Standard deviation of the training set per channel, float64 ``(C,)``; or None."""
        return each(lambda s: s and s.std, self.statistics)

    def normalize(self, x: Any, dtype: DTypeLike = np.float32) -> Any:
        """Normalise samples that `read` returned for a model."""
        if not has_several_inputs(self.input_shape):
            return Normalize(self.statistics, self.input_shape, dtype)(x)
        statistics = self.statistics or (None,) * len(self.input_shape)
        return tuple(
            Normalize(known, shape, dtype)(np.asarray(part))
            for known, shape, part in zip(statistics, self.input_shape, x, strict=True)
        )

    def __repr__(self) -> str:
        inputs = " and ".join(map(str, shapes_of(self.input_shape)))
        classes = "" if self.classes is None else f", classes {self.classes}"
        return f"{type(self).__name__}({self.name}, {len(self):,} samples of {inputs}{classes})"

    def subset(self, indices: ArrayLike) -> Subset:
        """Return the part at `indices`, in their order, or of the samples that a mask selects."""
        return Subset(self, indices)


class Subset(Dataset):
    """A part of a data set, normalised with the statistics of the whole.

    Parameters
    ----------
    dataset : Dataset
    indices : array of int, shape ``(n,)``, or of bool with one value for each sample

    Raises
    ------
    TypeError
        If they are neither whole numbers nor booleans.
    ValueError
        If an index is outside the data set.
    """

    def __init__(self, dataset: Dataset, indices: ArrayLike) -> None:
        chosen = as_indices("Subset", indices, len(dataset))
        if len(chosen) and (chosen.min() < 0 or chosen.max() >= len(dataset)):
            raise ValueError(
                f"Subset: indices must be in 0..{len(dataset) - 1}, the samples of "
                f"{dataset.name}, got {chosen.min()}..{chosen.max()}"
            )
        self.name, self.like = dataset.name, dataset
        self.input_shape, self.classes = dataset.input_shape, dataset.classes
        self.class_names, self.ignore_index = dataset.class_names, dataset.ignore_index
        self.encoding, self.next_of = dataset.encoding, dataset.next_of
        self.pixels = dataset.pixels
        self.indices = chosen

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, indices: Array) -> tuple[Any, Any]:
        return self.read_epoch(indices, 0)

    def read_epoch(self, indices: Array, epoch: int) -> tuple[Any, Any]:
        assert self.like is not None
        return self.like.read_epoch(self.indices[as_indices(self.name, indices, len(self))], epoch)

    def read_targets(self, indices: Array) -> Any:
        assert self.like is not None
        return self.like.read_targets(self.indices[as_indices(self.name, indices, len(self))])


def split_validation(train: Dataset, fraction: float, seed: int = 0) -> tuple[Subset, Subset]:
    """Split a random part from a training set, the same part for the same `seed`.

    Parameters
    ----------
    train : Dataset
    fraction : float
        Fraction of validation samples, between 0 and 1; both parts have at least one sample.
    seed : int, default 0

    Returns
    -------
    (Subset, Subset)
        The remaining training samples, and the validation samples.

    Raises
    ------
    ValueError
        If `fraction` is not between 0 and 1, or `train` has fewer than two samples.
    """
    check_float("split_validation", "fraction", fraction, above=0, below=1)
    if len(train) < 2:
        raise ValueError(
            f"split_validation: expected at least 2 samples, got {len(train)} in {train.name}; use "
            "a larger data set"
        )
    rest, held = split(len(train), fraction, seed)
    return train.subset(rest), train.subset(held)


def read_samples(dataset: Dataset, samples: NDArray[np.int64], epoch: int = 0) -> tuple[Any, Any]:
    """Read samples and check the results of a custom data set."""
    if not len(samples) and dataset.examined is None:  # not every custom data set supports this
        x, y = read_samples(dataset, np.zeros(1, np.int64))
        return each(itemgetter(slice(0)), x), each(itemgetter(slice(0)), y)
    result = dataset.read_epoch(samples, epoch)
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(
            f"{dataset.name}: read must return a pair of arrays (x, y), got {type(result).__name__}"
        )
    several = has_several_inputs(dataset.input_shape)
    plain = partial(plain_array, dataset.name, "x")
    x = tuple(map(plain, result[0])) if several else plain(result[0])
    y = plain_parts(dataset.name, "y", result[1])
    expected = [(len(samples), *shape) for shape in shapes_of(dataset.input_shape)]
    given = [part.shape for part in parts(x)]
    if given != expected or any(part.shape[:1] != expected[0][:1] for part in parts(y)):
        raise ValueError(
            f"{dataset.name}: read must return x of shape {_and(expected)} and as many targets for "
            f"{len(samples)} indices, got {_and(given)} and {_and(p.shape for p in parts(y))}"
        )
    return x, y


def _and(shapes: Iterable[tuple[int, ...]]) -> str:
    return " and ".join(map(str, shapes))
