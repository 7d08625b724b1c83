"""Learning-rate schedules: functions of the step."""

from typing import TYPE_CHECKING

from pydtnn.schedules.curves import (
    Constant,
    Cosine,
    OneCycle,
    Polynomial,
    Schedule,
    Step,
    Triangular,
    WarmUp,
)
from pydtnn.schedules.named import SCHEDULES, get_schedule
from pydtnn.utils.foreign_names import suggesting_getattr

__all__ = [
    "SCHEDULES",
    "Constant",
    "Cosine",
    "OneCycle",
    "Polynomial",
    "Schedule",
    "Step",
    "Triangular",
    "WarmUp",
    "get_schedule",
]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = suggesting_getattr(__name__)
