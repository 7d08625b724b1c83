"""Gradient compression by name: what ranks send instead of gradients.

`Compressor` makes one of two functions; those of the literature are in `floats`, `quantised`,
`sparse` and `low_rank`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from pydtnn.comm.communicator import Communicator
from pydtnn.parallel.compression.compressor import CompressedSums, Compressor
from pydtnn.parallel.compression.context import Context
from pydtnn.parallel.compression.floats import any_float, bfloat16, float16
from pydtnn.parallel.compression.low_rank import PowerSGD, power_sgd
from pydtnn.parallel.compression.quantised import int8, sign
from pydtnn.parallel.compression.sparse import random_k, top_k
from pydtnn.parallel.sums import Sums
from pydtnn.utils.registry import Kind

__all__ = ["COMPRESSORS", "CompressedSums", "Compressor", "Context", "PowerSGD", "create_sums"]

COMPRESSORS: dict[str, Callable[..., Callable[[Communicator], Sums]]] = {
    "float16": float16,
    "bfloat16": bfloat16,
    "float": any_float,
    "int8": int8,
    "top_k": top_k,
    "random_k": random_k,
    "sign": sign,
    "power_sgd": power_sgd,
}
"""Every compressor by the name that the command line knows it by."""

ALIASES = {"powersgd": "power_sgd", "topk": "top_k", "randomk": "random_k"}

COMPRESSOR: Kind[Callable[[Communicator], Sums]] = Kind(
    "compressor", COMPRESSORS, Compressor | partial, "a Compressor or what makes one", ALIASES
)
"""PowerSGD is no `Compressor`; its options are bound to it by `partial`."""


def create_sums(name: str | Callable[..., Any], **options: Any) -> Callable[[Communicator], Sums]:
    """Make what a scheme takes as `sums`.

    Parameters
    ----------
    name : str, Compressor or callable
        One of `COMPRESSORS`, ``path/to/file.py:name``, or what makes a `Compressor`.
    **options
        Of the function of that name.

    Raises
    ------
    ValueError, TypeError
        For an unknown name or option, and for an option out of its limits.

    Examples
    --------
    >>> create_sums("top_k", share=2.0)
    Traceback (most recent call last):
    ValueError: top_k: share must be above 0 and at most 1, got 2.0
    """
    return COMPRESSOR.find(name).make(options)
