"""What a scheme can be told: where one's own file finds `option`."""

from pydtnn.utils.option import option

__all__ = ["option"]
