"""Traces of training: ``python -m pydtnn.trace --help`` exports, summarises and compares them."""

from __future__ import annotations

import sys

from pydtnn.tracing.command import main

if __name__ == "__main__":
    sys.exit(main())
