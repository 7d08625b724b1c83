"""Parallel schemes by name, one small file each."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pydtnn.comm.communicator import Communicator
from pydtnn.parallel.exchange import GradientExchange
from pydtnn.utils.lazy import Named, homes, lazy
from pydtnn.utils.registry import Registry

if TYPE_CHECKING:
    from pydtnn.parallel.exchange import AllReduce as AllReduce
    from pydtnn.parallel.schemes.diloco import DiLoCo as DiLoCo
    from pydtnn.parallel.schemes.diloco import StreamingDiLoCo as StreamingDiLoCo
    from pydtnn.parallel.schemes.elastic import ElasticAveraging as ElasticAveraging
    from pydtnn.parallel.schemes.gossip import GRAPHS as GRAPHS
    from pydtnn.parallel.schemes.gossip import Gossip as Gossip
    from pydtnn.parallel.schemes.gossip import swap as swap
    from pydtnn.parallel.schemes.local_sgd import LocalSGD as LocalSGD
    from pydtnn.parallel.schemes.local_sgd import PostLocalSGD as PostLocalSGD
    from pydtnn.parallel.schemes.one_bit_adam import OneBitAdam as OneBitAdam
    from pydtnn.parallel.schemes.sharded import Partition as Partition
    from pydtnn.parallel.schemes.sharded import ShardedOptimizer as ShardedOptimizer
    from pydtnn.parallel.schemes.sharded_parameters import ShardedGradients as ShardedGradients
    from pydtnn.parallel.schemes.sharded_parameters import ShardedParameters as ShardedParameters
    from pydtnn.parallel.schemes.slow_momentum import SlowMo as SlowMo
    from pydtnn.parallel.schemes.stale import StaleGradients as StaleGradients

SCHEMES = Named(
    __name__,
    {
        "allreduce": "AllReduce",
        "sharded": "ShardedOptimizer",
        "sharded_gradients": "ShardedGradients",
        "sharded_parameters": "ShardedParameters",
        "local_sgd": "LocalSGD",
        "post_local_sgd": "PostLocalSGD",
        "diloco": "DiLoCo",
        "streaming_diloco": "StreamingDiLoCo",
        "slow_momentum": "SlowMo",
        "one_bit_adam": "OneBitAdam",
        "elastic": "ElasticAveraging",
        "gossip": "Gossip",
        "stale": "StaleGradients",
    },
)
"""Schemes by name on the command line."""

SCHEME: Registry[GradientExchange] = Registry(
    "scheme", SCHEMES, GradientExchange, "a subclass of GradientExchange", tool="comparison"
)


def create_scheme(
    name: str | Callable[..., GradientExchange], comm: Communicator, **options: Any
) -> GradientExchange:
    """Create a parallel scheme.

    Parameters
    ----------
    name : str or callable
        One of `SCHEMES` or of `pydtnn.tools.comparison` (case and hyphens are ignored),
        ``path/to/file.py:Class``, or a subclass of `GradientExchange`.
    comm : Communicator
    **options
        Parameters of the scheme: ``create_scheme("local_sgd", comm, period=4)``.

    Raises
    ------
    TypeError, ValueError
        If a name or option is unknown (the message contains the nearest ones), or a number is out
        of range.
    """
    return SCHEME.find(name).make(options, comm)


if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = lazy(
        __name__,
        dict.fromkeys(("GradientPush", "ParameterServer", "StaleSynchronous"), "comparison"),
    )
    __all__ = ["SCHEMES", "create_scheme", *homes(__name__)]
