"""Sequences computed from their index: pairs to translate, sequences to classify, masked text.

Translation has the tokens 0 (no position), 1 (begin) and 2 (end), and symbols from 3 on.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pydtnn.data.dataset import Dataset
from pydtnn.data.order import as_indices, below
from pydtnn.data.text import DEFAULT_LENGTH, TokenDataset, load_text
from pydtnn.kernels.reference.random import bits, stream
from pydtnn.utils.validate import check_float, check_int

Array = NDArray[Any]

PADDING, BEGIN, END, FIRST = 0, 1, 2, 3
"""Tokens that are no symbols, and the first one that is."""

IGNORED = -100
"""Target of tokens that are not masked."""


class _Drawn(Dataset):
    """Sequences that are functions of random words of (seed, split, index)."""

    pixels = False
    words: int

    def __init__(
        self, name: str, *, samples: int, seed: int, split: str, like: Dataset | None
    ) -> None:
        self.name, self.like, self.seed = name, like, seed
        self.samples = check_int(name, "samples", samples, at_least=1)
        self.stream = stream(f"{name}/{split}")

    def __len__(self) -> int:
        return self.samples

    def read(self, indices: Array) -> tuple[Any, Any]:
        indices = as_indices(self.name, indices, len(self))
        return self.draw(bits(self.seed, self.stream, 0, indices, self.words))

    @abstractmethod
    def draw(self, words: Array) -> tuple[Any, Any]:
        """Return samples and targets of random words ``(n, words)``."""


class _Translation(_Drawn):
    """Pairs: the source ``(T1,)``, the target one step later ``(T2,)``, the source's length."""

    ignore_index, next_of = PADDING, 1

    def pairs(self, source: Array, lengths: Array, target: Array) -> tuple[Any, Any]:
        """Return samples and targets of sequences, whose positions that do not exist are 0."""
        n, length = target.shape
        rows = np.zeros((n, length + 2), np.int64)
        rows[:, 0], rows[:, 1:-1] = BEGIN, target
        rows[np.arange(n), 1 + (target > 0).sum(axis=1)] = END
        given = np.where(rows[:, :-1] == END, PADDING, rows[:, :-1])
        x = source, given, lengths[:, None]
        return tuple(part.astype(np.float32) for part in x), rows[:, 1:]


class Reversal(_Translation):
    """The source backwards."""

    def __init__(self, shortest: int, length: int, tokens: int, **options: Any) -> None:
        super().__init__("reversal", **options)
        self.longest = check_int(self.name, "length", length, at_least=1)
        self.shortest = check_int(self.name, "shortest", shortest, at_least=1, at_most=length)
        self.symbols = check_int(self.name, "tokens", tokens, at_least=1)
        self.input_shape = ((length,), (length + 1,), (1,))
        self.classes, self.words = FIRST + tokens, length + 1

    def draw(self, words: Array) -> tuple[Any, Any]:
        at = np.arange(self.longest)
        lengths = self.shortest + below(words[:, 0], self.longest - self.shortest + 1)
        exists = at < lengths[:, None]
        source = np.where(exists, FIRST + below(words[:, 1:], self.symbols), PADDING)
        back = np.maximum(lengths[:, None] - 1 - at, 0)
        target = np.where(exists, np.take_along_axis(source, back, axis=1), PADDING)
        return self.pairs(source, lengths, target)


class Addition(_Translation):
    """``a+b`` of two numbers, and their sum; the digits of all three from the last to the first."""

    def __init__(self, digits: int, **options: Any) -> None:
        super().__init__("addition", **options)
        self.digits = check_int(self.name, "digits", digits, at_least=1, at_most=9)
        self.input_shape = ((2 * digits + 1,), (digits + 2,), (1,))
        self.classes, self.words = FIRST + 11, 2

    def draw(self, words: Array) -> tuple[Any, Any]:
        numbers = below(words, 10**self.digits).astype(np.int64)  # (n, 2)
        total = numbers.sum(axis=1)
        a, b = (self._written(x, self.digits) for x in numbers.T)
        plus = np.full((len(words), 1), FIRST + 10)
        lengths = np.full(len(words), 2 * self.digits + 1)
        shown = self._written(total, self.digits + 1)
        shown[total < 10**self.digits, -1] = PADDING
        return self.pairs(np.concatenate([a, plus, b], axis=1), lengths, shown)

    def _written(self, x: Array, digits: int) -> Array:
        return FIRST + x[:, None] // 10 ** np.arange(digits) % 10


