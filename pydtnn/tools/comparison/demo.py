"""DeMo: the largest components of the momentum's cosine transform, in chunks of each parameter."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import prod

import numpy as np

from pydtnn.parallel.compression.compressor import Compressor, Context, Parts
from pydtnn.utils.validate import check_float, check_int


def demo(*, keep: int = 32, chunk: int = 64, decay: float = 0.999) -> Compressor:
    """Send the components of each rank's momentum that are largest in their chunk.

    ``x <- decay x + g`` on each rank; q are the `keep` largest components of the cosine transform
    of each chunk of x, or all of smaller chunks; ``x <- x - T' q``, with the inverse transform T';
    the sum of all ranks' ``T' q`` is what the optimizer gets. A rank's momentum thus keeps what it
    has not sent, which is never equal on all ranks. Use an optimizer without a momentum of its
    own: SGD, or, as in the paper's experiments, the sign of the sum, which is that of ``--optimizer
    lion:beta1=0,beta2=0``.

    Matrices (rows, columns), and filters as (O, kh kw I), have chunks of two dimensions, vectors of
    one; the length of a chunk along a dimension is the largest divisor of its size up to `chunk`.
    The transform, DCT-II, is orthonormal and separable. This is the authors' code but for three
    details: there, gradients are multiplied by the learning rate before they are added to x;
    components are divided by the number of ranks that have sent them before the inverse transform;
    and indices have 8 B instead of 4 B.

    Parameters
    ----------
    keep : int
        Components of a chunk that are sent.
    chunk : int
        Largest length of a chunk along a dimension.
    decay : float
        The paper's beta, in [0, 1).

    References
    ----------
    Peng, Quesnelle and Kingma, "DeMo: decoupled momentum optimization", 2024, arXiv 2411.19870,
    algorithm 1.
    """
    keep = check_int("demo", "keep", keep, at_least=1)
    chunk = check_int("demo", "chunk", chunk, at_least=1)
    decay = check_float("demo", "decay", decay, at_least=0, below=1)

    def compress(x: np.ndarray, context: Context) -> Parts:
        components, found = np.empty_like(x), []
        for own, (m, h, n, w) in _chunks(context, chunk):
            tiles = x[own].reshape(m, h, n, w).swapaxes(1, 2)
            rows = (_cosines(h, x.dtype) @ tiles @ _cosines(w, x.dtype).T).reshape(m * n, h * w)
            components[own] = rows.reshape(-1)
            rest = max(h * w - keep, 0)
            largest = np.argpartition(np.abs(rows), rest, axis=1)[:, rest:]
            found.append((largest + own.start + h * w * np.arange(m * n)[:, None]).reshape(-1))
        kept = np.concatenate(found).astype(np.uint32)
        return kept, components[kept]

    def restore(parts: Parts, out: np.ndarray, context: Context) -> None:
        components = np.zeros_like(out)
        components[parts[0]] = parts[1]
        for own, (m, h, n, w) in _chunks(context, chunk):
            tiles = components[own].reshape(m, n, h, w)
            tiles = _cosines(h, out.dtype).T @ tiles @ _cosines(w, out.dtype)
            out[own] += tiles.swapaxes(1, 2).reshape(-1)

    return Compressor(compress, restore, feedback=decay)


def _chunks(context: Context, most: int) -> Iterator[tuple[slice, tuple[int, int, int, int]]]:
    """Yield the range of each parameter, and the numbers and lengths of its chunks' two sides."""
    begin = 0
    for shape in context.shapes or [(size,) for size in context.sizes]:
        rows = shape[0] if len(shape) > 1 else 1
        columns = prod(shape) // rows
        h, w = (max(d for d in range(1, most + 1) if size % d == 0) for size in (rows, columns))
        yield slice(begin, begin := begin + rows * columns), (rows // h, h, columns // w, w)


@lru_cache(maxsize=256)
def _cosines(n: int, dtype: np.dtype) -> np.ndarray:
    """Return the matrix of the orthonormal DCT-II."""
    angles = np.arange(n)[:, None] * (np.arange(n) + 0.5) * np.pi / n
    scale = np.where(np.arange(n) == 0, 1, 2) / n
    return (np.cos(angles) * np.sqrt(scale)[:, None]).astype(dtype)
