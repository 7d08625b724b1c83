"""Training: the trainer, one step, evaluation, checks before the start, and checkpoints."""

from typing import TYPE_CHECKING

from pydtnn.utils.lazy import lazy

if TYPE_CHECKING:
    from pydtnn.training.callback import Callback
    from pydtnn.training.nonfinite import LocalNotFiniteError, NotFiniteError
    from pydtnn.training.trainer import Trainer

__all__ = [
    "Callback",
    "LocalNotFiniteError",
    "NotFiniteError",
    "Trainer",
]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = lazy(__name__)
