"""What a trainer refuses before it begins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydtnn.comm.exchange import GradientExchange
from pydtnn.comm.schemes.partition import Partition
from pydtnn.comm.sums import Sums
from pydtnn.errors import AgreedError

if TYPE_CHECKING:
    from pydtnn.trainer import Trainer


def check_exact(trainer: Trainer) -> None:
    """Refuse what would make exact training depend on ranks or machines.

    Raises
    ------
    ValueError
    """
    if trainer.exchange.sums.shards is None:
        return
    if trainer.accumulation > 1:
        raise ValueError(
            "Trainer: exact training computes shard by shard, so accumulation must be 1; use "
            "more shards to save memory"
        )
    if trainer.optimizer.clip_norm is not None and isinstance(trainer.exchange, Partition):
        raise ValueError(
            f"Trainer: {type(trainer.exchange).__name__} adds up the norm for clip_norm over the "
            "parts of the ranks, which is not exact; leave clip_norm out or use AllReduce"
        )
    if trainer.model.backend.choices.mode == "measure":
        raise ValueError(
            "Trainer: exact training needs algorithms that are not chosen by measurement; make "
            'the backend with tuning="fixed"'
        )


def check_loss_scale(trainer: Trainer) -> None:
    """Refuse what mixes gradients of several steps, where each step may have another scale.

    Raises
    ------
    ValueError
    """
    if trainer.loss_scale is None:
        return
    parts: list[GradientExchange | Sums] = [trainer.exchange, trainer.exchange.sums]
    for what in parts:
        if what.keeps_gradients:
            raise ValueError(
                f"Trainer: {type(what).__name__} keeps gradients from step to step, which a "
                "float16 model scales by other factors; use bfloat16"
            )


def check_scale(trainer: Trainer) -> None:
    """Refuse to go on where no update is made however small the loss is scaled.

    Collective: all ranks call it.

    Raises
    ------
    AgreedError
    """
    if trainer.loss_scale is not None and any(trainer.comm.gather_object(trainer.loss_scale.lost)):
        raise AgreedError(
            "Trainer: gradients are infinite however small the scale of the loss; use a lower "
            "learning rate, or bfloat16"
        )


def check_plan(was: Mapping[str, int], plan: Mapping[str, int]) -> None:
    """Refuse to continue with other batches: the position in them would mean nothing.

    Raises
    ------
    AgreedError
    """
    for name, value in was.items():
        if plan[name] != value:
            raise AgreedError(
                f"Trainer: the training to continue had {name.replace('_', ' ')} {value}, "
                f"not {plan[name]}; continue with the same"
            )
