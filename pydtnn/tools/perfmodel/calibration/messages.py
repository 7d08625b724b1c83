"""The network of a job, and the time of a rank's processor for its messages."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import inf

import numpy as np

from pydtnn.comm import Communicator
from pydtnn.tools.perfmodel.calibration.processor import exchange_around, measure_processor
from pydtnn.tools.perfmodel.calibration.sample import Sample, sample
from pydtnn.tools.perfmodel.network import Network, Route
from pydtnn.tools.perfmodel.platform import Link, MessageSpeed


def measure_messages(comm: Communicator, default: MessageSpeed) -> tuple[MessageSpeed, list[str]]:
    """Measure messages between the ranks of a job. Collective: all ranks call it.

    Parameters
    ----------
    comm : Communicator
    default : Messages
        Taken where nothing can be measured: inside a host with one rank, between hosts with one
        host.

    Returns
    -------
    Messages
        Equal on all ranks.
    list of str
        What was not measured.
    """
    network = Network.measure(comm)
    add = 1 / network.add if network.add > 0 else None
    inside = _routes(network, same=True)
    between = _routes(network, same=False)
    processor = measure_processor(comm, network)
    links = {
        "inside": _link(network, inside, "inside", default.inside),
        "between": _link(network, between, "from", default.between),
    }
    if processor.wake is not None:  # what the ranks themselves take is counted for each message
        for name, one in links.items():
            late = processor.call + processor.notice(2 * one.latency)
            links[name] = replace(one, latency=max(one.latency - late, one.latency / 4))
    missing = [f"messages.{n}" for n, own in zip(links, (inside, between), strict=True) if not own]
    if comm.size == 1:
        missing += ["messages.call"]
    messages = MessageSpeed(
        links["inside"],
        links["between"],
        add=add,
        copy=1 / processor.copy if processor.copy else None,
        call=processor.call if comm.size > 1 else default.call,
        allreduce=1 / processor.add if processor.add else None,
        eager=processor.eager if processor.eager < inf else None,
        wake=processor.wake,
        test=processor.test,
    )
    return messages, missing


def _routes(network: Network, *, same: bool) -> list[Route]:
    return [route for (g, h), route in network.routes.items() if (g == h) is same]


def _link(network: Network, routes: Sequence[Route], shared: str, default: Link) -> Link:
    if not routes:
        return default
    capacities = [rate for name, rate in network.links.items() if name.startswith(f"{shared} ")]
    return Link(
        statistics.median(route.latency for route in routes),
        statistics.median(route.bandwidth for route in routes),
        statistics.median(capacities) if capacities else None,
    )


def exchange_sample(comm: Communicator) -> Sample:
    """Time messages of a few bytes between neighbours, to find disturbances. Collective."""
    exchange = partial(exchange_around, comm, np.zeros(8), np.zeros(8))
    return sample("messages", exchange, 40, together=comm.barrier, limit=1.0)