class Majority(_Drawn):
    """Sequences of the tokens from 1 on, whose class is the first of the most frequent ones."""

    def __init__(self, length: int, classes: int, **options: Any) -> None:
        super().__init__("majority", **options)
        self.longest = check_int(self.name, "length", length, at_least=1)
        self.classes = check_int(self.name, "classes", classes, at_least=2)
        self.input_shape, self.words = ((length,), (1,)), length + 1

    def draw(self, words: Array) -> tuple[Any, Any]:
        lengths = 1 + below(words[:, 0], self.longest)[:, None]
        exists = np.arange(self.longest) < lengths
        x = np.where(exists, 1 + below(words[:, 1:], self.classes), PADDING)
        counts = (x[:, :, None] == 1 + np.arange(self.classes)).sum(axis=1)
        return (x.astype(np.float32), lengths.astype(np.float32)), counts.argmax(axis=1)


class MaskedTokens(Dataset):
    """Sequences of tokens of which some are masked; the targets are these, and -100 elsewhere.

    Of the tokens that are predicted, 80 % are replaced by the last class, a token of its own, and
    10 % by any token. Masks are a function of (seed, epoch, sample), of epoch 0 in a test set.

    Parameters
    ----------
    tokens : TokenDataset
    rate : float
        Share of predicted tokens.
    seed : int
    like : Dataset, optional
        The training set, if this one is a test set.

    References
    ----------
    Devlin et al., "BERT", NAACL 2019, section 3.1. Liu et al., "RoBERTa", 2019, section 4.1, for
    masks that change.
    """

    pixels, ignore_index = False, IGNORED

    def __init__(
        self, tokens: TokenDataset, rate: float, seed: int, like: Dataset | None = None
    ) -> None:
        self.name, self.like, self.tokens, self.seed = "masked_text", like, tokens, seed
        self.rate = check_float(self.name, "rate", rate, above=0, at_most=1)
        self.classes, self.encoding = tokens.classes + 1, tokens.encoding
        self.input_shape = tokens.input_shape
        self.stream = stream(f"masked_text/{'train' if like is None else 'test'}")

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, indices: Array) -> tuple[Array, Array]:
        return self.read_epoch(indices, 0)

    def read_epoch(self, indices: Array, epoch: int) -> tuple[Array, Array]:
        indices = as_indices(self.name, indices, len(self))
        x, _ = self.tokens.read(indices)
        words = bits(self.seed, self.stream, epoch, indices, 2 * x.shape[1])
        chosen, kind = np.split(words / 2.0**32, 2, axis=1)
        predicted = chosen < self.rate
        y = np.where(predicted, x, IGNORED).astype(np.int64)
        other = np.floor((kind - 0.8) * 10 * (self.classes - 1))
        changed = np.where(kind < 0.8, self.classes - 1, np.where(kind < 0.9, other, x))
        return np.where(predicted, changed, x).astype(np.float32), y


SAMPLES, TEST_SAMPLES = 8192, 512
"""Usual numbers."""


def load_reversal(
    *,
    length: int = 6,
    shortest: int = 1,
    tokens: int = 8,
    samples: int = SAMPLES,
    test_samples: int = TEST_SAMPLES,
    seed: int = 0,
) -> tuple[Dataset, Dataset]:
    """Make sequences of `shortest` to `length` of so many different `tokens`, to be reversed.

    Samples are the source ``(length,)``, the target one step later ``(length + 1,)`` and the length
    ``(1,)``; targets are the reversed tokens and the end, and 0 behind it, which is ignored.
    """
    return _both(Reversal, samples, test_samples, seed, shortest, length, tokens)


def load_addition(
    *,
    digits: int = 2,
    samples: int = SAMPLES,
    test_samples: int = TEST_SAMPLES,
    seed: int = 0,
) -> tuple[Dataset, Dataset]:
    """Make sums ``a+b`` of numbers of so many digits, the last one first, to be computed."""
    return _both(Addition, samples, test_samples, seed, digits)


def load_majority(
    *,
    length: int = 12,
    classes: int = 3,
    samples: int = SAMPLES,
    test_samples: int = TEST_SAMPLES,
    seed: int = 0,
) -> tuple[Dataset, Dataset]:
    """Make sequences of the tokens 1 to `classes`, of which the most frequent is to be named.

    Samples are tokens ``(length,)``, 0 where there is none, and the length ``(1,)``.
    """
    return _both(Majority, samples, test_samples, seed, length, classes)


def load_masked_text(
    data_dir: str | os.PathLike[str] | None = None,
    *,
    length: int = DEFAULT_LENGTH,
    pattern: str | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    rate: float = 0.15,
    seed: int = 0,
) -> tuple[Dataset, Dataset]:
    """Read text as `pydtnn.data.load_text` does, and mask tokens; see `MaskedTokens`."""
    text: tuple[Any, ...] = load_text(data_dir, length=length, pattern=pattern, tokenizer=tokenizer)
    train = MaskedTokens(text[0], rate, seed)
    return train, MaskedTokens(text[1], rate, seed, train)


def _both(kind: Any, samples: int, test_samples: int, seed: int, *sizes: int) -> Any:
    train = kind(*sizes, samples=samples, seed=seed, split="train", like=None)
    return train, kind(*sizes, samples=test_samples, seed=seed, split="test", like=train)
