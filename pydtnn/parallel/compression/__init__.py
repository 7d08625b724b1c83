"""Gradient compression by name.

`Compressor` is built from two functions; published methods are in `floats`, `quantised`, `sparse`
and `low_rank`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from pydtnn.comm.communicator import Communicator
from pydtnn.parallel.compression.compressor import CompressedSums, Compressor, Context
from pydtnn.parallel.sums import Sums
from pydtnn.utils.lazy import Named, homes, lazy
from pydtnn.utils.registry import Registry

if TYPE_CHECKING:
    from pydtnn.parallel.compression.floats import bfloat16 as bfloat16
    from pydtnn.parallel.compression.floats import float16 as float16
    from pydtnn.parallel.compression.low_rank import PowerSGD as PowerSGD
    from pydtnn.parallel.compression.low_rank import power_sgd as power_sgd
    from pydtnn.parallel.compression.quantised import int8 as int8
    from pydtnn.parallel.compression.quantised import sign as sign
    from pydtnn.parallel.compression.quantised import sign_vote as sign_vote
    from pydtnn.parallel.compression.sparse import dgc as dgc
    from pydtnn.parallel.compression.sparse import random_k as random_k
    from pydtnn.parallel.compression.sparse import top_k as top_k

COMPRESSORS = Named(
    __name__,
    {
        "float16": "float16",
        "bfloat16": "bfloat16",
        "int8": "int8",
        "top_k": "top_k",
        "random_k": "random_k",
        "sign": "sign",
        "sign_vote": "sign_vote",
        "dgc": "dgc",
        "power_sgd": "power_sgd",
    },
)
"""Compressors by name on the command line."""

ALIASES = {"powersgd": "power_sgd", "topk": "top_k", "oktopk": "ok_topk", "randomk": "random_k"}

COMPRESSOR: Registry[Callable[[Communicator], Sums]] = Registry(
    "compressor",
    COMPRESSORS,
    Compressor | partial,
    "a Compressor, or a class or function that returns one",
    ALIASES,
    tool="comparison",
)
"""PowerSGD is no `Compressor`; its options are bound by `partial`."""


def create_sums(name: str | Callable[..., Any], **options: Any) -> Callable[[Communicator], Sums]:
    """Create the argument `sums` of a scheme.

    Parameters
    ----------
    name : str, Compressor or callable
        One of `COMPRESSORS`, ``path/to/file.py:name``, or a function that returns a `Compressor`.
    **options
        Arguments of that function.

    Raises
    ------
    ValueError, TypeError
        If a name or option is unknown, or an option is out of range.

    Examples
    --------
    >>> create_sums("top_k", share=2.0)
    Traceback (most recent call last):
    ValueError: top_k: share must be above 0 and at most 1, got 2.0
    """
    return COMPRESSOR.find(name).make(options)


if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = lazy(__name__, dict.fromkeys(("OkTopk", "ok_topk"), "comparison"))
    __all__ = [
        "COMPRESSORS",
        "CompressedSums",
        "Compressor",
        "Context",
        "create_sums",
        *homes(__name__),
    ]
