"""What each rank has of the state of training: arrays as pieces of whole ones, and other values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pydtnn.model import Model
from pydtnn.model.pieces import Piece, Region, full_piece, part_piece, range_pieces
from pydtnn.optimizers import Optimizer
from pydtnn.training.callback import Training
from pydtnn.training.checkpoint.content import State, Stateful, parts_of, split


@dataclass(frozen=True)
class LocalState:
    """The state of one object on this rank.

    Attributes
    ----------
    pieces : list of Piece
        Its arrays. Of the model and of the optimizer these are views of those that training uses.
    values : dict
        Its other values, which JSON can represent.
    shapes : list of tuple of int, optional
        Shapes of this rank's arrays, if they are not those of the pieces.
    partial : bool
        Whether an array belongs to a part of a parameter without having its shape, such as a factor
        of a compressed gradient, so that it cannot be combined with those of other ranks.
    """

    pieces: list[Piece]
    values: State
    shapes: list[tuple[int, ...]] | None = None
    partial: bool = False

    @property
    def regions(self) -> list[tuple[Region, tuple[int, ...]]]:
        """The regions of the pieces, and the shapes of this rank's arrays."""
        regions = [piece.region for piece in self.pieces]
        return [*zip(regions, self.shapes or [r.lengths for r in regions], strict=True)]


def local_states(trainer: Training) -> dict[str, LocalState]:
    """Return the state of each part that has one, by name.

    Collective: all ranks call it between two steps.
    """
    own = {name: _local_state(part, trainer.model) for name, part in parts_of(trainer).items()}
    return {name: state for name, state in own.items() if state.pieces or state.values}


def _local_state(part: Stateful, model: Model) -> LocalState:
    pieces = pieces_in_place(part, model)
    if pieces is None:
        return _copied(part, model)
    if isinstance(part, Optimizer):
        return LocalState(pieces, {"iterations": part.iterations, "lr_factor": part.lr_factor})
    return LocalState(pieces, {})


def pieces_in_place(part: Stateful, model: Model) -> list[Piece] | None:
    """Return views of all arrays of a part; None if its state is known as copies only.

    The values of such pieces can be read and replaced at any time, without memory for a copy.
    """
    if isinstance(part, Model):
        return part.pieces()
    if isinstance(part, Optimizer) and _is_plain(part):
        return [*optimizer_pieces(part, model)]
    return None


def optimizer_pieces(optimizer: Optimizer, model: Model) -> Iterator[Piece]:
    """Yield this rank's elements of the state of an optimizer, of all parameters of a model."""
    for slot, entry, start, values in optimizer.stored():
        p, name = model.parameters[entry.name], f"{slot}/{entry.name}"
        form = optimizer.slot_form(slot, entry)
        if form != (entry.shape, None) or entry.shape != p.shape:  # or whole, where p is a part
            yield full_piece(name, values.reshape(form[0]))
            continue
        place = part_piece(name, p.master, p.part, p.position)
        yield from range_pieces(place, start, start + len(values), values)


def _copied(part: Stateful, model: Model) -> LocalState:
    """Return the state of a part that has no pieces in place."""
    arrays, values = split(part.state())
    whole = model.whole if arrays else None
    kept = {name for name, array in arrays.items() if whole and not whole.fits(name, array)}
    pieces = [
        full_piece(name, np.ascontiguousarray(array).reshape(array.shape))
        if whole is None or name in kept
        else whole.piece(name, array)
        for name, array in arrays.items()
    ]
    return LocalState(pieces, values, [array.shape for array in arrays.values()], bool(kept))


def _is_plain(optimizer: Optimizer) -> bool:
    """Return whether the rule has no state besides its slots."""
    kind: Any = type(optimizer)
    return kind.state is Optimizer.state and kind.load is Optimizer.load
