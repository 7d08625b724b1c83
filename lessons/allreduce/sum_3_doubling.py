"""3 Recursive doubling: all ranks add, so that nothing has to come back.

In round k rank r and rank r ^ 2^k exchange their sums, and both add (lesson 05). The broadcast is
gone: log2 P rounds instead of 2 log2 P, since links carry an array in each direction at a time.
Seconds: ``log2 P (a + n / b + n g)``. It is the fastest of all for short arrays. For long ones all
ranks repeat the same additions, and in the last round all P arrays cross the middle of the network
at once, where the described one is narrow.
"""

import numpy as np
from network import add


def folded(exchanges):
    """Return an allreduce for any number of ranks from one for a power of two, `exchanges`.

    Ranks beyond the largest power of two, q, give their arrays to the ranks q before them.
    """

    def allreduce(comm, array):
        q = 1 << (comm.size.bit_length() - 1)
        if comm.rank >= q:
            comm.send(array, comm.rank - q)
            comm.recv(array, comm.rank - q)
            return
        has_partner = comm.rank + q < comm.size
        if has_partner:
            received = np.empty_like(array)
            comm.recv(received, comm.rank + q)
            add(array, received)
        exchanges(comm, array, q)
        if has_partner:
            comm.send(array, comm.rank + q)

    return allreduce


def doubling(comm, array, q):
    """Sum an array (n,) over the first q ranks."""
    received, bit = np.empty_like(array), 1
    while bit < q:
        comm.exchange([(array, comm.rank ^ bit)], [(received, comm.rank ^ bit)]).wait()
        add(array, received)
        bit *= 2


allreduce = folded(doubling)
