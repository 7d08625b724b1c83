"""Parallel schemes by name, one small file each."""

from __future__ import annotations

from typing import Any

from pydtnn.comm.communicator import Communicator
from pydtnn.parallel.exchange import AllReduce, GradientExchange
from pydtnn.parallel.schemes.elastic import ElasticAveraging
from pydtnn.parallel.schemes.gossip import Gossip
from pydtnn.parallel.schemes.graphs import GRAPHS, swap
from pydtnn.parallel.schemes.hierarchical import Hierarchical
from pydtnn.parallel.schemes.local_sgd import LocalSGD, PostLocalSGD
from pydtnn.parallel.schemes.parameter_server import ParameterServer
from pydtnn.parallel.schemes.partition import Partition
from pydtnn.parallel.schemes.sharded import ShardedOptimizer
from pydtnn.parallel.schemes.stale import StaleGradients
from pydtnn.utils.registry import create

__all__ = [
    "GRAPHS",
    "SCHEMES",
    "AllReduce",
    "ElasticAveraging",
    "Gossip",
    "Hierarchical",
    "LocalSGD",
    "ParameterServer",
    "Partition",
    "PostLocalSGD",
    "ShardedOptimizer",
    "StaleGradients",
    "create_scheme",
    "swap",
]

SCHEMES: dict[str, type[GradientExchange]] = {
    "allreduce": AllReduce,
    "sharded": ShardedOptimizer,
    "local_sgd": LocalSGD,
    "post_local_sgd": PostLocalSGD,
    "elastic": ElasticAveraging,
    "gossip": Gossip,
    "stale": StaleGradients,
    "hierarchical": Hierarchical,
    "parameter_server": ParameterServer,
}
"""Every scheme by the name that the command line knows it by."""


def create_scheme(name: str, comm: Communicator, **options: Any) -> GradientExchange:
    """Make the scheme called `name`.

    Parameters
    ----------
    name : str
        One of `SCHEMES`; capitals and hyphens do not matter.
    comm : Communicator
    **options
        Parameters of the scheme: ``create_scheme("local_sgd", comm, period=4)``.

    Raises
    ------
    TypeError, ValueError
        For an unknown name or option, with the nearest ones, and for a number out of its limits.
    """
    return create("scheme", SCHEMES, name, options, args=(comm,))
