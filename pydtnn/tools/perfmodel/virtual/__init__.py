"""Virtual ranks: the unchanged program on threads whose clocks show the time on a platform."""

from pydtnn.tools.perfmodel.engine.cores import SharedCores
from pydtnn.tools.perfmodel.engine.processor import Processor
from pydtnn.tools.perfmodel.virtual.run import VirtualRun, run_virtual, sum_seconds

__all__ = ["Processor", "SharedCores", "VirtualRun", "run_virtual", "sum_seconds"]
