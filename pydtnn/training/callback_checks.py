"""Checks of callbacks: every method is called by the trainer, with the arguments that it takes."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import isfunction, signature
from typing import Any

from pydtnn.training.callback import Callback
from pydtnn.utils.suggest import unknown

_STEP = "on_step_end(trainer)"
_EPOCH = "on_epoch_start(trainer)"
_EVALUATED = "on_epoch_end(trainer), which follows the evaluation"
_BEGIN = "on_fit_start(trainer, epochs, steps)"

METHODS: Mapping[str, str] = {
    "on_batch_end": _STEP,
    "on_batch_begin": _STEP,
    "on_train_batch_begin": _STEP,
    "on_train_batch_start": _STEP,
    "on_train_batch_end": _STEP,
    "on_step_begin": _STEP,
    "on_step_start": _STEP,
    "on_before_optimizer_step": _STEP,
    "on_after_backward": _STEP,
    "on_log": _STEP,
    "on_epoch_begin": _EPOCH,
    "on_train_epoch_start": _EPOCH,
    "on_train_epoch_end": "on_epoch_end(trainer)",
    "on_validation_start": _EVALUATED,
    "on_validation_begin": _EVALUATED,
    "on_validation_end": _EVALUATED,
    "on_validation_epoch_end": _EVALUATED,
    "on_evaluate": _EVALUATED,
    "on_test_end": _EVALUATED,
    "on_train_begin": _BEGIN,
    "on_train_start": _BEGIN,
    "on_fit_begin": _BEGIN,
    "on_train_end": "on_fit_end(trainer)",
    "on_exception": "close()",
    "on_save": "state()",
    "on_save_checkpoint": "state()",
    "on_load_checkpoint": "load(state)",
}
"""Methods of callbacks of other libraries, and those to write instead."""


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
            hint = METHODS.get(name)
            raise TypeError(
                f"{kind.__name__}: {name} is never called; use {hint}"
                if hint
                else f"{kind.__name__}: {unknown('method of a callback', name, known)}"
            )


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
