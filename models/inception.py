"""Inception v3."""

from __future__ import annotations

from functools import partial

from pydtnn.layers import (
    AvgPool2d,
    Block,
    Branches,
    Concat,
    Dropout,
    Flatten,
    GlobalAvgPool2d,
    Linear,
    MaxPool2d,
    Net,
    Sequential,
)
from pydtnn.models.auxiliary import Heads
from pydtnn.models.images import image_size
from pydtnn.models.units import unit


def inception_v3(
    classes: int, input_shape: tuple[int, ...], *, dropout: float = 0.5, auxiliary: bool = False
) -> Block:
    """Blocks of parallel convolutions, some of them 1 x n and n x 1.

    Parameters
    ----------
    classes : int
    input_shape : tuple of int
        Images ``(H, W, C)`` of at least 75 x 75, with the auxiliary output 299 x 299, as in the
        paper.
    dropout : float
        Rate before the output.
    auxiliary : bool
        Whether there is a second output, which reads the last block with 7 x 1 convolutions and is
        used in training only: ``Trainer(..., auxiliary_weights=[0.4])``.

    Returns
    -------
    Block
        Gives logits ``(N, classes)``, or two such arrays, the first of which is the main output.

    Raises
    ------
    ValueError
        If an image is too small.

    References
    ----------
    Szegedy, Vanhoucke, Ioffe, Shlens, Wojna, Rethinking the Inception architecture for computer
    vision, 2016, table 1 and figures 5 to 8; the widths are those of the authors' implementation.
    """
    image_size("inception_v3", input_shape, at_least=299 if auxiliary else 75)
    stem = Sequential(
        _conv(32, 3, stride=2, name="conv1"),
        _conv(32, 3, name="conv2"),
        _conv(64, 3, padding=1, name="conv3"),
        MaxPool2d(3, stride=2, name="pool1"),
        _conv(80, 1, name="conv4"),
        _conv(192, 3, name="conv5"),
        MaxPool2d(3, stride=2, name="pool2"),
        name="stem",
    )
    parts: list[Net] = [
        stem,
        *(_square(width, f"square{i}") for i, width in enumerate((32, 64, 64))),
        _reduce_square("reduce0"),
        *(_row_column(width, f"row{i}") for i, width in enumerate((128, 160, 160, 192))),
        _reduce_row("reduce1"),
        *(_wide(f"wide{i}") for i in range(2)),
        GlobalAvgPool2d(name="pool"),
        Flatten(name="flatten"),
        Dropout(dropout, name="dropout"),
        Linear(classes, name="fc"),
    ]
    return Heads(*parts, heads={"row3": _auxiliary(classes)}) if auxiliary else Sequential(*parts)


_conv = partial(unit, epsilon=1e-3)


def _auxiliary(classes: int) -> Sequential:
    """Figure 8."""
    return Sequential(
        AvgPool2d(5, stride=3, name="pool1"),
        _conv(128, 1, name="conv1"),
        _conv(768, 5, name="conv2"),
        GlobalAvgPool2d(name="pool2"),
        Linear(classes, name="fc"),
        name="auxiliary",
    )


def _pooled(filters: int) -> Sequential:
    return Sequential(AvgPool2d(3, stride=1, padding=1), _conv(filters, 1))


def _together(*parts: Net, name: str | None = None) -> Branches:
    return Branches(*parts, merge=Concat(), name=name)


def _square(width: int, name: str) -> Branches:
    """Figure 5."""
    return _together(
        _conv(64, 1),
        Sequential(_conv(48, 1), _conv(64, 5, padding=2)),
        Sequential(_conv(64, 1), _conv(96, 3, padding=1), _conv(96, 3, padding=1)),
        _pooled(width),
        name=name,
    )


def _reduce_square(name: str) -> Branches:
    return _together(
        _conv(384, 3, stride=2),
        Sequential(_conv(64, 1), _conv(96, 3, padding=1), _conv(96, 3, stride=2)),
        MaxPool2d(3, stride=2),
        name=name,
    )


def _row(filters: int) -> Sequential:
    return _conv(filters, (1, 7), padding=(0, 3))


def _column(filters: int) -> Sequential:
    return _conv(filters, (7, 1), padding=(3, 0))


def _row_column(width: int, name: str) -> Branches:
    """Figure 6 with n = 7."""
    return _together(
        _conv(192, 1),
        Sequential(_conv(width, 1), _row(width), _column(192)),
        Sequential(_conv(width, 1), _column(width), _row(width), _column(width), _row(192)),
        _pooled(192),
        name=name,
    )


def _reduce_row(name: str) -> Branches:
    return _together(
        Sequential(_conv(192, 1), _conv(320, 3, stride=2)),
        Sequential(_conv(192, 1), _row(192), _column(192), _conv(192, 3, stride=2)),
        MaxPool2d(3, stride=2),
        name=name,
    )


def _wide(name: str) -> Branches:
    """Figure 7."""

    def both() -> Branches:
        return _together(_conv(384, (1, 3), padding=(0, 1)), _conv(384, (3, 1), padding=(1, 0)))

    return _together(
        _conv(320, 1),
        Sequential(_conv(384, 1), both()),
        Sequential(_conv(448, 1), _conv(384, 3, padding=1), both()),
        _pooled(192),
        name=name,
    )
