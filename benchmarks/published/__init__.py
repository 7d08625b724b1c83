"""Predictions beside measurements that others have published: ``python -m benchmarks.published``.

Each ``*.csv`` file is one source: lines ``# name: value`` are those of all its rows, `reference`,
`place` and `address` among them. ``platforms/*.yaml`` are variants of platforms of the package.
Rows with ``fitted`` yes are those on which the four numbers of a device were fitted (``--fit``), at
most a quarter of its rows; all others are held out.
"""
