"""From a configuration to how the ranks train together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pydtnn.cli.config import TrainConfig
from pydtnn.cli.parts import find, refuse_unless_taken
from pydtnn.comm import Communicator
from pydtnn.comm.checked import Checked
from pydtnn.comm.schedules.auto import RULE, create_allreduce
from pydtnn.comm.schedules.check import check
from pydtnn.comm.schedules.rule import VENDOR
from pydtnn.parallel.exchange import GradientExchange
from pydtnn.parallel.reproducible import ExactSums
from pydtnn.parallel.sums import Sums


def choose_allreduce(config: TrainConfig, comm: Communicator) -> Communicator:
    """Give the communicator the allreduce that `--allreduce` names. Collective: all ranks call it.

    Raises
    ------
    ValueError
        For an unknown name, and for an algorithm of a file that does not add up on these ranks.
    """
    found, _ = find(config, "allreduce")
    if found.ready:
        check(found.target, comm.hosts)  # it would hang, or sum wrongly
    # On GPUs, whatever carries their arrays sums them, unless they go through host memory.
    device = config.device == "cuda" and (config.comm != "mpi" or config.cuda_aware)
    return create_allreduce(VENDOR if device and found.name == RULE else found, comm)


def check_messages(config: TrainConfig, comm: Communicator) -> Communicator:
    """Let calls be compared over the ranks where `--check-messages` says so. Collective."""
    return Checked(comm) if config.check_messages else comm


def create_exchange(config: TrainConfig, comm: Communicator) -> GradientExchange:
    """Make the parallel scheme that `--scheme` names, or a file's class.

    Raises
    ------
    ValueError, TypeError
        In one sentence, for what is unknown or does not go together.
    """
    found, options = find(config, "scheme")
    if found.ready:  # with a communicator of its own
        raise TypeError(f"scheme {found.name}: expected {found.kind.expected}, not an object of it")
    sums = create_sums_of(config)
    if not config.overlap:
        refuse_unless_taken(found, "overlap", "--no-overlap")
    if sums is not Sums:
        refuse_unless_taken(found, "sums", "--compress and --exact")
    return found.make(options, comm, overlap=config.overlap, sums=sums)


def create_sums_of(config: TrainConfig) -> Callable[[Communicator], Sums]:
    """Choose how gradients are added up: exactly, compressed, or as the communicator does it."""
    if config.exact:
        return partial(ExactSums, shards=config.shards)
    if config.compress is None:
        if config.compress_options:
            raise ValueError("--compress-options: say with --compress whose options they are")
        return Sums
    found, options = find(config, "compress")
    return found.make(options)
