"""Programs and libraries about training, without which the rest of the library works."""

from __future__ import annotations

from pydtnn.utils.names import module_getattr

__getattr__ = module_getattr(__name__)
