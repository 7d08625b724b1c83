"""Weights and networks of other programs: state dicts of PyTorch, ONNX, Keras.

>>> from pydtnn import Model
>>> from pydtnn.layers import Linear
>>> {name: array.shape for name, array in state_dict(Model(Linear(3), (4,))).items()}
{'linear.weight': (3, 4), 'linear.bias': (3,)}
"""

from pydtnn.interchange.keras import load_keras_weights
from pydtnn.interchange.matching import Misfit, StateDictReport
from pydtnn.interchange.onnx import export_onnx, import_onnx
from pydtnn.interchange.state_dicts import load_state_dict, save_state_dict, state_dict

__all__ = [
    "Misfit",
    "StateDictReport",
    "export_onnx",
    "import_onnx",
    "load_keras_weights",
    "load_state_dict",
    "save_state_dict",
    "state_dict",
]
