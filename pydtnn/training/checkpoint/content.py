"""What a checkpoint holds, and how it becomes the content of two files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from pydtnn import __version__
from pydtnn.training.callback import Training
from pydtnn.training.checkpoint.folder import ARRAYS, STATE
from pydtnn.training.checkpoint.structure import FORMAT, check_states, read_content
from pydtnn.weights import decode, encode

State = dict[str, Any]
Parts = dict[str, list[State]]
"""For each part one state, or one of every rank where ranks deliberately hold different things."""


class Stateful(Protocol):
    """What a checkpoint can hold: choices, model, optimizer, exchange, callbacks and trainer."""

    def state(self) -> State:
        """Return NumPy arrays by name, and values by name that JSON can tell.

        Called between any two steps, and before the first. Collective: all ranks call it.
        """

    def load(self, state: Any) -> None:
        """Take what `state` returned; ValueError where it does not fit."""


def parts_of(trainer: Training) -> dict[str, Stateful]:
    """Name everything that has state; the trainer, which says how far the rest has come, last."""
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
    """Turn the parts into the contents of a checkpoint's files.

    Parameters
    ----------
    parts : dict of str to list of dict
    about : mapping
        What else `state.json` tells.
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
    """Turn the contents of a checkpoint's files into the parts.

    Raises
    ------
    ValueError
        If they are of another version of pydtnn, parts or arrays are missing, or something is of
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
    """Take the arrays of a state out of those of all."""
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
    """Return what goes before the names of a part's arrays."""
    return f"{name}/" if states == 1 else f"{name}/rank{rank}/"


def _to_json(content: State) -> bytes:
    # Keys stay in their order: that of a log is that of a table's columns. Finite floats come
    # back to the last bit; NaN and infinities are written in Python's way, as only Python needs
    # to read them.
    return (json.dumps(content, indent=1, default=_plain) + "\n").encode()


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    kind = type(value).__name__
    raise TypeError(f"state: values must be arrays or values that JSON can represent, got {kind}")
