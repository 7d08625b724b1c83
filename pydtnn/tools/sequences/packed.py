"""Documents packed to sequences of one length, of which little is padding."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pydtnn.data.dataset import Dataset
from pydtnn.data.order import as_indices, permutation
from pydtnn.data.text import DEFAULT_LENGTH, TEST_SHARE, check_tokens, encoder, read_files
from pydtnn.utils.validate import check_int, plain_array

Array = NDArray[Any]


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack items of some lengths into bins: best-fit decreasing.

    The longest item is next, into the bin with the least room that suffices, or a new one.

    Parameters
    ----------
    lengths : sequence of int
        In 1..capacity.
    capacity : int
        Of a bin.

    Returns
    -------
    list of list of int
        The items of each bin, the longest first.

    References
    ----------
    Krell et al., "Efficient sequence packing without cross-contamination", 2021, section 3.1.
    Johnson, "Near-optimal bin packing algorithms", 1973: at most 11 / 9 of the fewest bins, and 4.

    >>> best_fit([2, 5, 3, 4], 7)
    [[1, 0], [3, 2]]
    """
    bins: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 1 << capacity  # bit r: there is a bin with room r; one of the capacity is new
    for item in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        fits = rooms >> lengths[item]
        room = lengths[item] + (fits & -fits).bit_length() - 1
        if room == capacity:
            by_room[room].append(len(bins))
            bins.append([])
        chosen, left = by_room[room].pop(), room - lengths[item]
        rooms ^= (room < capacity and not by_room[room]) << room
        rooms |= 1 << left
        bins[chosen].append(item)
        by_room[left].append(chosen)
    return bins


