"""The check that ranks which must have the same parameters and state have the same bytes."""

from pydtnn.training.equality.check import CheckEqual, compare_ranks, create_check, with_check

__all__ = ["CheckEqual", "compare_ranks", "create_check", "with_check"]
