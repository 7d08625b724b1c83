"""4 Recursive halving and doubling: no addition is made twice.

Two ranks that exchange arrays as in step 3 both add all n elements. Here each adds one half, sends
only the other, and goes on with its half: n / 2 elements in the first round, then n / 4, ... After
log2 P rounds each rank has 1 / P of the complete sum, and the same exchanges backwards collect the
parts (Rabenseifner, "Optimization of collective reduction operations", 2004). Seconds: ``2 log2 P a
+ 2 (P - 1) / P n / b + (P - 1) / P n g``. For long arrays these are the fewest bytes, but the first
and largest exchange is the one with the most distant rank, and crosses the narrow middle.
"""

import numpy as np
from network import add
from sum_3_doubling import folded


def halving(comm, array, q):
    """Sum an array (n,) over the first q ranks."""
    begin, end, bit, halves = 0, len(array), q // 2, []
    while bit:
        middle = (begin + end) // 2
        mine, other = (begin, middle), (middle, end)
        if comm.rank & bit:
            mine, other = other, mine
        received = np.empty_like(array[slice(*mine)])
        partner = comm.rank ^ bit
        comm.exchange([(array[slice(*other)], partner)], [(received, partner)]).wait()
        add(array[slice(*mine)], received)
        halves.append((partner, mine, other))
        (begin, end), bit = mine, bit // 2
    for partner, mine, other in reversed(halves):
        sent, back = array[slice(*mine)], array[slice(*other)]
        comm.exchange([(sent, partner)], [(back, partner)]).wait()


allreduce = folded(halving)
