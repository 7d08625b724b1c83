"""What each rank has of the state of training: arrays as pieces of whole ones, and other values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pydtnn.model import Model
from pydtnn.model.pieces import Piece, Region, part_piece, range_pieces, whole_piece
from pydtnn.optimizers import Optimizer
from pydtnn.training.callback import Training
from pydtnn.training.checkpoint.content import State, Stateful, parts_of, split


@dataclass(frozen=True)
class OwnState:
    """The state of one object on this rank.

    Attributes
    ----------
    pieces : list of Piece
        Its arrays; of the model and of the optimizer these are views of those that training uses.
    values : dict
        Its other values, which JSON can represent.
    partial : bool
        Whether an array belongs to a part of a parameter without having its shape, such as a factor
        of a compressed gradient, so that it cannot be combined with those of other ranks.
    shapes : tuple of tuple of int
        Shapes of this rank's arrays, if they are not those of the pieces.
    """

    pieces: list[Piece]
    values: State
    partial: bool = False
    shapes: tuple[tuple[int, ...], ...] = ()

    @property
    def described(self) -> list[tuple[Region, tuple[int, ...]]]:
        """The regions of the pieces, and the shapes of this rank's arrays."""
        shapes = self.shapes or tuple(piece.region.lengths for piece in self.pieces)
        regions = [piece.region for piece in self.pieces]
        return [*zip(regions, shapes, strict=True)]


def state_of_rank(trainer: Training) -> dict[str, OwnState]:
    """Return the state of all parts of a trainer on this rank, those with a state, by name.

    Collective: all ranks call it between two steps.
    """
    own = {name: _of_part(part, trainer.model) for name, part in parts_of(trainer).items()}
    return {name: state for name, state in own.items() if state.pieces or state.values}


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
    for slot, bucket, own, values in optimizer.stored():
        for entry in bucket.parameters:
            start, stop = max(entry.slice.start, own.start), min(entry.slice.stop, own.stop)
            if start >= stop and entry.slice.start < entry.slice.stop:
                continue
            p, first = model.parameters[entry.name], entry.slice.start
            place = part_piece(f"{slot}/{p.name}", p.master, p.part, p.position)
            kept = values[start - own.start : stop - own.start]
            yield from range_pieces(place, start - first, stop - first, kept)


def _of_part(part: Stateful, model: Model) -> OwnState:
    in_place = pieces_in_place(part, model)
    if in_place is not None:
        numbers: State = {}
        if isinstance(part, Optimizer):
            numbers = {"iterations": part.iterations, "lr_factor": part.lr_factor}
        return OwnState(in_place, numbers)
    arrays, values = split(part.state())
    whole = model.whole
    kept = {name for name, array in arrays.items() if not whole.fits(name, array)}
    pieces = [
        whole_piece(name, np.ascontiguousarray(array).reshape(array.shape))
        if name in kept
        else whole.piece(name, array)
        for name, array in arrays.items()
    ]
    shapes = tuple(array.shape for array in arrays.values())
    return OwnState(pieces, values, partial=bool(kept), shapes=shapes)


def _is_plain(optimizer: Optimizer) -> bool:
    """Return whether the rule has no state besides its slots."""
    kind: Any = type(optimizer)
    return kind.state is Optimizer.state and kind.load is Optimizer.load
