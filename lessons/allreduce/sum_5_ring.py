"""5 Ring: every message goes to the next rank.

The array is cut into P chunks, which travel around the ring: P - 1 rounds in which they are added,
P - 1 in which the complete ones are passed on (lesson 04). Each rank sends the bytes of step 4, but
to its neighbour only: wherever the network is cut in two, one message crosses it at a time in each
direction, and no two messages share a link. Seconds: ``2 (P - 1) (a + n / (P b)) + (P - 1) / P n
g``, on any network in whose order ranks are numbered, and for any P. What is lost: a latency in
each of many rounds, and the card is idle while the processor adds.

The sum is a generator that yields its message while this is under way, which the next steps need.
"""

import numpy as np
from network import add


def ring(comm, array, tag=0):
    """Sum an array (n,) over all ranks in place; yield each round's message.

    The tag tells messages of several rings apart.
    """
    chunks = np.array_split(array, comm.size)  # P views of n / P
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for i in range(2 * comm.size - 2):
        sent = chunks[(comm.rank - i) % comm.size]
        target = chunks[(comm.rank - i - 1) % comm.size]
        received = np.empty_like(target)
        sending, receiving = comm.isend(sent, right, tag), comm.irecv(received, left, tag)
        yield receiving
        receiving.wait()
        if i < comm.size - 1:
            add(target, received)
        else:
            target[:] = received
        sending.wait()


def allreduce(comm, array):
    """Sum an array (n,) over all ranks in place."""
    for _ in ring(comm, array):
        pass
