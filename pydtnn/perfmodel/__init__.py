"""The performance model: how long a network's training takes on a platform, and why."""

from typing import TYPE_CHECKING

from pydtnn.utils.names import module_getattr

if TYPE_CHECKING:
    from pydtnn.perfmodel.compute import ComputeCosts, Label
    from pydtnn.perfmodel.platform import Platform
    from pydtnn.perfmodel.prediction import Prediction
    from pydtnn.perfmodel.virtual.steps import predict
    from pydtnn.perfmodel.workload import Workload

__all__ = ["ComputeCosts", "Label", "Platform", "Prediction", "Workload", "predict"]

_HOMES = {
    "ComputeCosts": "pydtnn.perfmodel.compute",
    "Label": "pydtnn.perfmodel.compute",
    "Platform": "pydtnn.perfmodel.platform",
    "Prediction": "pydtnn.perfmodel.prediction",
    "Workload": "pydtnn.perfmodel.workload",
    "predict": "pydtnn.perfmodel.virtual.steps",
}
"""Modules of the public names; a run imports those that predict it."""

if not TYPE_CHECKING:
    __getattr__ = module_getattr(__name__, _HOMES)
