"""2 Tree: pairs add, then pairs of pairs.

In round k the ranks whose number is an odd multiple of 2^k send their sums to the rank 2^k before
them and are done; the way back is the same in the opposite order. Several pairs send at a time, on
cards of their own, so that rank 0 receives log2 P arrays instead of P - 1. Seconds: ``2 log2 P (a +
n / b) + log2 P n g``. Still, half of the ranks send a single time, and links are used in one
direction at a time.
"""

import numpy as np
from network import add


def allreduce(comm, array):
    """Sum an array (n,) over all ranks in place."""
    received, distance = np.empty_like(array), 1
    while distance < comm.size and comm.rank % (2 * distance) == 0:
        if comm.rank + distance < comm.size:
            comm.recv(received, comm.rank + distance)
            add(array, received)
        distance *= 2
    if comm.rank:  # its lowest bit is `distance`
        comm.send(array, comm.rank - distance)
        comm.recv(array, comm.rank - distance)
    while distance > 1:
        distance //= 2
        if comm.rank + distance < comm.size:
            comm.send(array, comm.rank + distance)
