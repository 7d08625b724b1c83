"""Checkpoints of the whole training state, through one protocol.

A checkpoint is a folder ``checkpoint-<step>``, renamed into place once, with files of arrays
(``arrays.safetensors``), ``state.json`` and their checksums. It contains no number of ranks, time
or path, and its arrays have the parameters' names and shapes, independently of ranks, mesh and
buckets: the same state gives the same bytes.
"""

from typing import TYPE_CHECKING

from pydtnn.utils.lazy import lazy

if TYPE_CHECKING:
    from pydtnn.training.checkpoint.content import Stateful
    from pydtnn.training.checkpoint.folder import find_checkpoints, tidy
    from pydtnn.training.checkpoint.loading import load_checkpoint, read_configuration, read_weights
    from pydtnn.training.checkpoint.saving import save_checkpoint

__all__ = [
    "Stateful",
    "find_checkpoints",
    "load_checkpoint",
    "read_configuration",
    "read_weights",
    "save_checkpoint",
    "tidy",
]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = lazy(__name__)
