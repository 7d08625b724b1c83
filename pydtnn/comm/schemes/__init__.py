"""Parallel schemes by name."""

from __future__ import annotations

from typing import Any

from pydtnn.comm.communicator import Communicator
from pydtnn.comm.exchange import AllReduce, GradientExchange
from pydtnn.suggest import unknown

SCHEMES: dict[str, type[GradientExchange]] = {"allreduce": AllReduce}


def create_scheme(name: str, comm: Communicator, **options: Any) -> GradientExchange:
    """Make the scheme called `name`.

    Raises
    ------
    ValueError
        For an unknown name, with the nearest.
    """
    if name not in SCHEMES:
        raise ValueError(unknown("scheme", name, SCHEMES))
    return SCHEMES[name](comm, **options)
