"""Virtual ranks: the unchanged program on threads whose clocks show the time on a platform."""

from pydtnn.perfmodel.engine.cores import SharedCores
from pydtnn.perfmodel.engine.processor import Processor
from pydtnn.perfmodel.virtual.run import VirtualRun, run_virtual

__all__ = ["Processor", "SharedCores", "VirtualRun", "run_virtual"]
