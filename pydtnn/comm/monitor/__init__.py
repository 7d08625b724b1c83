"""The monitor process of a host: what each rank is doing, and who is late.

It runs without NumPy and MPI (`pydtnn.comm.monitor.process`), so these files import the
standard library, each other, and `errors` and `observer` of `pydtnn.utils` only.
"""
