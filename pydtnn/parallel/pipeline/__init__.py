"""Pipeline schedules as data: generated, verified and drawn without communication."""

from pydtnn.parallel.pipeline.check import PipelineError, Timeline, check
from pydtnn.parallel.pipeline.schedules import (
    PIPELINE_SCHEDULES,
    Action,
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
    one_forward_one_backward,
    zb_2p,
    zb_h1,
)

__all__ = [
    "PIPELINE_SCHEDULES",
    "Action",
    "PipelineError",
    "Schedule",
    "Timeline",
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
    "one_forward_one_backward",
    "zb_2p",
    "zb_h1",
]
