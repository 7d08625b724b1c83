"""From a configuration to how the ranks train together."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial

from pydtnn.cli.config import TrainConfig
from pydtnn.comm import Communicator
from pydtnn.comm.checked import Checked
from pydtnn.comm.schedules.auto import RULE, create_allreduce
from pydtnn.comm.schedules.check import check
from pydtnn.comm.schedules.rule import VENDOR
from pydtnn.parallel.compression import Compressor, create_sums
from pydtnn.parallel.exchange import GradientExchange
from pydtnn.parallel.reproducible import ExactSums
from pydtnn.parallel.schemes import SCHEMES
from pydtnn.parallel.sums import Sums
from pydtnn.utils.own_code import import_class, import_object, is_own, naming_options
from pydtnn.utils.registry import create, key_of

FLAGS = {"comm": "mpirun", "sums": "--compress or --exact", "overlap": "--no-overlap"}


def choose_allreduce(config: TrainConfig, comm: Communicator) -> Communicator:
    """Give the communicator the allreduce that `--allreduce` names. Collective: all ranks call it.

    Raises
    ------
    ValueError
        For an unknown name, and for an algorithm of a file that does not add up on these ranks.
    """
    if not is_own(config.allreduce):
        # On GPUs, whatever carries their arrays sums them, unless they go through host memory.
        device = config.device == "cuda" and (config.comm != "mpi" or config.cuda_aware)
        name = VENDOR if device and config.allreduce == RULE else config.allreduce
        return create_allreduce(name, comm)
    algorithm = import_object(config.allreduce, "--allreduce")
    check(algorithm, comm.hosts)  # it would hang, or sum wrongly
    return create_allreduce(algorithm, comm)


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
    name, registry = config.scheme, SCHEMES
    if is_own(config.scheme):
        name = config.scheme.rpartition(":")[2].lower()
        registry = {name: import_class(config.scheme, "--scheme", GradientExchange)}
    with naming_options("--scheme-options", config.scheme_options, FLAGS):
        options = dict(config.scheme_options)
        factory = registry.get(key_of(name))
        takes = inspect.signature(factory).parameters if factory else {}
        for option, value, usual, flag in (
            ("overlap", config.overlap, True, "--no-overlap"),
            ("sums", create_sums_of(config), Sums, "--compress and --exact"),
        ):
            if option in takes:
                options[option] = value
            elif factory and value is not usual:
                raise ValueError(f"{flag}: {config.scheme} takes no `{option}`; leave it out")
        return create("scheme", registry, name, options, args=(comm,))


def create_sums_of(config: TrainConfig) -> Callable[[Communicator], Sums]:
    """Choose how gradients are added up: exactly, compressed, or as the communicator does it."""
    if config.exact:
        return partial(ExactSums, shards=config.shards)
    if config.compress is None:
        if config.compress_options:
            raise ValueError("--compress-options: say with --compress whose options they are")
        return Sums
    if is_own(config.compress):
        compressor = import_object(config.compress, "--compress")
        if not isinstance(compressor, Compressor):
            raise ValueError(
                f"--compress: {config.compress} must be a Compressor, not {compressor!r}"
            )
        if config.compress_options:
            raise ValueError(f"--compress-options: {config.compress} has its own; leave them out")
        return compressor
    with naming_options("--compress-options", config.compress_options, {"name": "--compress"}):
        return create_sums(config.compress, **config.compress_options)
