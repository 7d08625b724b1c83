"""Learning-rate schedules: functions of the step."""

from typing import TYPE_CHECKING

from pydtnn.schedules.curves import (
    Constant,
    Cosine,
    CosineRestarts,
    OneCycle,
    Polynomial,
    Schedule,
    Step,
    Triangular,
    WarmUp,
)
from pydtnn.schedules.named import SCHEDULES, get_schedule
from pydtnn.utils.names import module_getattr

__all__ = [
    "SCHEDULES",
    "Constant",
    "Cosine",
    "CosineRestarts",
    "OneCycle",
    "Polynomial",
    "Schedule",
    "Step",
    "Triangular",
    "WarmUp",
    "get_schedule",
]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = module_getattr(__name__)
