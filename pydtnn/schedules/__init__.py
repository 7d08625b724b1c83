"""Learning-rate schedules: functions of the step."""

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
