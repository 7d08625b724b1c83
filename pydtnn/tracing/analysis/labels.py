"""What the main thread of each rank was doing: the layer, the phase, or communication."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pydtnn.tracing.timeline import Timeline
from pydtnn.utils.observer import Kind

COMMUNICATION = (Kind.CALL, "communication")
"""Label of everything inside of calls and waits."""


@dataclass
class Labels:
    """A label for each activity of the main threads.

    An activity inside of a call or wait has the label `COMMUNICATION`; otherwise that of the
    innermost layer that contains it, or of the innermost phase outside of layers. What an epoch
    contains besides other phases has no label.

    Attributes
    ----------
    table : list of (Kind, str)
        Kind and name of each label; `COMMUNICATION` is the first.
    codes : ndarray of int, shape ``(activities,)``
        Position in `table`; -1 for activities of other threads and outside of phases.
    """

    table: list[tuple[Kind, str]]
    codes: np.ndarray

    def seconds(self, timeline: Timeline) -> np.ndarray:
        """Return the time of each label in each step on each rank.

        Returns
        -------
        ndarray of float, shape ``(labels, steps, ranks)``
            In s; the sum over the labels is the duration of the step without gaps between phases.
        """
        steps, activities = timeline.steps, timeline.activities
        found = np.zeros((len(self.table), len(steps), timeline.size))
        for rank in range(timeline.size):
            here = np.flatnonzero((activities["rank"] == rank) & (self.codes >= 0))
            step = steps.place(rank, activities["start"][here])
            here, step = here[step >= 0], step[step >= 0]
            np.add.at(found[:, :, rank], (self.codes[here], step), activities["own"][here] / 1e9)
        return found


def label(timeline: Timeline) -> Labels:
    """Return the labels of all activities."""
    activities = timeline.activities
    main, kinds = activities["lane"] == 0, activities["kind"]
    inside = main & np.isin(kinds, (Kind.CALL, Kind.WAIT))
    layers = main & np.isin(kinds, (Kind.FORWARD, Kind.BACKWARD))
    phases = main & (kinds == Kind.PHASE) & (activities["name"] != timeline.name_id("epoch"))
    owner = timeline.ancestor(layers)
    owner = np.where(owner >= 0, owner, timeline.ancestor(phases))
    keys = np.where(owner >= 0, kinds[owner].astype("i8") << 32 | activities["name"][owner], -1)
    keys = np.where(timeline.ancestor(inside) >= 0, -2, keys)
    found, codes = np.unique(keys, return_inverse=True)
    table = [COMMUNICATION]
    positions = np.zeros(len(found), "i8")  # of -2: communication
    for i, key in enumerate(found.tolist()):
        if key >= 0:
            positions[i] = len(table)
            table.append((Kind(key >> 32), timeline.names[key & 0xFFFFFFFF]))
        elif key == -1:
            positions[i] = -1
    return Labels(table, positions[codes.reshape(-1)])


def describe_label(kind: Kind, name: str) -> str:
    """Return a label in words, such as "layer conv1 (forward)" or "callback TensorBoard"."""
    if kind in (Kind.FORWARD, Kind.BACKWARD):
        return f"layer {name} ({kind.name.lower()})"
    plain = (kind, name) == COMMUNICATION or name.startswith("callback ")
    return name if plain else f'phase "{name}"'


def beyond_others(seconds: np.ndarray) -> np.ndarray:
    """Return how much each rank needs beyond the median of the other ranks.

    Parameters
    ----------
    seconds : ndarray of float, shape ``(..., ranks)``

    Returns
    -------
    ndarray of float, the same shape
        0 with one rank.
    """
    size = seconds.shape[-1]
    if size == 1:
        return np.zeros_like(seconds)
    others = [np.median(np.delete(seconds, rank, axis=-1), axis=-1) for rank in range(size)]
    return seconds - np.stack(others, axis=-1)
