"""Checkpoints: everything that changes in training, through one protocol of state.

A checkpoint is a folder ``checkpoint-<step>``, renamed into place once, with
``arrays.safetensors``, ``state.json`` and their checksums. It does not say how it came about: it
holds no number of ranks, time or path, and its arrays have the parameters' names and shapes,
whatever the buckets.
"""

from pydtnn.training.checkpoint.content import Stateful
from pydtnn.training.checkpoint.folder import find_checkpoints, tidy
from pydtnn.training.checkpoint.loading import load_checkpoint
from pydtnn.training.checkpoint.saving import save_checkpoint

__all__ = ["Stateful", "find_checkpoints", "load_checkpoint", "save_checkpoint", "tidy"]
