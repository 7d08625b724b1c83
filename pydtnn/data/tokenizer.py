"""Byte-pair tokens of texts, in the files of Hugging Face's library tokenizers."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pydtnn.utils.files import read_file
from pydtnn.utils.imports import import_optional

MAX_FILE_BYTES = 128 << 20
"""Largest file of a tokenizer that is read; those of the largest vocabularies have 35 MB."""

MAX_TOKENS = 1 << 24
"""Largest vocabulary: samples are float32, which represents integers up to here."""

PIECE_BYTES = 4 << 20
"""Longer texts are encoded in pieces of whole lines: an encoding takes 40 times the text."""


class Tokenizer:
    """The tokens of a ``tokenizer.json`` file.

    Parameters
    ----------
    path : path

    Attributes
    ----------
    size : int
        Tokens of the vocabulary; all are in ``0..size-1``.
    digest : str
        Identifies the tokens and their numbers.

    Raises
    ------
    OSError
        If the file cannot be read.
    ValueError
        If it is no tokenizer, or has more than `MAX_TOKENS` tokens.
    ImportError
        If the package tokenizers is missing.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        package = import_optional("tokenizers", "tokenizers", "tokenizer")
        data = read_file("tokenizer", Path(path).expanduser(), at_most=MAX_FILE_BYTES)
        self._path = path
        with _explained(f"{path} is not a tokenizer.json file of Hugging Face"):
            self._inner = package.Tokenizer.from_str(data.decode())
            numbers = self._inner.get_vocab()
        self._inner.no_truncation()
        self._inner.no_padding()
        self.size = 1 + max(numbers.values(), default=-1)
        self.digest = hashlib.sha256(repr(sorted(numbers.items())).encode()).hexdigest()[:16]
        if not 1 <= self.size <= MAX_TOKENS:
            raise ValueError(
                f"tokenizer: {path} must have 1 to {MAX_TOKENS:,} tokens, got {self.size:,}"
            )

    def encode(self, text: bytes, name: str = "text") -> NDArray[np.int32]:
        """Return the tokens of a text in UTF-8, without special ones at its ends.

        Parameters
        ----------
        text : bytes
        name : str
            Of the text, in errors.

        Raises
        ------
        ValueError
            If the text is not UTF-8, or a pattern of the tokenizer takes too long.
        """
        parts = []
        for part in _pieces(text, name):
            with _explained(f"{self._path} cannot be applied to {name}"):
                found = self._inner.encode(part, add_special_tokens=False).ids
            parts.append(np.array(found, np.int32))
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    def decode(self, tokens: NDArray[np.integer] | list[int]) -> str:
        """Return the text of tokens."""
        numbers = [int(token) for token in tokens]
        with _explained(f"{self._path} cannot be applied to tokens"):
            text: str = self._inner.decode(numbers, skip_special_tokens=False)
        return text


@contextlib.contextmanager
def _explained(problem: str) -> Iterator[None]:
    """Raise errors of the package, also those that Rust calls panics, as ValueError."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"tokenizer: {problem}: {error}") from error


def _pieces(text: bytes, name: str) -> Iterator[str]:
    """Cut a text behind ends of lines into pieces of about `PIECE_BYTES`."""
    begin = 0
    while begin < len(text):
        end = text.find(b"\n", begin + PIECE_BYTES) + 1 or len(text)
        try:
            yield text[begin:end].decode()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"tokenizer: {name} must be text in UTF-8, got byte {text[begin + error.start]:#x} "
                f"at position {begin + error.start}; without a tokenizer, tokens are bytes"
            ) from error
        begin = end
