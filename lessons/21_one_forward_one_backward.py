"""21 Pipeline, 1F1B: as soon as a backward is possible, it is done.

GPipe keeps the activations of all micro-batches. If a rank alternates between one forward and one
backward after the pipeline is full, it has at most P - r of them at a time, whatever M is: memory
no longer limits M, and more micro-batches mean fewer bubbles (Narayanan et al., "PipeDream", 2019,
in the form with a flush by "Memory-efficient pipeline-parallel DNN training", 2021).

The bubbles for a given M are those of GPipe: only memory has changed.
"""

from pipelines import FORMULA, MICRO_BATCHES, Action, bytes_sent, picture, serial
from pipelines import train as train_stages
from ranks import Array, Rank, main


def one_forward_one_backward(rank: int, size: int, micro_batches: int) -> list[Action]:
    """Return the actions of a rank: P - r - 1 forwards, then pairs, then what is left."""
    # exercise: how many forwards come before the first backward?
    ahead = min(size - rank - 1, micro_batches)
    actions = [("F", i) for i in range(ahead)]
    for i in range(micro_batches - ahead):
        actions += [("F", ahead + i), ("B", i)]
    return actions + [("B", i) for i in range(micro_batches - ahead, micro_batches)]


def train(rank: Rank) -> Array:
    """Train with the stages of a pipeline on the ranks."""
    parameters, most = train_stages(rank, one_forward_one_backward)
    assert most == min(rank.size - rank.rank, MICRO_BATCHES)
    if rank.rank == 0 and rank.size > 1:
        ranks = range(rank.size)
        plan = [one_forward_one_backward(r, rank.size, MICRO_BATCHES) for r in ranks]
        print(picture(plan, {"F": 1, "B": 2}))
    return parameters


if __name__ == "__main__":
    main(
        train,
        bytes_sent,
        FORMULA,
        "pydtnn/model/pipeline/schedules.py: one_forward_one_backward",
        serial=serial,
    )
