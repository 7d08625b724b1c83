"""The content of a checkpoint besides arrays, and the objects whose states it contains."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from pydtnn.training.callback import Training, take_over
from pydtnn.utils.files import parse_object

# Validation of the content of checkpoint files, before any state is loaded.
#
# Checksums verify that files have not changed since they were written, but not that they contain a
# checkpoint, as any program can write valid checksums.

FORMAT = 2
"""Format of `state.json`. In 1, all arrays were in one file; others raise an error."""

REQUIRED = ("model", "optimizer", "trainer")
"""Parts of every checkpoint; other parts that are missing keep their initial state."""


MAX_COUNT = 1 << 62
"""Limit of whole numbers, which are stored in arrays of int64 or converted to floats."""


def read_content(state: bytes) -> dict[str, Any]:
    """Return the content of `state.json`, with parts that are lists of states.

    Raises
    ------
    ValueError
        If it is not JSON, or has another format or structure.
    """
    content = parse_object(state, "state.json", 1, FORMAT)
    parts = content.get("parts")
    if not isinstance(parts, dict):
        raise ValueError("its parts must be an object")
    for name, states in parts.items():
        if not isinstance(states, list) or not states or not all(map(_is_state, states)):
            raise ValueError(f"{name} must be a list of states, each with values and arrays")
    for name, (fits, expected) in OPTIONAL.items():
        if name in content and not fits(content[name]):
            raise ValueError(f"{name} must be {expected}")
    if content.get("local") and "mesh" not in content:
        raise ValueError("it does not contain the mesh of the ranks")
    for name in REQUIRED:
        if name not in parts:
            raise ValueError(f"it does not contain the part {name!r}")
    return content


def check_states(parts: Mapping[str, list[dict[str, Any]]]) -> None:
    """Raise ValueError if states of the required parts have values of another type.

    Arrays need not have values: those of the model are checked when they are read.

    Raises
    ------
    ValueError
        The message contains the part and the value.
    """
    for name, states in parts.items():
        for state in states:
            for key, (fits, expected) in VALUES.get(name, {}).items():
                if not fits(state.get(key)):
                    raise ValueError(f"{name}: {key} must be {expected}")
            if name == "choices" and not _is_table(state.get("measured", {}), 2):
                raise ValueError(
                    "choices: measured must be names of algorithms by machine, operation and batch"
                )
            if name == "model":
                _check_weights(state)


def _check_weights(state: Mapping[str, Any]) -> None:
    """Raise ValueError if weights are not floating-point numbers."""
    for name, array in state.items():
        if not isinstance(array, np.ndarray) or array.dtype.kind != "f":
            raise ValueError(f"model: {name} must be an array of floating-point numbers")


def _is_state(entry: object) -> bool:
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("values"), dict)
        and isinstance(entry.get("arrays"), list)
        and all(isinstance(name, str) for name in entry["arrays"])
    )


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < MAX_COUNT


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < MAX_COUNT)


def _is_factor(value: Any) -> bool:
    return _is_number(value) and 0 <= value < math.inf


def _is_sums(value: object) -> bool:
    return isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype == np.float64


def _is_history(value: object) -> bool:
    return isinstance(value, list) and all(_is_object(epoch, _is_number) for epoch in value)


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_plan(value: object) -> bool:
    return _is_object(value, _is_count)


def _is_shapes(value: object) -> bool:
    return _is_object(value, lambda shape: isinstance(shape, list) and all(map(_is_count, shape)))


def _is_object(value: object, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(map(fits, value.values()))


def _is_table(value: object, depth: int) -> bool:
    """Return whether this is a nested object that maps integers to names at the innermost level."""
    if depth > 0:
        return _is_object(value, lambda inner: _is_table(inner, depth - 1))
    return (
        isinstance(value, dict)
        and all(re.fullmatch(r"[1-9][0-9]{,17}", key) for key in value)
        and _is_names(list(value.values()))
    )


COUNT = (_is_count, "a whole number from 0, below 2**62")
FACTOR = (_is_factor, "a finite number of at least 0")

VALUES: dict[str, dict[str, tuple[Callable[[Any], bool], str]]] = {
    "optimizer": {"iterations": COUNT, "lr_factor": FACTOR},
    "loss_scale": {"scale": FACTOR, "good": FACTOR},
    "trainer": {
        "epoch": COUNT,
        "step": COUNT,
        "history": (_is_history, "a list of objects with the numbers of an epoch"),
        "metrics": (_is_names, "a list of names"),
        "totals": (_is_sums, "an array of sums"),
        "plan": (_is_plan, "an object with whole numbers"),
        # missing before version 0.2
        "frozen": (lambda value: value is None or _is_names(value), "a list of names"),
    },
}
"""Required values of the states of some parts, and their types."""

OPTIONAL: dict[str, tuple[Callable[[Any], bool], str]] = {
    "step": COUNT,
    "mesh": (_is_plan, "an object with the ranks along each axis"),
    "local": (_is_names, "a list of names"),
    "split": (_is_shapes, "an object with shapes"),
}
"""Content of `state.json` that may be missing: most of it is there if parts have states of every
rank of a mesh, or arrays are in several files."""


State = dict[str, Any]
Parts = dict[str, list[State]]
"""For each part one state, or one of every rank if ranks have different states."""


class Stateful(Protocol):
    """An object with state: choices, model, optimizer, exchange, callbacks and trainer."""

    def state(self) -> State:
        """Return NumPy arrays and JSON values by name.

        Called between any two steps, and before the first. Collective: all ranks call it.
        """

    def load(self, state: Any) -> object:
        """Load the state returned by `state`; ValueError if it does not fit."""


def parts_of(trainer: Training) -> dict[str, Stateful]:
    """Return all objects with state by name; the trainer, with the progress of the others, last."""
    take_over(trainer)
    parts: dict[str, Stateful] = {
        "choices": trainer.model.backend.autotuner,
        "model": trainer.model,
        "optimizer": trainer.optimizer,
        "exchange": trainer.exchange,
    }
    if trainer.loss_scale is not None:
        parts["loss_scale"] = trainer.loss_scale
    for callback in trainer.callbacks:
        kind = type(callback).__name__
        number = 1 + sum(name.rpartition(".")[0] == kind for name in parts)
        parts[f"{kind}.{number}"] = callback
    parts["trainer"] = trainer
    return parts


def split(state: State) -> tuple[dict[str, np.ndarray], State]:
    """Separate the arrays of a state from its other values."""
    arrays = {name: value for name, value in state.items() if isinstance(value, np.ndarray)}
    return arrays, {name: value for name, value in state.items() if name not in arrays}


def prefix_of(name: str, rank: int, states: int) -> str:
    """Return the prefix of the names of a part's arrays."""
    return f"{name}/" if states == 1 else f"{name}/rank{rank}/"


def to_json(content: State) -> bytes:
    """Return values as a file of JSON."""
    # Keys keep their order, which is that of the columns of a table of logs. Finite floats are
    # restored exactly; NaN and infinities are written in Python's notation, as only Python reads
    # them.
    return (json.dumps(content, indent=1, default=_plain) + "\n").encode()


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    kind = type(value).__name__
    raise TypeError(f"state: values must be arrays or values that JSON can represent, got {kind}")
