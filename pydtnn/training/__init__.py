"""Training: the trainer, one step, evaluation, checks before the start, and checkpoints."""

from pydtnn.training.callback import Callback
from pydtnn.training.nonfinite import LocalNotFiniteError, NotFiniteError
from pydtnn.training.rate_search import LearningRates, find_learning_rate
from pydtnn.training.trainer import Trainer

__all__ = [
    "Callback",
    "LearningRates",
    "LocalNotFiniteError",
    "NotFiniteError",
    "Trainer",
    "find_learning_rate",
]
