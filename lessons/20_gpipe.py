"""20 Pipeline, GPipe: layers are divided, and a batch flows through in parts.

Each rank has some consecutive layers (a stage). One batch after the other would keep one rank busy
at a time; cut into M micro-batches, rank 1 works on the first while rank 0 works on the second. The
gradients of micro-batches are added, so that a step is that of the whole batch. All forwards come
before all backwards, and each rank keeps the activations of M micro-batches (Huang et al., "GPipe",
2019).

Bubbles: ranks wait ``(P - 1) / (M + P - 1)`` of the time until the pipeline is full and empty.
"""

from pipelines import FORMULA, MICRO_BATCHES, Action, bytes_sent, picture, serial
from pipelines import train as train_stages
from ranks import Array, Rank, main


def gpipe(rank: int, size: int, micro_batches: int) -> list[Action]:
    """Return the actions of a rank: all forwards, then all backwards, the last one first."""
    forwards = [("F", i) for i in range(micro_batches)]
    # exercise: backwards, the last micro-batch first
    return forwards + [("B", i) for i in reversed(range(micro_batches))]


def train(rank: Rank) -> Array:
    """Train with the stages of a pipeline on the ranks."""
    parameters, most = train_stages(rank, gpipe)
    assert most == MICRO_BATCHES  # activations of all micro-batches are kept
    if rank.rank == 0 and rank.size > 1:
        plan = [gpipe(r, rank.size, MICRO_BATCHES) for r in range(rank.size)]
        print(picture(plan, {"F": 1, "B": 2}))
    return parameters


if __name__ == "__main__":
    main(train, bytes_sent, FORMULA, "pydtnn/model/pipeline/schedules.py: gpipe", serial=serial)
