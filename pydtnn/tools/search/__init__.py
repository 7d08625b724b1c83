"""Hyper-parameter search over the ranks of a job: ``python -m pydtnn search --help``."""

from pydtnn.tools.search.search import run
from pydtnn.tools.search.space import Space, make_space, read_space
from pydtnn.tools.search.worker import Trial

__all__ = ["Space", "Trial", "make_space", "read_space", "run"]
