"""Optimizers: rules that change parameters by their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pydtnn.optimizers.base import Optimizer
from pydtnn.utils.lazy import Named, lazy
from pydtnn.utils.registry import Registry

if TYPE_CHECKING:
    from pydtnn.optimizers.adaptive import (
        Adagrad,
        Adam,
        AdamW,
        Lion,
        Nadam,
        RMSProp,
        ScheduleFreeAdamW,
    )
    from pydtnn.optimizers.eight_bit import Adam8bit
    from pydtnn.optimizers.layerwise import LAMB, LARS
    from pydtnn.optimizers.muon import Muon
    from pydtnn.optimizers.sgd import SGD
    from pydtnn.optimizers.soap import SOAP

__all__ = [
    "LAMB",
    "LARS",
    "OPTIMIZERS",
    "SGD",
    "SOAP",
    "Adagrad",
    "Adam",
    "Adam8bit",
    "AdamW",
    "Lion",
    "Muon",
    "Nadam",
    "Optimizer",
    "RMSProp",
    "ScheduleFreeAdamW",
    "get_optimizer",
]

OPTIMIZERS = Named(
    __name__,
    {
        "sgd": "SGD",
        "rmsprop": "RMSProp",
        "adagrad": "Adagrad",
        "lion": "Lion",
        "adam": "Adam",
        "adamw": "AdamW",
        "adam8bit": "Adam8bit",
        "schedule_free": "ScheduleFreeAdamW",
        "nadam": "Nadam",
        "lars": "LARS",
        "lamb": "LAMB",
        "soap": "SOAP",
        "muon": "Muon",
    },
)
"""Optimizers by name."""

OPTIMIZER = Registry(
    "optimizer", OPTIMIZERS, Optimizer, "an Optimizer, or a class or function that returns one"
)


def get_optimizer(
    optimizer: str | Optimizer | Callable[..., Optimizer], **options: Any
) -> Optimizer:
    """Return the optimizer of a name, or the argument itself.

    Parameters
    ----------
    optimizer : str, Optimizer or callable
        A name of `OPTIMIZERS`, ``path/to/file.py:name``, an optimizer, or a class or function
        that returns one.
    **options
        Parameters of a named one: ``get_optimizer("sgd", lr=0.1, momentum=0.9)``.

    Raises
    ------
    TypeError, ValueError
        If a name or option is unknown (the message contains the nearest ones), or a number is out
        of range.
    """
    return OPTIMIZER.find(optimizer).make(options)


if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = lazy(__name__)