class PackedDataset(Dataset):
    """Documents, several in a sequence of T tokens, each of which predicts the next one.

    Nothing is predicted across documents. A document of n tokens has n - 1 positions: the last
    token is only a target. One with more than T positions is cut into pieces of T, which are like
    documents of their own.

    Parameters
    ----------
    documents : sequence of arrays of int, each of shape ``(n,)``
        Tokens from 0. Documents of one token are left out.
    length : int
        T.
    packed : bool, default True
        Whether sequences have as many documents as fit (`best_fit`). Otherwise each has one, and
        padding.
    bucket : int, default 1
        Samples in succession, in an epoch, that have similar numbers of tokens.
    classes : int, optional
        Number of different tokens; by default that of `like`, or one more than the largest.
    like : Dataset, optional
        The training set, if this one is a test set.
    encoding : str, optional
        Identifies the tokenizer; by default that of `like`.
    name : str, default "documents"

    Attributes
    ----------
    counts : ndarray of int64, shape ``(n,)``
        Tokens of each sample, without padding.

    Notes
    -----
    Samples have two inputs ``(T,)``: the tokens, 0 in padding, and the number of the document of
    each one in the sequence, from 1, 0 in padding. Targets ``(T,)`` are `ignore_index` (-1) in
    padding: use ``CategoricalCrossEntropy(ignore_index=-1)``.

    Raises
    ------
    ValueError
        If no document has two tokens, or a token is not in ``0..classes-1``.
    TypeError
        If they are not sequences of integers.

    Examples
    --------
    >>> data = PackedDataset([[1, 2, 3], [4, 5], [6, 7, 8, 9]], 4)
    >>> (tokens, documents), targets = data[0]
    >>> tokens.tolist(), documents.tolist(), targets.tolist()
    ([6.0, 7.0, 8.0, 4.0], [1.0, 1.0, 1.0, 2.0], [7, 8, 9, 5])
    """

    pixels, ignore_index, next_of = False, -1, 0

    def __init__(
        self,
        documents: Sequence[ArrayLike],
        length: int = DEFAULT_LENGTH,
        *,
        packed: bool = True,
        bucket: int = 1,
        classes: int | None = None,
        like: Dataset | None = None,
        encoding: str | None = None,
        name: str = "documents",
    ) -> None:
        check_int("PackedDataset", "length", length, at_least=1)
        self.bucket = check_int("PackedDataset", "bucket", bucket, at_least=1)
        given = map(partial(plain_array, name, "a document"), documents)
        arrays = [array for array in given if array.size > 1]
        if not arrays:
            raise ValueError(
                f"{name}: expected at least one document of 2 tokens to train with, and one to "
                "test with; use a longer text, or another separator"
            )
        self.name, self.like = name, like
        self.encoding = encoding or (None if like is None else like.encoding)
        self.tokens = np.concatenate(arrays)
        self.classes = check_tokens(name, self.tokens, classes or getattr(like, "classes", None))
        self.input_shape = (length,), (length,)
        ends = [0, *np.cumsum([*map(len, arrays)]).tolist()]  # of documents among the tokens
        self.pieces = [
            (first, min(first + length, end - 1))
            for begin, end in pairwise(ends)
            for first in range(begin, end - 1, length)
        ]
        sizes = [end - first for first, end in self.pieces]
        self.samples = best_fit(sizes, length) if packed else [[i] for i in range(len(sizes))]
        self.counts = np.array([sum(sizes[i] for i in sample) for sample in self.samples])

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, indices: Array) -> tuple[tuple[Array, Array], Array]:
        """Return tokens and documents as float32, and targets as int64."""
        chosen = as_indices(self.name, indices, len(self))
        tokens, documents = np.zeros((2, len(chosen), *self.input_shape[0]), np.float32)
        targets = np.full(tokens.shape, self.ignore_index, np.int64)
        for row, sample in enumerate(chosen):
            pieces = [np.arange(*self.pieces[i]) for i in self.samples[sample]]
            place, n = np.concatenate(pieces), self.counts[sample]
            tokens[row, :n], targets[row, :n] = self.tokens[place], self.tokens[place + 1]
            documents[row, :n] = np.repeat(np.arange(len(pieces)) + 1, [*map(len, pieces)])
        return (tokens, documents), targets

    def shuffled(self, seed: int, epoch: int) -> NDArray[np.int64]:
        """Return the order of an epoch, in which samples of a bucket follow each other."""
        order = super().shuffled(seed, epoch)
        if self.bucket > 1:
            order = order[np.argsort(self.counts[order], kind="stable")]
            buckets = np.split(order, range(self.bucket, len(order), self.bucket))
            order = np.concatenate([buckets[i] for i in permutation(seed, epoch, len(buckets))])
        return order


def load_documents(
    data_dir: str | os.PathLike[str] | None = None,
    *,
    length: int = DEFAULT_LENGTH,
    pattern: str | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    separator: str | None = "\n\n",
    packed: bool = True,
    bucket: int = 1,
) -> tuple[Dataset, Dataset]:
    """Read text as documents, packed to sequences; the last tenth of them is the test set.

    Parameters
    ----------
    data_dir, pattern
        See `pydtnn.data.text.read_files`.
    length, packed, bucket
        See `PackedDataset`.
    tokenizer : path, optional
        See `load_text`.
    separator : str, optional
        Ends a document within a file, and belongs to it; by default an empty line. None: each file
        is a document.

    Raises
    ------
    FileNotFoundError
        If there is no such file, or none in the folder.
    ValueError
        If there are fewer than two documents, or a token is unknown.
    ImportError
        If `tokenizer` is given and the package tokenizers is missing.
    """
    files, root = read_files(data_dir, pattern)
    if separator:
        after = re.compile(b"(?<=%s)" % re.escape(separator.encode()))
        files = [part for file in files for part in after.split(file) if part.strip()]
    encode, classes, encoding = encoder(tokenizer, str(root))
    documents = [tokens for tokens in map(encode, files) if len(tokens) > 1]
    test = max(len(documents) // TEST_SHARE, 1)
    make = partial(PackedDataset, length=length, packed=packed, bucket=bucket)
    train = make(documents[:-test], classes=classes, encoding=encoding)
    return train, make(documents[-test:], like=train)
