"""The performance model: how long a network's training takes on a platform, and why."""

from typing import TYPE_CHECKING

from pydtnn.utils.names import module_getattr

if TYPE_CHECKING:
    from pydtnn.tools.perfmodel.compute import ComputeCosts, Label
    from pydtnn.tools.perfmodel.platform import Platform
    from pydtnn.tools.perfmodel.prediction import Prediction
    from pydtnn.tools.perfmodel.virtual.steps import predict
    from pydtnn.training.workload import Workload

__all__ = ["ComputeCosts", "Label", "Platform", "Prediction", "Workload", "predict"]

_HOMES = {
    "ComputeCosts": "pydtnn.tools.perfmodel.compute",
    "Label": "pydtnn.tools.perfmodel.compute",
    "Platform": "pydtnn.tools.perfmodel.platform",
    "Prediction": "pydtnn.tools.perfmodel.prediction",
    "Workload": "pydtnn.training.workload",
    "predict": "pydtnn.tools.perfmodel.virtual.steps",
}
"""Modules of the public names; a run imports those that predict it."""

if not TYPE_CHECKING:
    __getattr__ = module_getattr(__name__, _HOMES)
