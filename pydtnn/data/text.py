"""Text as sequences of tokens, each of which is to be predicted from those before it."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pydtnn.data.dataset import Dataset
from pydtnn.data.order import as_indices
from pydtnn.data.tokenizer import Tokenizer
from pydtnn.utils.files import read_file
from pydtnn.utils.validate import check_int, plain_array

Array = NDArray[Any]

PathLike = str | os.PathLike[str]

VOCABULARY = 256
"""Different tokens of a text."""

DEFAULT_LENGTH = 256
"""Tokens of a sample."""

TEST_SHARE = 10
"""One tenth of a text, its end, tests."""

FOLDER = "*"
LIBRARY = "*.py"
"""Files that are read of a folder, and of Python's standard library."""

SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
"""Folders of the standard library that are not read."""


class TokenDataset(Dataset):
    """Consecutive parts of a sequence of tokens; the targets are the tokens that follow.

    Sample i has the tokens ``iT`` to ``iT + T - 1``, and as targets those from ``iT + 1`` to
    ``iT + T``.

    Parameters
    ----------
    tokens : array of int, shape ``(n,)``
        From 0.
    length : int
        T, tokens of a sample.
    classes : int, optional
        Number of different tokens; by default that of `like`, or one more than the largest.
    like : Dataset, optional
        The training set, if this one is a test set.
    encoding : str, optional
        Identifies the tokenizer; by default that of `like`.
    name : str, default "tokens"

    Raises
    ------
    ValueError
        If there are not more tokens than `length`, or one is not in ``0..classes-1``.
    TypeError
        If they are not integers.
    """

    pixels, next_of = False, 0

    def __init__(
        self,
        tokens: ArrayLike,
        length: int = DEFAULT_LENGTH,
        *,
        classes: int | None = None,
        like: Dataset | None = None,
        encoding: str | None = None,
        name: str = "tokens",
    ) -> None:
        check_int("TokenDataset", "length", length, at_least=1)
        array = plain_array(name, "tokens", tokens)
        if array.ndim == 1 and len(array) <= length:
            raise ValueError(
                f"{name}: expected more than {length} tokens, the length of a sample, got "
                f"{len(array)}; use a longer text or shorter samples"
            )
        known = None if like is None else like.classes
        self.classes = check_tokens(name, array, classes or known)
        self.name, self.like = name, like
        self.encoding = encoding or (None if like is None else like.encoding)
        self.input_shape = (length,)
        self.tokens = array

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.input_shape[0]

    def read(self, indices: Array) -> tuple[Array, Array]:
        """Return tokens as float32, which represents those up to 2**24, and targets as int64."""
        (length,) = self.input_shape
        first = as_indices(self.name, indices, len(self))[:, None] * length
        parts = self.tokens[first + np.arange(length + 1)]
        return parts[:, :-1].astype(np.float32), parts[:, 1:].astype(np.int64)


def check_tokens(name: str, tokens: Array, classes: int | None) -> int:
    """Return the number of different tokens: by default one more than the largest.

    Raises
    ------
    TypeError, ValueError
        If they are not integers in ``0..classes-1``.
    """
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise TypeError(
            f"{name}: tokens must be a sequence of integers, got {tokens.dtype} of shape "
            f"{tokens.shape}"
        )
    low, high = int(tokens.min()), int(tokens.max())
    classes = classes or high + 1
    if low < 0 or high >= classes:
        wrong = low if low < 0 else high
        raise ValueError(
            f"{name}: tokens must be in 0..{classes - 1}, got {wrong} at position "
            f"{int(np.argmax(tokens == wrong))}"
        )
    return classes


def load_text(
    data_dir: str | os.PathLike[str] | None = None,
    *,
    length: int = DEFAULT_LENGTH,
    pattern: str | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
) -> tuple[Dataset, Dataset]:
    """Read text as tokens; the last tenth is the test set.

    Parameters
    ----------
    data_dir, pattern
        See `read_text`.
    length : int, default 256
        Tokens of a sample.
    tokenizer : path, optional
        A ``tokenizer.json`` of Hugging Face, see `pydtnn.data.Tokenizer`; by default tokens are
        bytes.

    Raises
    ------
    FileNotFoundError
        If there is no such file, or none in the folder.
    ValueError
        If there is too little text for both sets, or it has no such tokens.
    ImportError
        If `tokenizer` is given and the package tokenizers is missing.
    """
    text, root = read_text(data_dir, pattern)
    encode, classes, encoding = encoder(tokenizer, str(root))
    tokens, unit = encode(text), "bytes" if tokenizer is None else "tokens"
    test = max(len(tokens) // TEST_SHARE, length + 1)
    if len(tokens) < test + length + 1:
        raise ValueError(
            f"text: expected at least {2 * (length + 1)} {unit}, for a sample to train with and "
            f"one to test with, got {len(tokens)} in {root}"
        )
    train = TokenDataset(tokens[:-test], length, classes=classes, encoding=encoding, name="text")
    return train, TokenDataset(tokens[-test:], length, name="text", like=train)


def encoder(tokenizer: PathLike | None, where: str) -> tuple[Callable[[bytes], Array], int, str]:
    """Return a function of bytes to tokens, the number of different ones, and their encoding."""
    if tokenizer is None:
        return partial(np.frombuffer, dtype=np.uint8), VOCABULARY, "bytes"
    pairs = Tokenizer(tokenizer)
    return partial(pairs.encode, name=where), pairs.size, f"tokenizer {pairs.digest}"


def read_text(data_dir: PathLike | None = None, pattern: str | None = None) -> tuple[bytes, Path]:
    """Return the bytes of all files, joined by newlines, and their path; see `read_files`."""
    files, root = read_files(data_dir, pattern)
    return b"\n".join(files), root


def read_files(data_dir: PathLike | None, pattern: str | None) -> tuple[list[bytes], Path]:
    """Return the bytes of a file, or of each file of a folder, and the path of it.

    Parameters
    ----------
    data_dir : path, optional
        A file, or a folder whose files are read in the order of their paths, with those of its
        subfolders. By default the sources of Python's standard library.
    pattern : str, optional
        Names of the files that are read of a folder, such as ``*.txt``; by default all, and
        ``*.py`` of the standard library.

    Raises
    ------
    FileNotFoundError
        If there is no such file, or none in the folder.
    """
    if data_dir is None:
        root, names, skipped = Path(sysconfig.get_path("stdlib")), pattern or LIBRARY, SKIPPED
    else:
        root, names, skipped = Path(data_dir).expanduser(), pattern or FOLDER, set()
    files = [root] if root.is_file() else sorted(_files(root, names, skipped))
    if not files:
        problem = f"found no file in {root}" if root.is_dir() else f"{root} does not exist"
        raise FileNotFoundError(f"text: {problem}; name a text file, or a folder with some")
    return [read_file("text", path) for path in files], root


def _files(root: Path, pattern: str, skipped: set[str]) -> Iterator[Path]:
    """Yield the files of a folder whose names fit and are not hidden."""
    for path in root.rglob(pattern):
        parts = path.relative_to(root).parts
        hidden = any(part.startswith(".") or part in skipped for part in parts)
        if path.is_file() and not hidden:
            yield path
