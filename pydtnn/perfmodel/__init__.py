"""The performance model: how long a network's training takes on a platform, and why."""

from pydtnn.perfmodel.compute import ComputeCosts, Label
from pydtnn.perfmodel.platform import Platform
from pydtnn.perfmodel.prediction import Prediction, predict
from pydtnn.perfmodel.workload import Workload

__all__ = ["ComputeCosts", "Label", "Platform", "Prediction", "Workload", "predict"]
