"""The command ``pydtnn oracle``."""

from __future__ import annotations

import sys

from pydtnn.tools.perfmodel.oracle.command import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
