"""Weights and networks of other programs: modules and state dicts of PyTorch, ONNX, Keras.

>>> from pydtnn import Model
>>> from pydtnn.layers import Linear
>>> {name: array.shape for name, array in state_dict(Model(Linear(3), (4,))).items()}
{'linear.weight': (3, 4), 'linear.bias': (3,)}
"""

from pydtnn.tools.interchange.files import is_state_dict
from pydtnn.tools.interchange.keras import load_keras_weights
from pydtnn.tools.interchange.matching import Misfit, StateDictReport
from pydtnn.tools.interchange.onnx import export_onnx, import_onnx
from pydtnn.tools.interchange.state_dicts import load_state_dict, save_state_dict, state_dict
from pydtnn.tools.interchange.torch_modules import from_torch, to_torch

__all__ = [
    "Misfit",
    "StateDictReport",
    "export_onnx",
    "from_torch",
    "import_onnx",
    "is_state_dict",
    "load_keras_weights",
    "load_state_dict",
    "save_state_dict",
    "state_dict",
    "to_torch",
]
