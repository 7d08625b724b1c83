"""Frameworks compared on one protocol: `python -m benchmarks.evaluation`."""
