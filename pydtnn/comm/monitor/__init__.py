"""The monitor process of a host: what each rank is doing, and who is late.

It runs without NumPy and MPI (`pydtnn.comm.watchdog`), so these files import the standard library,
each other and `pydtnn.utils.observer` only.
"""
