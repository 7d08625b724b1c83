"""Initial values of parameters.

An initializer is a function of a shape, its fans and a generator; `generator` keys the generator by
(seed, name), so that a weight is the same on any number of ranks and does not depend on which layer
was built first.

For a layer ``y = w x`` with independent entries of `x` of variance 1, ``fan_in Var(w)`` is the
variance of `y`, and ``fan_out Var(w)`` that of the gradient with respect to `x`. The three families
choose ``Var(w)`` so that these are close to 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from pydtnn.kernels.reference.random import stream
from pydtnn.utils.names import module_getattr
from pydtnn.utils.registry import Registry
from pydtnn.utils.validate import check_float

Initializer = Callable[[tuple[int, ...], int, int, np.random.Generator], np.ndarray]
"""``initializer(shape, fan_in, fan_out, rng)`` returns a float64 array, which the caller casts."""

DISTRIBUTIONS = ("uniform", "normal")


def generator(seed: int, name: str) -> np.random.Generator:
    """Create the generator of one parameter's initial values.

    Parameters
    ----------
    seed : int
        The run's seed.
    name : str
        The parameter's dotted name.

    Returns
    -------
    numpy.random.Generator
        Philox keyed by (`seed` modulo 2**64, the hash of `name`).
    """
    key = np.array([seed % 2**64, stream(name)], "uint64")
    return np.random.Generator(np.random.Philox(key=key))


@dataclass(frozen=True)
class Scaled(ABC):
    """Random values with mean 0 and a variance chosen from the fans.

    Parameters
    ----------
    distribution : str
        "uniform": in ``[-a, a)`` with ``a = sqrt(3 variance)``. "normal": a plain normal
        distribution, not truncated.
    """

    distribution: str = "uniform"

    def __post_init__(self) -> None:
        if self.distribution not in DISTRIBUTIONS:
            raise ValueError(
                f"{type(self).__name__}: distribution must be 'uniform' or 'normal', "
                f"got {self.distribution!r}"
            )

    @abstractmethod
    def variance(self, fan_in: int, fan_out: int) -> float:
        """Variance of the values.

        Parameters
        ----------
        fan_in, fan_out : int
            Inputs per output and outputs per input, at least 1.
        """

    def __call__(
        self, shape: tuple[int, ...], fan_in: int, fan_out: int, rng: np.random.Generator
    ) -> np.ndarray:
        """Draw the values.

        Parameters
        ----------
        shape : tuple of int
        fan_in, fan_out : int
            Inputs per output and outputs per input.
        rng : numpy.random.Generator

        Returns
        -------
        numpy.ndarray of float64
        """
        variance = self.variance(max(fan_in, 1), max(fan_out, 1))
        if self.distribution == "uniform":
            limit = (3 * variance) ** 0.5
            return rng.uniform(-limit, limit, shape)
        return rng.normal(0.0, variance**0.5, shape)


class Glorot(Scaled):
    """Variance ``2 / (fan_in + fan_out)``: a compromise between forward and backward.

    References
    ----------
    Glorot and Bengio, "Understanding the difficulty of training deep feedforward neural networks",
    AISTATS 2010, equation 16.
    """

    def variance(self, fan_in: int, fan_out: int) -> float:
        return 2 / (fan_in + fan_out)


class He(Scaled):
    """Variance ``2 / fan_in``: a ReLU halves the second moment of its input.

    References
    ----------
    He et al., "Delving deep into rectifiers", ICCV 2015, equation 10.
    """

    def variance(self, fan_in: int, fan_out: int) -> float:
        return 2 / fan_in


class LeCun(Scaled):
    """Variance ``1 / fan_in``: outputs have the variance of the inputs.

    References
    ----------
    LeCun, Bottou, Orr and Müller, "Efficient BackProp", 1998, equation 16.
    """

    def variance(self, fan_in: int, fan_out: int) -> float:
        return 1 / fan_in


@dataclass(frozen=True)
class Constant:
    """The same value everywhere.

    Parameters
    ----------
    value : float
    """

    value: float

    def __post_init__(self) -> None:
        check_float("Constant", "value", self.value)

    def __call__(
        self, shape: tuple[int, ...], fan_in: int, fan_out: int, rng: np.random.Generator
    ) -> np.ndarray:
        """Return a float64 array of `shape`, full of the value."""
        return np.full(shape, self.value, "float64")


@dataclass(frozen=True)
class Normal:
    """Normally distributed values with mean 0 and a deviation that does not depend on the fans.

    Parameters
    ----------
    deviation : float
        Standard deviation; that of embeddings is usually 0.02, as in the published code of Devlin
        et al., "BERT", 2019, and Dosovitskiy et al., "An image is worth 16x16 words", 2021.
    """

    deviation: float

    def __post_init__(self) -> None:
        check_float("Normal", "deviation", self.deviation, at_least=0)

    def __call__(
        self, shape: tuple[int, ...], fan_in: int, fan_out: int, rng: np.random.Generator
    ) -> np.ndarray:
        """Draw a float64 array of `shape`."""
        return rng.normal(0.0, self.deviation, shape)


@dataclass(frozen=True)
class Uniform:
    """Uniformly distributed values of at most `limit`, which does not depend on the fans.

    Parameters
    ----------
    limit : float
    """

    limit: float

    def __post_init__(self) -> None:
        check_float("Uniform", "limit", self.limit, at_least=0)

    def __call__(
        self, shape: tuple[int, ...], fan_in: int, fan_out: int, rng: np.random.Generator
    ) -> np.ndarray:
        """Draw a float64 array of `shape`."""
        return rng.uniform(-self.limit, self.limit, shape)


@dataclass(frozen=True)
class Whitening:
    """Filters whose responses to patches of natural images are uncorrelated, with variance near 1.

    Values of a patch are modelled as normal variables of variance 1 with the correlation ``near^d``
    at a distance of d pixels along an axis, times ``channels^d`` at d channels. Filters are the
    eigenvectors of this covariance, each divided by the root of its eigenvalue, the largest first,
    then the same with opposite signs, so that a ReLU loses nothing. Further filters repeat them.

    Parameters
    ----------
    near, channels : float
        In [0, 1); the defaults are nearly those of CIFAR-10.

    References
    ----------
    Page, "How to train your ResNet", part 8, 2019, and Jordan, "94% on CIFAR-10 in 3.29 seconds on
    a single GPU", 2024, section 3.1, use the covariance of the training images. Model of images:
    Ahmed, Natarajan and Rao, "Discrete cosine transform", IEEE Transactions on Computers, 1974.
    """

    near: float = 0.94
    channels: float = 0.91

    def __post_init__(self) -> None:
        for name in ("near", "channels"):
            check_float("Whitening", name, getattr(self, name), at_least=0, below=1)

    def __call__(
        self, shape: tuple[int, ...], fan_in: int, fan_out: int, rng: np.random.Generator
    ) -> np.ndarray:
        """Return the float64 filters (O, *kernel, C)."""
        covariance, (*kernel, channels) = np.ones((1, 1)), shape[1:]
        for length, correlation in [*((k, self.near) for k in kernel), (channels, self.channels)]:
            at = np.arange(length)
            covariance = np.kron(covariance, correlation ** np.abs(at[:, None] - at))
        values, vectors = np.linalg.eigh(covariance)
        rows = (vectors / np.sqrt(values)).T[::-1]
        return np.resize(np.concatenate([rows, -rows]), shape)


INITIALIZERS: dict[str, Callable[..., Initializer]] = {
    "glorot_uniform": partial(Glorot, "uniform"),
    "glorot_normal": partial(Glorot, "normal"),
    "he_uniform": partial(He, "uniform"),
    "he_normal": partial(He, "normal"),
    "lecun_uniform": partial(LeCun, "uniform"),
    "lecun_normal": partial(LeCun, "normal"),
    "embedding": partial(Normal, 0.02),
    "zeros": partial(Constant, 0.0),
    "ones": partial(Constant, 1.0),
    "constant": Constant,
    "whitening": Whitening,
}
"""Initializers by name; "constant" needs a `value`."""

ALIASES = {
    "xavier_uniform": "glorot_uniform",
    "xavier_normal": "glorot_normal",
    "kaiming_uniform": "he_uniform",
    "kaiming_normal": "he_normal",
}
"""Other names of the initializers."""

INITIALIZER: Registry[Initializer] = Registry(
    "initializer",
    INITIALIZERS,
    Callable,
    "a function (shape, fan_in, fan_out, rng) -> array",
    ALIASES,
)


def get_initializer(initializer: str | Initializer, **options: Any) -> Initializer:
    """Return the initializer of a name, or the argument itself.

    Parameters
    ----------
    initializer : str or callable
        A name of `INITIALIZERS`, or any function ``(shape, fan_in, fan_out, rng) -> array``.
    **options
        Parameters of a named one: ``get_initializer("constant", value=0.1)``.

    Raises
    ------
    ValueError
        If a name or option is unknown (the message contains the nearest ones).
    """
    if initializer in INITIALIZERS and not options and initializer != "constant":
        return INITIALIZERS[str(initializer)]()  # the usual case; checks of options take longer
    return INITIALIZER.find(initializer).make(options)


if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = module_getattr(__name__)
