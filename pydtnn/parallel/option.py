"""Options of schemes; import location of `option` for custom schemes."""

from pydtnn.utils.option import option

__all__ = ["option"]
