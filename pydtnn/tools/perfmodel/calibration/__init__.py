"""Calibration: the figures of a platform, measured on the ranks of a job."""

from pydtnn.tools.perfmodel.calibration.calibrate import Calibration, calibrate

__all__ = ["Calibration", "calibrate"]
