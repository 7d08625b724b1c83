"""22 Pipeline, zero bubble: the gradients of parameters can wait.

Backward computes two things: the gradient of a stage's input (B), for which the rank before waits,
and that of its parameters (W), for which nobody does. Done apart, B goes back through the pipeline
in half the time, and W fills what were bubbles (Qi et al., "Zero bubble pipeline parallelism",
2023, schedule H1). No rank keeps more micro-batches than the first one of 1F1B does, which is P;
the last ranks keep as many now.

Rank r begins with P - r forwards as in 1F1B, and then repeats B, W, F. Its W are those of the
micro-batch r places before, so that the last ranks, whose first B come early, have W left for the
end, when 1F1B waits. If F, B and W take 1 each, a rank waits P - 1 in total instead of 3 (P - 1).
"""

from pipelines import FORMULA, MICRO_BATCHES, Action, bytes_sent, picture, serial
from pipelines import train as train_stages
from ranks import Array, Rank, main


def zero_bubble(rank: int, size: int, micro_batches: int) -> list[Action]:
    """Return the actions of a rank: W of a micro-batch follows its B by as many B as the rank."""
    ahead = min(size - rank, micro_batches)
    actions = [("F", i) for i in range(ahead)]
    for i in range(micro_batches):
        actions.append(("B", i))
        # exercise: the gradient of parameters that fits here
        if i >= rank:
            actions.append(("W", i - rank))
        if ahead + i < micro_batches:
            actions.append(("F", ahead + i))
    return actions + [("W", i) for i in range(max(0, micro_batches - rank), micro_batches)]


def train(rank: Rank) -> Array:
    """Train with the stages of a pipeline on the ranks."""
    parameters, most = train_stages(rank, zero_bubble)
    assert most <= rank.size  # what the first rank of 1F1B keeps
    if rank.rank == 0 and rank.size > 1:
        plan = [zero_bubble(r, rank.size, MICRO_BATCHES) for r in range(rank.size)]
        print(picture(plan, {"F": 1, "B": 1, "W": 1}))
    return parameters


if __name__ == "__main__":
    main(train, bytes_sent, FORMULA, "pydtnn/model/pipeline/schedules.py: zb_h1", serial=serial)
