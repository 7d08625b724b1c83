"""Records of what each rank does, and their files."""

from typing import TYPE_CHECKING

from pydtnn.utils.lazy import lazy

if TYPE_CHECKING:
    from pydtnn.training.tracing.recorder import Recorder
    from pydtnn.training.tracing.writing import Trace, check_folder

__all__ = ["Recorder", "Trace", "check_folder"]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = lazy(__name__)
