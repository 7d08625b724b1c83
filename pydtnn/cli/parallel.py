"""Construction of allreduce, scheme and compression from the configuration."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pydtnn.cli.config import TrainConfig
from pydtnn.cli.parts import find, require_parameter
from pydtnn.comm import Communicator
from pydtnn.comm.schedules.check import check
from pydtnn.comm.schedules.rule import RULE, VENDOR, create_allreduce
from pydtnn.comm.wrapper import Checked
from pydtnn.parallel.exchange import GradientExchange
from pydtnn.parallel.reproducible import ExactSums
from pydtnn.parallel.sums import Sums


def choose_allreduce(config: TrainConfig, comm: Communicator) -> Communicator:
    """Return the communicator with the allreduce of `--allreduce`. Collective: all ranks call it.

    Raises
    ------
    ValueError
        If the name is unknown, or a custom algorithm does not compute the sum on these ranks.
    """
    found, _ = find(config, "allreduce")
    if found.ready:
        check(found.target, comm.hosts)  # an incorrect one would deadlock or sum wrongly
    # On GPUs the transport sums arrays, unless they are staged in host memory.
    device = config.device == "cuda" and (config.comm != "mpi" or config.cuda_aware)
    return create_allreduce(VENDOR if device and found.name == RULE else found, comm)


def check_messages(config: TrainConfig, comm: Communicator) -> Communicator:
    """Wrap the communicator in `Checked` if `--check-messages` is set. Collective."""
    return Checked(comm) if config.check_messages else comm


def create_exchange(config: TrainConfig, comm: Communicator) -> GradientExchange:
    """Create the parallel scheme that `--scheme` names.

    Raises
    ------
    ValueError, TypeError
        If a name is unknown or options are incompatible.
    """
    found, options = find(config, "scheme")
    if found.ready:  # an instance has its own communicator
        raise TypeError(f"scheme {found.name}: expected {found.registry.expected}, got an instance")
    sums = create_sums_of(config)
    if not config.overlap:
        require_parameter(found, "overlap", "--no-overlap")
    if sums is not Sums:
        require_parameter(found, "sums", "--compress and --exact")
    return found.make(options, comm, overlap=config.overlap, sums=sums)


def create_sums_of(config: TrainConfig) -> Callable[[Communicator], Sums]:
    """Return the factory of sums: reproducible, compressed, or those of the communicator."""
    if config.exact:
        return partial(ExactSums, shards=config.shards)
    if config.compress is None:
        if config.compress_options:
            raise ValueError("train: --compress-options requires --compress; add --compress NAME")
        return Sums
    found, options = find(config, "compress")
    return found.make(options)
