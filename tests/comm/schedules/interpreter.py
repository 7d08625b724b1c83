"""Carries out schedules on arrays, all ranks in one thread."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from pydtnn.comm.schedules.timeline import Plan, timeline


def carry_out(ranks: Plan, arrays: list[np.ndarray]) -> None:
    """Carry out the rounds of all ranks in place, one after another."""
    done, leaving, coming, travelling = timeline(ranks), defaultdict(list), defaultdict(list), {}
    for message in done.messages:
        leaving[message.sender, message.sent].append(message)
        coming[message.receiver, message.received].append(message)
    for _, rank, k, begins in done.events:
        array = arrays[rank]
        for message in leaving[rank, k] if begins else ():
            travelling[message] = array[message.part.elements(len(array))].copy()
        for message in () if begins else coming[rank, k]:
            elements = message.part.elements(len(array))
            old = array[elements] if message.op == "sum" else 0
            array[elements] = old + travelling[message]
