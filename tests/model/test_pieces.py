"""Pieces of arrays."""

from __future__ import annotations

from math import prod

import numpy as np

from pydtnn.layers.parameters import Cut, ParameterPart
from pydtnn.model.pieces import boxes, full_piece, part_piece, range_pieces
from tests.each import each

PARTS = {
    "rows": ParameterPart((7, 3), (Cut(0, "a", (0, 2, 7)),)),
    "columns": ParameterPart((3, 5), (Cut(1, "a", (0, 3, 5)),)),
    "filters": ParameterPart((5, 3, 3, 4), (Cut(0, "a", (0, 1, 5)), Cut(3, "b", (0, 2, 4)))),
    "blocks": ParameterPart((4, 12), (Cut(1, "a", (0, 1, 3), blocks=4),)),
    "blocks of rows": ParameterPart((12, 2), (Cut(0, "a", (0, 1, 3), blocks=4),)),
    "blocks of a vector": ParameterPart((12,), (Cut(0, "a", (0, 1, 3), blocks=4),)),
    "the middle": ParameterPart((2, 6, 5), (Cut(1, "a", (0, 4, 6)),)),
}


def places(part: ParameterPart) -> list[dict[str, int]]:
    axes = [cut.axis for cut in part.cuts]
    return [dict(zip(axes, place, strict=True)) for place in np.ndindex((2,) * len(axes))]


@each("shape", [(12,), (3, 4), (2, 3, 2), (1, 1, 7), (5, 1)])
def test_boxes_contain_a_range_in_order(shape):
    whole = np.arange(prod(shape)).reshape(shape)
    for start in range(whole.size + 1):
        for stop in range(start, whole.size + 1):
            found = [whole[box].reshape(-1) for box in boxes(shape, start, stop)]
            values = np.concatenate([np.empty(0, int), *found])
            np.testing.assert_array_equal(values, np.arange(start, stop))


@each("part", PARTS.values())
@each("length", [1, 4, 1000])
def test_parts_give_and_take_the_whole_array_block_by_block(part, length):
    whole = np.arange(prod(part.shape), dtype=float).reshape(part.shape)
    pieces = [part_piece("w", part.take(whole, place), part, place) for place in places(part)]
    result = np.full(whole.size, -1.0)
    for start in range(0, whole.size, length):
        stop = min(start + length, whole.size)
        for piece in pieces:
            piece.give(start, stop, result[start:stop])
            if (view := piece.view(start, stop)) is not None:
                np.testing.assert_array_equal(view.view(float), whole.flat[start:stop])
        assert sum(piece.region.elements(start, stop) for piece in pieces) == stop - start
    np.testing.assert_array_equal(result.reshape(whole.shape), whole)
    for place in places(part):
        own = np.full(part.local_shape(place), -1.0)
        piece = part_piece("w", own, part, place)
        for start in range(0, whole.size, length):
            piece.take(start, stop := min(start + length, whole.size), result[start:stop])
        np.testing.assert_array_equal(own, part.take(whole, place))


@each("part", PARTS.values())
def test_ranges_of_a_part_are_pieces_of_the_whole_array(part):
    """As of an optimizer's state, of which each rank has a range of each part."""
    whole = np.arange(prod(part.shape), dtype=float).reshape(part.shape)
    for place in places(part):
        own = part.take(whole, place)
        result = np.full(whole.size, -1.0)
        for start, stop in ((0, 2), (2, own.size // 2 + 1), (own.size // 2 + 1, own.size)):
            flat = own.reshape(-1)[start:stop]
            for piece in range_pieces(part_piece("w", own, part, place), start, stop, flat):
                piece.give(0, whole.size, result)
        np.testing.assert_array_equal(part.take(result.reshape(whole.shape), place), own)
        assert (result >= 0).sum() == own.size


def test_a_piece_is_a_view_of_any_shape():
    for shape in ((), (3,), (2, 0), (2, 3)):
        array = np.zeros(shape)
        piece = full_piece("x", array)
        piece.take(0, array.size, np.ones(array.size))
        assert (array == 1).all()
        assert piece.region.shape == shape
