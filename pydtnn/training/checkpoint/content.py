"""The content of a checkpoint, and its conversion to two files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from pydtnn import __version__
from pydtnn.saving.weights import decode, encode
from pydtnn.training.callback import Training
from pydtnn.training.checkpoint.folder import ARRAYS, STATE
from pydtnn.training.checkpoint.structure import FORMAT, check_states, read_content

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


def pack(parts: Parts, about: Mapping[str, Any]) -> dict[str, bytes]:
    """Convert the parts to the contents of a checkpoint's files.

    Parameters
    ----------
    parts : dict of str to list of dict
    about : mapping
        Additional content of `state.json`.
    """
    arrays: dict[str, np.ndarray] = {}
    entries: dict[str, list[State]] = {}
    for name, states in parts.items():
        entries[name] = []
        for rank, state in enumerate(states):
            own, values = split(state)
            prefix = _prefix(name, rank, len(states))
            arrays |= {prefix + key: array for key, array in own.items()}
            entries[name].append({"values": values, "arrays": list(own)})
    content = {"format": FORMAT, "pydtnn": __version__, **about, "parts": entries}
    return {ARRAYS: encode(arrays), STATE: _to_json(content)}


def unpack(files: Mapping[str, bytes]) -> Parts:
    """Convert the contents of a checkpoint's files to the parts.

    Raises
    ------
    ValueError
        If they were written by another version of pydtnn, or parts or arrays are missing or have
        another type.
    """
    arrays = decode(files[ARRAYS])
    parts: Parts = {}
    for name, entries in read_content(files[STATE])["parts"].items():
        parts[name] = []
        for rank, entry in enumerate(entries):
            prefix = _prefix(name, rank, len(entries))
            parts[name].append(_take(arrays, prefix, entry["arrays"]) | entry["values"])
    if arrays:
        raise ValueError(f"{ARRAYS} contains an array that belongs to no part, {min(arrays)}")
    check_states(parts)
    return parts


def _take(arrays: dict[str, np.ndarray], prefix: str, names: Sequence[str]) -> State:
    """Remove and return the arrays of one state."""
    for name in names:
        if prefix + name not in arrays:
            raise ValueError(f"{ARRAYS} does not contain the array {prefix}{name}")
    return {name: arrays.pop(prefix + name) for name in dict.fromkeys(names)}


def checksum(state: State) -> bytes:
    """Return a checksum of a state, to compare it between ranks."""
    arrays, values = split(state)
    return hashlib.sha256(encode(arrays) + _to_json(values)).digest()


def split(state: State) -> tuple[dict[str, np.ndarray], State]:
    """Separate the arrays of a state from its other values."""
    arrays = {name: value for name, value in state.items() if isinstance(value, np.ndarray)}
    return arrays, {name: value for name, value in state.items() if name not in arrays}


def _prefix(name: str, rank: int, states: int) -> str:
    """Return the prefix of the names of a part's arrays."""
    return f"{name}/" if states == 1 else f"{name}/rank{rank}/"


def _to_json(content: State) -> bytes:
    # Keys keep their order, which is that of the columns of a table of logs. Finite floats are
    # restored exactly; NaN and infinities are written in Python's notation, as only Python reads
    # them.
    return (json.dumps(content, indent=1, default=_plain) + "\n").encode()


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    kind = type(value).__name__
    raise TypeError(f"state: values must be arrays or values that JSON can represent, got {kind}")
