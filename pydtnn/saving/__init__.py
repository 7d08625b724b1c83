"""Trained models in folders that contain all that predicting requires, but no code.

>>> import tempfile
>>> from pydtnn import Model
>>> from pydtnn.layers import Linear
>>> from pydtnn.saving import load, save_model
>>> model = Model(Linear(3), (4,))
>>> with tempfile.TemporaryDirectory() as folder:
...     save_model(model, f"{folder}/linear.pydtnn")
...     load(f"{folder}/linear.pydtnn").output_shape
(3,)
"""

from typing import TYPE_CHECKING

from pydtnn.utils.lazy import lazy

if TYPE_CHECKING:
    from pydtnn.saving.folder import check_replaceable
    from pydtnn.saving.models import check_saveable, load, save_model

__all__ = ["check_replaceable", "check_saveable", "load", "save_model"]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = lazy(__name__)
