"""A network on a device: its graph, forward and backward loops, fusion, and memory estimates."""

from typing import TYPE_CHECKING

from pydtnn.utils.lazy import lazy

if TYPE_CHECKING:
    from pydtnn.model.model import Model

__all__ = ["Model"]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = lazy(__name__)
