"""Networks of many equal blocks, of which a few are outlined and one of these is repeated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pydtnn.layers import Sequential
from pydtnn.layers.blocks import Block, Net
from pydtnn.layers.collectives import PIPELINE
from pydtnn.model.pipeline.schedules import placement
from pydtnn.model.recompute_choice import AUTO
from pydtnn.training.workload import Workload

FEW = 3
"""Blocks that are outlined, of each stage: the first, one that is repeated, and the last."""

MOST = 24
"""Equal blocks up to which all are outlined."""


@dataclass(frozen=True)
class Short:
    """A shorter network for one rank.

    Attributes
    ----------
    work : Workload
        With the shorter network, of at most three stages.
    stage : int
        The one among them that is like that of the rank.
    blocks : tuple of str
        Names of the blocks that remain.
    times : int
        How often the second one of the stage is to be repeated.
    """

    work: Workload
    stage: int
    blocks: tuple[str, ...]
    times: int


class EqualBlocks:
    """The longest run of equal blocks of a network that are more than `MOST`.

    Parameters
    ----------
    work : Workload
        Of the network, with a net that is a `Sequential` if there is such a run.
    """

    def __init__(self, work: Workload) -> None:
        net = work.create_net()
        self.parts: Sequence[Net] = net.parts if type(net) is Sequential else ()
        self.name, self.first, self.count, start = net.name, 0, 0, 0
        kinds = [_kind(part) for part in self.parts]
        for i, kind in enumerate(kinds):
            start = i if i == 0 or not kind or kind != kinds[i - 1] else start
            if i + 1 - start > self.count:
                self.first, self.count = start, i + 1 - start

    def shorter(self, work: Workload, stage: int) -> Short | None:
        """Return a shorter network for a rank of a run; None if the whole one is to be outlined.

        Stages of the shorter network begin with blocks, of which all have equally many; those
        without the first and last layers have one more if that is not possible.
        """
        stages = work.stages
        few = self.count <= MOST or self.count < FEW * stages
        if few or work.plan or work.recompute not in (None, AUTO):
            return None
        if stages > 1 and placement(work.pipeline_schedule, stages).stages != stages:
            return None
        kinds = min(stages, FEW)
        own = kinds - 1 if stage == stages - 1 else min(stage, 1)
        more = [*range(1, stages - 1), 0, stages - 1][: self.count % stages]
        kept = self.parts[self.first : self.first + FEW * kinds]
        after = self.parts[self.first + self.count :]
        net = Sequential(*self.parts[: self.first], *kept, *after, name=self.name)
        names = tuple(str(part.name) for part in kept)
        short = replace(
            work, model=net, axes={**work.axes, **({PIPELINE: kinds} if kinds > 1 else {})}
        )
        if kinds > 1:
            short = replace(short, plan={PIPELINE: names[FEW::FEW]})
        return Short(short, own, names, self.count // stages + (stage in more) - FEW)


def _kind(part: Net) -> str:
    """Return a text that blocks have in common that differ in their names; empty for others."""
    return repr(part).rpartition("name=")[0] if isinstance(part, Block) and part.name else ""
