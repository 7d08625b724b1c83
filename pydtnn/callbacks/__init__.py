"""Callbacks, which observe and control training."""

from typing import TYPE_CHECKING, Any

from pydtnn.utils.lazy import lazy

FROM_TOOLS = {
    "MLflow": "trackers",
    "MeasurementWriter": "measurements",
    "Teacher": "distillation",
    "TensorBoard": "trackers",
    "WandB": "trackers",
}
"""Tools by the names of their callbacks."""

if TYPE_CHECKING:
    from pydtnn.callbacks.average import EMA, ExponentialMovingAverage
    from pydtnn.callbacks.checkpointing import Checkpointer
    from pydtnn.callbacks.history import HistoryWriter
    from pydtnn.callbacks.mirrored import MirroredEvaluation
    from pydtnn.callbacks.monitor import Monitor
    from pydtnn.callbacks.plateau import ReduceOnPlateau
    from pydtnn.callbacks.slow_ranks import SlowRanks
    from pydtnn.callbacks.stopping import BestWeights, EarlyStopping, StopAtMetric
    from pydtnn.training.callback import Callback, FunctionCallback
    from pydtnn.training.equality import CheckEqual
    from pydtnn.training.progress import ProgressBar

    MLflow: Any
    MeasurementWriter: Any
    Teacher: Any
    TensorBoard: Any
    WandB: Any

__all__ = [
    "EMA",
    "BestWeights",
    "Callback",
    "CheckEqual",
    "Checkpointer",
    "EarlyStopping",
    "ExponentialMovingAverage",
    "FunctionCallback",
    "HistoryWriter",
    "MirroredEvaluation",
    "Monitor",
    "ProgressBar",
    "ReduceOnPlateau",
    "SlowRanks",
    "StopAtMetric",
]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = lazy(__name__, FROM_TOOLS)
