"""Traces of training: ``python -m pydtnn trace --help`` exports, summarises and compares."""

from __future__ import annotations

import sys

from pydtnn.tools.tracing.command import create_parser, main

__all__ = ["create_parser", "main"]

if __name__ == "__main__":
    sys.exit(main())
