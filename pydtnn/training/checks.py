"""Checks of a trainer's arguments before training."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Mapping, Sequence
from inspect import isfunction, signature
from typing import Any, cast

from pydtnn.comm import require_equal
from pydtnn.layers import Block, Layer, Sigmoid, Softmax
from pydtnn.layers.statistics import RUNNING
from pydtnn.losses import BinaryCrossEntropy, CategoricalCrossEntropy
from pydtnn.model import Model
from pydtnn.optimizers import Optimizer
from pydtnn.parallel.exchange import GradientExchange
from pydtnn.training.callback import Callback
from pydtnn.training.capabilities import check as check_features
from pydtnn.training.mesh import check_groups
from pydtnn.training.setup import Setup
from pydtnn.utils.errors import AgreedError
from pydtnn.utils.names import answer, unknown
from pydtnn.utils.validate import check_int, check_names

OWN = (
    *("train", "validation", "epochs", "more_epochs", "batch_size", "global_batch_size", "augment"),
    *("mix", "targets", "steps_per_epoch", "drop_last", "seed", "loader_threads"),
)


def refuse(others: Mapping[str, object]) -> None:
    """Raise TypeError for an argument that `fit` does not have.

    Raises
    ------
    TypeError
        The message contains what to use instead.
    """
    for name in others:
        if hint := answer("names", name):
            raise TypeError(f"fit: there is no argument `{name}`{hint}")
        raise TypeError(f"fit: {unknown('argument', name, OWN)}")


def last_epoch(epoch: int, epochs: int | None, more_epochs: int | None) -> int:
    """Return the number of epochs that are complete when `fit` ends.

    Parameters
    ----------
    epoch : int
        Epochs that are complete.
    epochs, more_epochs : int, optional
        Arguments of `fit`; without both, 1 epoch.

    Raises
    ------
    TypeError, ValueError
        If both are set, or one of them is not a number of epochs.
    """
    if epochs is not None and more_epochs is not None:
        raise TypeError(
            "fit: expected epochs or more_epochs, got both; epochs counts from the beginning, "
            "more_epochs from the present state"
        )
    if more_epochs is not None:
        return epoch + check_int("Trainer", "more_epochs", more_epochs, at_least=0)
    last = check_int("Trainer", "epochs", 1 if epochs is None else epochs, at_least=0)
    if epoch >= last > 0:
        _log.info("%s", describe_complete(epoch, last))
    return last


def describe_complete(epoch: int, epochs: int) -> str:
    """Return the sentence for a `fit` without an epoch to train."""
    done = f"{epoch} epoch{'s are' if epoch > 1 else ' is'} complete"
    return (
        f"fit: nothing to train: {done}, and epochs={epochs} counts from the beginning; pass "
        f"more_epochs={epochs} to train on"
    )


def check_callback(callback: Callback) -> None:
    """Raise TypeError for a method ``on_...`` that is never called, or takes other arguments.

    Methods that the class itself calls may have any name.

    Raises
    ------
    TypeError
        With the method to write.
    """
    kind = type(callback)
    functions = {name: getattr(kind, name) for name in dir(kind) if name.startswith("on_")}
    ours = [base for base in kind.__mro__ if base.__module__.startswith("pydtnn.")]
    known = {
        n: value for base in reversed(ours) for n, value in vars(base).items() if n[:3] == "on_"
    }
    for name, function in functions.items():
        if name in known:
            _check_arguments(kind, function, known[name])
        elif not _calls(kind, name):
            if hint := answer("names", name):
                raise TypeError(f"{kind.__name__}: {name} is never called{hint}")
            raise TypeError(f"{kind.__name__}: {unknown('method of a callback', name, known)}")


def _calls(kind: type, name: str) -> bool:
    """Return whether a method of a class names another one."""
    methods = [value for base in kind.__mro__ for value in vars(base).values()]
    return any(name in method.__code__.co_names for method in methods if isfunction(method))


def _check_arguments(kind: type, function: Any, wanted: Any) -> None:
    if not isfunction(function) or function is wanted:
        return
    given, (_, *expected) = signature(function), signature(wanted).parameters
    takes = [*given.parameters]
    try:
        given.bind("self", *expected)
    except TypeError:
        fits = False
    else:
        fits = takes[1:2] not in (["epoch"], ["batch"], ["logs"], ["step"])
    if not fits:
        raise TypeError(
            f"{kind.__name__}: {function.__name__} must take (self, {', '.join(expected)}), got "
            f"({', '.join(takes)})"
        )


_log = logging.getLogger("pydtnn.training")


def check_parts(
    model: object,
    optimizer: object,
    exchange: object,
    callbacks: Sequence[object],
    metrics: Sequence[object],
) -> None:
    """Check the types of a trainer's arguments.

    Raises
    ------
    TypeError
    """
    if isinstance(metrics, str):
        raise TypeError(f"Trainer: metrics must be a list, such as [{metrics!r}], got {metrics!r}")
    if isinstance(callbacks, Callback):
        raise TypeError(
            f"Trainer: callbacks must be a list, such as [{type(callbacks).__name__}(...)], got "
            f"{callbacks!r}"
        )
    parts: list[tuple[str, object, type]] = [
        ("model", model, Model),
        ("optimizer", optimizer, Optimizer),
        *(("callback", callback, Callback) for callback in callbacks),
    ]
    if exchange is not None:
        parts.append(("exchange", exchange, GradientExchange))
    for name, given, kind in parts:
        if isinstance(given, kind):
            check_names(given, kind)
            continue
        a, hint = "an" if kind is Optimizer else "a", ""
        if isinstance(given, type) and issubclass(given, kind):
            hint = f"; make one: {given.__name__}(...)"
        elif isinstance(given, Layer | Block):
            hint = "; make one: Model(net, input_shape)"
        shown = " ".join(repr(given).split())
        raise TypeError(f"Trainer: {name} must be {a} {kind.__name__}, got {shown}{hint}")
    for callback in callbacks:
        check_callback(cast(Callback, callback))


def check_trainable(model: Model) -> None:
    """Raise ValueError if all parameters are frozen."""
    if model.frozen and len(model.frozen) == len(model.parameter_names):
        raise ValueError(
            "Trainer: expected trainable parameters, got a model of which all are frozen; thaw "
            "some with model.thaw(...)"
        )


def warn_of_probabilities(setup: Setup) -> None:
    """Warn if a loss that takes logits is given probabilities."""
    for node, loss in zip(setup.model.output_nodes, setup.objective.losses, strict=False):
        for layer, taken in ((Softmax, CategoricalCrossEntropy), (Sigmoid, BinaryCrossEntropy)):
            if isinstance(node.layer, layer) and isinstance(loss, taken):
                warnings.warn(
                    f"Trainer: the model ends with {layer.__name__}, but {taken.__name__} takes "
                    f"logits and applies it itself; remove {node.name}",
                    stacklevel=3,
                )


def check_options(setup: Setup) -> None:
    """Raise ValueError if options are incompatible.

    Raises
    ------
    ValueError
    """
    check_groups(setup.model, setup.mesh)
    check_features(setup)
    if check := getattr(setup.exchange, "check", None):
        check(setup.optimizer)


def check_binding(optimizer: Optimizer, binding: object, model: Model | None = None) -> None:
    """Raise ValueError if the optimizer does not update the trainable parameters of the model.

    It may have been bound by another trainer, and a captured step would still write to the earlier
    arrays; or, if `model` is given, its parameters may have been frozen or thawed since.

    Raises
    ------
    ValueError
    """
    if optimizer.binding is not binding:
        raise ValueError(
            f"Trainer: {type(optimizer).__name__} was passed to another trainer, which reset its "
            "state; continue with that trainer, or create one optimizer per trainer"
        )
    if model is not None and not optimizer.is_bound_to(model.buffers):
        raise ValueError(
            "Trainer: parameters were frozen or thawed after the last fit; call fit before steps "
            "and checkpoints"
        )


def check_plan(
    setup: Setup, plan: Mapping[str, int], was: Mapping[str, int], **others: int
) -> None:
    """Raise AgreedError if plans differ between ranks or from that of the continued training.

    Collective: all ranks call it, before they exchange anything else.

    Parameters
    ----------
    setup : Setup
    plan : mapping
        Plan of the batches, by name with underscores; `others` are compared only between ranks.
    was : mapping
        The plan of the continued training, if any.

    Raises
    ------
    AgreedError
    """
    named = setup.model.whole.shapes.items()
    shapes = [(name, shape) for name, shape in named if name.rpartition(".")[2] not in RUNNING]
    facts: dict[str, object] = {name.replace("_", " "): n for name, n in {**plan, **others}.items()}
    facts |= {
        "number of parameters": sum(math.prod(shape) for _, shape in shapes),
        "shapes of parameters": shapes,
        "frozen parameters": [*setup.model.frozen],
        "type of elements": str(setup.model.dtype),
        "metrics": [*setup.objective.names[1:]],
        "scheme": type(setup.exchange).__name__,
        "optimizer": type(setup.optimizer).__name__,
    }
    if setup.exchange.equal:
        facts["learning rate"] = setup.optimizer.lr_now
    require_equal(setup.comm, "Trainer", facts, "give every rank the same")
    for name, value in was.items():
        if plan[name] != value:
            raise AgreedError(
                f"Trainer: {name.replace('_', ' ')} must be {value}, as in the training to "
                f"continue, got {plan[name]}; continue with the same"
            )


def check_scale(setup: Setup) -> None:
    """Raise AgreedError if gradients are infinite at the smallest loss scale.

    Collective: all ranks call it.

    Raises
    ------
    AgreedError
    """
    if setup.loss_scale is not None and any(setup.comm.gather_object(setup.loss_scale.lost)):
        raise AgreedError(
            "Trainer: gradients are infinite at the smallest loss scale; use a lower learning "
            "rate, or bfloat16"
        )
