"""Networks as ONNX files, written for inference and read into layers."""

from pydtnn.tools.interchange.onnx.exporting import export_onnx
from pydtnn.tools.interchange.onnx.importing import import_onnx

__all__ = ["export_onnx", "import_onnx"]
