"""05 Recursive doubling: the sum with the fewest rounds.

In round k each rank exchanges its whole array with the rank whose number differs in bit k, and adds
what it receives: after log2 P rounds everybody has the sum of all. The time is ``log2 P (a + n /
b)``: few rounds, many bytes; better than a ring for short arrays (Thakur, Rabenseifner and Gropp,
"Optimization of collective communication operations in MPICH", 2005).

If P is no power of two, the ranks beyond the largest power q first add their arrays to those of
ranks ``r - q``, which take part for them and send them the result.
"""

from nets import STEPS, descend, join, parameters
from ranks import Array, Rank, main


def recursive_doubling(rank: Rank, array: Array) -> Array:
    """Return the sum of the ranks' arrays, (n,)."""
    most = 1 << (rank.size.bit_length() - 1)  # q, the largest power of two
    if rank.rank >= most:
        rank.send(array, rank.rank - most)
        return rank.receive(rank.rank - most)
    if rank.rank + most < rank.size:
        array = array + rank.receive(rank.rank + most)
    bit = 1
    while bit < most:
        # exercise: exchange arrays with the rank whose number differs in this bit
        rank.send(array, rank.rank ^ bit)
        array = array + rank.receive(rank.rank ^ bit)
        bit *= 2
    if rank.rank + most < rank.size:
        rank.send(array, rank.rank + most)
    return array


def train(rank: Rank) -> Array:
    """Sum random arrays (n,) in each step."""
    return descend(rank, lambda array: recursive_doubling(rank, array))


def bytes_sent(size: int) -> int:
    """Return the bytes of rank 0: log2 q arrays, and one more if it has a rank beyond q."""
    rounds = size.bit_length() - 1
    return STEPS * (rounds + (size > 1 << rounds)) * join(parameters()).size * 8


if __name__ == "__main__":
    main(
        train,
        bytes_sent,
        "steps x (log2 q + 1 if P > q) n x 8",
        "pydtnn/comm/schedules/algorithms.py: recursive_doubling",
    )
