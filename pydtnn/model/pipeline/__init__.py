"""Pipeline schedules as data: generated, verified and drawn without communication."""

from typing import TYPE_CHECKING

from pydtnn.utils.lazy import lazy

if TYPE_CHECKING:
    from pydtnn.model.pipeline.check import Timetable, check
    from pydtnn.model.pipeline.schedules import (
        PIPELINE_SCHEDULES,
        Action,
        PipelineError,
        Schedule,
        actions_of,
        backward,
        backward_inputs,
        backward_parameters,
        bubble,
        eager_one_forward_one_backward,
        find,
        forward,
        gpipe,
        interleaved,
        one_forward_one_backward,
        placement,
        zb_2p,
        zb_h1,
        zb_v,
    )

__all__ = [
    "PIPELINE_SCHEDULES",
    "Action",
    "PipelineError",
    "Schedule",
    "Timetable",
    "actions_of",
    "backward",
    "backward_inputs",
    "backward_parameters",
    "bubble",
    "check",
    "eager_one_forward_one_backward",
    "find",
    "forward",
    "gpipe",
    "interleaved",
    "one_forward_one_backward",
    "placement",
    "zb_2p",
    "zb_h1",
    "zb_v",
]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = lazy(__name__)
