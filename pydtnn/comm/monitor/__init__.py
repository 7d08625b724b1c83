"""The watch over a run: what each rank is doing, who is late, and how all ranks end.

A rank has hooks for its errors (`failure`) and signals (`signals`), stores what it does in a slot
of shared memory (`supervision`, `slots`), and synchronises with the others when it ends
(`attendance`). The monitor process of its host (`process`, `monitor`) decides by one table of
states (`state`). It runs without NumPy and MPI, so the other files import the standard library,
each other, and `errors` and `observer` of `pydtnn.utils` only.
"""
