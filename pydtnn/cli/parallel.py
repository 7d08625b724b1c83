"""Construction of allreduce, scheme and compression from the configuration."""

from __future__ import annotations

from pydtnn.cli.config import TrainConfig
from pydtnn.cli.parts import find
from pydtnn.comm import Communicator
from pydtnn.comm.schedules.check import check
from pydtnn.comm.schedules.rule import RULE, VENDOR, create_allreduce
from pydtnn.comm.wrapper import Checked


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
