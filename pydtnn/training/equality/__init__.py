"""The check that ranks which must have the same parameters and state have the same bytes."""

from pydtnn.training.equality.check import CheckEqual, create_check

__all__ = ["CheckEqual", "create_check"]
