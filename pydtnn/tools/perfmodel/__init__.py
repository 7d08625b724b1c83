"""The performance model: how long a network's training takes on a platform, and why."""

from typing import TYPE_CHECKING

from pydtnn.utils.lazy import lazy

if TYPE_CHECKING:
    from pydtnn.tools.perfmodel.compute import ComputeCosts, Label
    from pydtnn.tools.perfmodel.platform import Platform
    from pydtnn.tools.perfmodel.prediction import Prediction
    from pydtnn.tools.perfmodel.virtual.steps import predict
    from pydtnn.training.workload import Workload

__all__ = ["ComputeCosts", "Label", "Platform", "Prediction", "Workload", "predict"]

if not TYPE_CHECKING:
    __getattr__ = lazy(__name__)
