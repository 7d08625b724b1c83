"""Learning-rate schedules: functions of the step."""

from typing import TYPE_CHECKING

from pydtnn.schedules.curves import (
    Constant,
    Cosine,
    CosineRestarts,
    OneCycle,
    Polynomial,
    Schedule,
    StableDecay,
    Step,
    Triangular,
    WarmUp,
)
from pydtnn.utils.lazy import lazy

if TYPE_CHECKING:
    from pydtnn.schedules.named import SCHEDULES, get_schedule

__all__ = [
    "SCHEDULES",
    "Constant",
    "Cosine",
    "CosineRestarts",
    "OneCycle",
    "Polynomial",
    "Schedule",
    "StableDecay",
    "Step",
    "Triangular",
    "WarmUp",
    "get_schedule",
]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = lazy(__name__)
