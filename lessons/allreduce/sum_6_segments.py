"""6 Segmented ring: several rings at a time, each a round behind the one before.

The array is cut into segments, each with a ring of its own. While the processor adds a chunk of one
segment, chunks of the others travel, and so do the latencies of their messages: the card always has
something to send. Seconds approach ``2 (P - 1) / P n / b``, the bandwidth bound, below which no
allreduce comes. More segments hide more, until there are so many messages that their latencies are
longer than their bytes: with S segments a message has n / (S P) elements.
"""

import numpy as np
from sum_5_ring import ring

SEGMENTS = 4


def allreduce(comm, array):
    """Sum an array (n,) over all ranks in place."""
    segments = np.array_split(array, SEGMENTS)
    rings = [ring(comm, segment, tag) for tag, segment in enumerate(segments)]
    while rings:  # in turn, a round of each
        rings = [segment for segment in rings if next(segment, None)]
