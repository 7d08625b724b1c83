"""A ladder of one allreduce, from gather and broadcast to a ring that backward hides.

    python lessons/allreduce/steps.py [--ranks 8]

Each step is a file with a function, whose first lines say why it is faster than the one before. All
are compared with the sum of NumPy, and timed by virtual ranks of the library: threads whose clocks
show when they would be done on the network that is described here (`docs/virtual-ranks.md`). The
times are therefore the same on any machine.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pydtnn.comm import Communicator
from pydtnn.tools.perfmodel.compute.base import NoCosts
from pydtnn.tools.perfmodel.network import Network
from pydtnn.tools.perfmodel.topology import FatTree
from pydtnn.tools.perfmodel.virtual import run_virtual
from pydtnn.utils import clock

Array = np.ndarray

STEPS = sorted(path.stem for path in Path(__file__).parent.glob("sum_*.py"))

LATENCY, BANDWIDTH, ADD = 25e-6, 1.25e9, 1e-10
"""Of a message in s, of a network card in B/s (10 Gbit/s), and of adding a byte in s."""

ELEMENTS, LAYERS = 1 << 18, 8
"""Of all gradients together, 2 MiB; layers among which they are divided."""

BACKWARD_S, PARTS = 6e-3, 128
"""Time of backward, and the parts of it between which messages can make progress."""


class Outcome(NamedTuple):
    """What a step has needed on the rank that has sent most.

    Attributes
    ----------
    messages, nbytes : int
        Sent.
    seconds : float
        From the end of what backward computes to the complete sum.
    """

    messages: int
    nbytes: int
    seconds: float


def network(ranks: int) -> Network:
    """Return hosts of one rank on two switches, between which a link has the speed of two cards."""
    half = max(1, -(-ranks // 2))
    switches = FatTree(down=(half, 2), up=(1,), bandwidth=2 * BANDWIDTH)
    return Network.create(
        range(ranks), latency=LATENCY, bandwidth=BANDWIDTH, add=ADD, topology=switches
    )


def gradients(rank: int) -> list[Array]:
    """Return the gradients of the layers on a rank, (n / L,) each."""
    values = np.random.default_rng(rank).standard_normal(ELEMENTS)
    return [part.copy() for part in np.array_split(values, LAYERS)]


def compute(result: Array, values: Array) -> Iterator[None]:
    """Spend the time of a layer's backward pass, in parts, and complete its gradient."""
    for _ in range(PARTS // LAYERS):
        clock.current().spend(BACKWARD_S / PARTS)  # type: ignore[attr-defined]
        yield
    result[:] = values


def step_of(name: str, comm: Communicator) -> tuple[Array, Outcome]:
    """Carry out backward and a sum on a rank; return the sum (n,)."""
    module, values = importlib.import_module(name), gradients(comm.rank)
    array = np.empty(ELEMENTS)
    comm.barrier()
    begin = clock.now()
    layers = np.array_split(array, LAYERS)  # views
    passes = [compute(layer, v) for layer, v in zip(layers, values, strict=True)]
    if hasattr(module, "backward"):
        module.backward(comm, layers, passes)
    else:
        for _ in chain(*passes):
            pass
        module.allreduce(comm, array)
    traffic = comm.traffic
    return array, Outcome(traffic.messages, traffic.bytes, clock.now() - begin - BACKWARD_S)


def outcome(name: str, ranks: int) -> Outcome:
    """Carry out a step on virtual ranks, and compare its sum with that of NumPy."""
    run = run_virtual(lambda c: step_of(name, c), network=network(ranks), costs=NoCosts())
    expected = np.sum([np.concatenate(gradients(rank)) for rank in range(ranks)], axis=0)
    for array, _ in run.results:
        assert np.abs(array - expected).max() <= 1e-12, name
    each = [done for _, done in run.results]
    return Outcome(*(max(values) for values in zip(*each, strict=True)))


def bound(ranks: int) -> float:
    """Return the seconds of ``2 (P - 1) / P n`` elements on a card, which all must send."""
    return 2 * (ranks - 1) / ranks * ELEMENTS * 8 / BANDWIDTH


def table(names: Sequence[str], ranks: int) -> dict[str, Outcome]:
    """Carry out steps, and print a line for each."""
    outcomes = {}
    print(
        f"{'step':18}{'messages':>9}{'MB':>8}{'ms':>8}  of the bandwidth bound, which is", end=" "
    )
    print(f"{1e3 * bound(ranks):.2f} ms")
    for name in names:
        done = outcomes[name] = outcome(name, ranks)
        share = f"{bound(ranks) / done.seconds:7.0%}" if ranks > 1 else ""
        print(f"{name:18}{done.messages:9}{done.nbytes / 1e6:8.2f}{1e3 * done.seconds:8.2f}{share}")
    return outcomes


def main() -> None:
    """Carry out all steps."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--ranks", type=int, default=8, help="virtual ranks, each on a host")
    ranks = parser.parse_args().ranks
    print(f"allreduce of {ELEMENTS * 8 / 1e6:.1f} MB on {ranks} ranks; most that a rank sends, and")
    print(f"the time after a backward pass of {1e3 * BACKWARD_S:.0f} ms (virtual time)")
    table(STEPS, ranks)


if __name__ == "__main__":
    main()
