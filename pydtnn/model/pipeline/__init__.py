"""Pipeline schedules as data: generated, verified and drawn without communication."""

from typing import TYPE_CHECKING

from pydtnn.utils.lazy import homes, lazy

if TYPE_CHECKING:
    from pydtnn.model.pipeline.check import Timetable as Timetable
    from pydtnn.model.pipeline.check import check as check
    from pydtnn.model.pipeline.check import steady_bubble as steady_bubble
    from pydtnn.model.pipeline.schedules import PIPELINE_SCHEDULES as PIPELINE_SCHEDULES
    from pydtnn.model.pipeline.schedules import Action as Action
    from pydtnn.model.pipeline.schedules import PipelineError as PipelineError
    from pydtnn.model.pipeline.schedules import Schedule as Schedule
    from pydtnn.model.pipeline.schedules import actions_of as actions_of
    from pydtnn.model.pipeline.schedules import backward as backward
    from pydtnn.model.pipeline.schedules import backward_inputs as backward_inputs
    from pydtnn.model.pipeline.schedules import backward_parameters as backward_parameters
    from pydtnn.model.pipeline.schedules import chimera as chimera
    from pydtnn.model.pipeline.schedules import dualpipe as dualpipe
    from pydtnn.model.pipeline.schedules import (
        eager_one_forward_one_backward as eager_one_forward_one_backward,
    )
    from pydtnn.model.pipeline.schedules import find as find
    from pydtnn.model.pipeline.schedules import forward as forward
    from pydtnn.model.pipeline.schedules import gpipe as gpipe
    from pydtnn.model.pipeline.schedules import interleaved as interleaved
    from pydtnn.model.pipeline.schedules import is_possible as is_possible
    from pydtnn.model.pipeline.schedules import one_forward_one_backward as one_forward_one_backward
    from pydtnn.model.pipeline.schedules import pipedream_2bw as pipedream_2bw
    from pydtnn.model.pipeline.schedules import placement as placement
    from pydtnn.model.pipeline.schedules import zb_2p as zb_2p
    from pydtnn.model.pipeline.schedules import zb_h1 as zb_h1
    from pydtnn.model.pipeline.schedules import zb_v as zb_v

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = lazy(__name__)
    __all__ = [*homes(__name__)]
