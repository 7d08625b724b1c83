"""What a search varies, read from a file and checked: its options and the objective."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydtnn.tools.search.dimension import MAX_GRID, WHO, Dimension, Value, stored
from pydtnn.utils import plain_yaml
from pydtnn.utils.files import read_file
from pydtnn.utils.names import unknown
from pydtnn.utils.units import parse_quantity

if TYPE_CHECKING:
    import optuna

MAX_CHOICES = 10_000
"""Largest number of values of a dimension."""

DIRECTIONS = ("minimize", "maximize")

KEYS = ("fixed", "space", "objective", "sampler", "pruner", "trials", "stop", "seed", "function")
"""Entries of a file."""

RANGE = ("low", "high", "log", "step", "choices", "if")
"""Entries of a dimension."""

AFTER = "after"
"""Entry of `stop` with a time."""


@dataclass(frozen=True)
class Space:
    """A search: what trials vary, what they maximize or minimize, and how they are chosen.

    Attributes
    ----------
    dimensions : tuple of Dimension
    fixed : dict
        Options that all trials have.
    objective : dict of str to str
        Names of values, such as "val_accuracy", and "minimize" or "maximize".
    sampler, pruner : dict
        "name", and options of the class of Optuna.
    trials : int
    stop : dict of str to float
        Values of the objective with which the search ends.
    after : float
        Time in s after which no trial begins.
    seed : int
    function : str
        ``path/to/file.py:name`` of a function that is called instead of training; may be empty.
    """

    dimensions: tuple[Dimension, ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    objective: Mapping[str, str] = field(default_factory=lambda: {"val_accuracy": "maximize"})
    sampler: Mapping[str, Any] = field(default_factory=lambda: {"name": "tpe"})
    pruner: Mapping[str, Any] = field(default_factory=lambda: {"name": "none"})
    trials: int = 20
    stop: Mapping[str, float] = field(default_factory=dict)
    after: float = math.inf
    seed: int = 0
    function: str = ""

    def suggest(self, trial: optuna.trial.BaseTrial) -> dict[str, Any]:
        """Return the values of a trial, in the order of the dimensions."""
        values: dict[str, Any] = {}
        for dimension in self.dimensions:
            if dimension.applies(values):
                values[dimension.name] = dimension.suggest(trial)
        return values

    def grid(self) -> list[dict[str, Any]]:
        """Return the values of all trials of a grid; the last dimension varies fastest.

        Raises
        ------
        ValueError
            If a range is continuous, or there are too many.
        """
        found: list[dict[str, Any]] = [{}]
        for dimension in self.dimensions:
            choices = dimension.values()
            if len(found) * len(choices) > MAX_GRID:
                raise ValueError(
                    f"{WHO}: the grid has more than {MAX_GRID:,} trials; use sampler: random, or "
                    "fewer values"
                )
            found = [
                {**values, **own}
                for values in found
                for own in (
                    [{dimension.name: c} for c in choices] if dimension.applies(values) else [{}]
                )
            ]
        return found

    def stored(self, values: Mapping[str, Any]) -> dict[str, Value]:
        """Return values as a sampler stores them."""
        return {name: stored(value) for name, value in values.items()}

    def identity(self) -> str:
        """Return what must be equal to continue a search, as text."""
        dimensions = [vars(one) | {"condition": dict(one.condition)} for one in self.dimensions]
        facts = (dimensions, self.fixed, self.objective, self.sampler, self.pruner, self.seed)
        return json.dumps([*facts, self.function], default=str)

    def checks(self) -> Iterator[dict[str, Any]]:
        """Yield trials that together have every choice and both ends of every range."""
        conditions: dict[str, dict[str, Any]] = {}  # with those of the options that they name
        for dimension in self.dimensions:
            wanted = conditions[dimension.name] = {}
            for name, allowed in dimension.condition.items():
                wanted |= {name: allowed[0], **conditions[name]}
            for value in dimension.ends:
                own: dict[str, Any] = {**wanted, dimension.name: value}
                values: dict[str, Any] = {}
                for one in self.dimensions:
                    if one.applies(values):
                        values[one.name] = own.get(one.name, one.ends[0])
                yield values


def read_space(file: str | Path) -> Space:
    """Read a search from YAML, or from a JSON file of lists, which is a grid.

    Parameters
    ----------
    file : str or Path
        YAML with the entries ``space``, ``fixed``, ``objective``, ``sampler``, ``pruner``,
        ``trials``, ``stop``, ``seed`` and ``function``, or a mapping of options to lists.

    Raises
    ------
    ValueError, TypeError, OSError
        If the file cannot be read, or an entry is wrong.
    """
    try:
        content = plain_yaml.load(read_file(WHO, file, plain_yaml.MAX_B).decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{WHO}: expected text in UTF-8 in {file} ({error})") from error
    except ValueError as error:
        raise ValueError(f"{WHO}: {file} is not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{WHO}: expected entries such as 'space:' in {file}")
    if content and "space" not in content and all(isinstance(v, list) for v in content.values()):
        content = {"space": content, "sampler": "grid"}
    return make_space(**_known(content, KEYS, "entry"))


def make_space(
    space: Mapping[str, Any],
    *,
    fixed: Mapping[str, Any] | None = None,
    objective: Mapping[str, Any] | None = None,
    sampler: str | Mapping[str, Any] = "tpe",
    pruner: str | Mapping[str, Any] = "none",
    trials: int | None = None,
    stop: Mapping[str, Any] | None = None,
    seed: int = 0,
    function: str = "",
) -> Space:
    """Return a search after checking it; the parameters are the entries of a file.

    Parameters
    ----------
    space : mapping
        Dimensions by name: a list of values, or a mapping with ``low``, ``high`` and optionally
        ``log``, ``step``, or ``choices``; with ``if``, a mapping of names before to values.
    fixed : mapping, optional
        Options of all trials.
    objective : mapping, optional
        ``{"maximize": NAME}`` or ``{"minimize": NAME}``, where NAME may be a list; by default
        "val_accuracy" is maximized.
    sampler, pruner : str or mapping
        A name, or a mapping with ``name`` and options of Optuna's class.
    trials : int, optional
        Default: 20, or all trials of a grid.
    stop : mapping, optional
        Values of the objective, and ``after``, a time such as "2h".
    seed : int
    function : str
        ``path/to/file.py:name`` of a function to call instead of training.

    Returns
    -------
    Space
    """
    if not isinstance(space, Mapping) or not space:
        raise ValueError(f"{WHO}: space must be a mapping of options to values, got {space!r}")
    dimensions: list[Dimension] = []
    for name, given in space.items():
        dimensions.append(_dimension(str(name).replace("-", "_"), given, dimensions))
    fixed = {str(name).replace("-", "_"): value for name, value in _mapping("fixed", fixed).items()}
    both = sorted({one.name for one in dimensions} & {*fixed})
    if both:
        raise ValueError(f"{WHO}: {both[0]} is in space and in fixed; remove one of them")
    goal = _objective(objective)
    limits = dict(_mapping("stop", stop))
    after = limits.pop(AFTER, None)
    made = Space(
        tuple(dimensions),
        fixed,
        goal,
        _choice("sampler", sampler),
        _choice("pruner", pruner),
        stop=_known({n: _number(f"stop: {n}", v) for n, v in limits.items()}, [*goal], "value"),
        after=math.inf if after is None else parse_quantity(f"{WHO}: stop: after", str(after), "s"),
        seed=_whole("seed", seed, 0),
        function=function,
    )
    if made.pruner["name"] != "none" and len(goal) > 1:
        raise ValueError(f"{WHO}: trials with several objectives cannot be pruned; remove pruner")
    count = len(made.grid()) if made.sampler["name"] == "grid" else 20
    return replace(made, trials=count if trials is None else _whole("trials", trials, 1))


def _dimension(name: str, given: Any, before: Sequence[Dimension]) -> Dimension:
    who = f"{WHO}: {name}"
    if isinstance(given, list):
        given = {"choices": given}
    if not isinstance(given, Mapping):
        raise ValueError(f"{who} must be a list of values or a range, got {given!r}; see fixed")
    given = _known(given, RANGE, f"entry of {name}")
    condition = _condition(who, given.pop("if", {}), before)
    if "choices" in given:
        choices = given.pop("choices")
        if given:
            raise ValueError(f"{who} has values and a range; remove {next(iter(given))}")
        if not isinstance(choices, list) or not 0 < len(choices) <= MAX_CHOICES:
            raise ValueError(f"{who} must have 1 to {MAX_CHOICES:,} values, got {choices!r:.60}")
        if len({json.dumps(stored(one)) for one in choices}) < len(choices):
            raise ValueError(f"{who} has a value twice: {choices!r:.200}")
        return Dimension(name, tuple(choices), condition=condition)
    missing = [end for end in ("low", "high") if end not in given]
    if missing:
        raise ValueError(f"{who} has no {missing[0]}; write {{low: 1e-3, high: 1.0}}")
    log, step = given.get("log", False), given.get("step")
    low, high = (_number(f"{name}: {end}", given[end]) for end in ("low", "high"))
    if not isinstance(log, bool):
        raise ValueError(f"{who}: log must be true or false, got {log!r}")
    if not low < high:
        raise ValueError(f"{who}: low must be below high, got {low} and {high}")
    if log and low <= 0:
        raise ValueError(f"{who}: low must be positive with log: true, got {low}")
    if step is not None and (log or _number(f"{name}: step", step) <= 0):
        raise ValueError(f"{who}: step must be positive and without log, got {step!r}")
    return Dimension(name, (), low, high, log, step, condition)


def _condition(who: str, given: Any, before: Sequence[Dimension]) -> dict[str, tuple[Any, ...]]:
    known = {one.name: one for one in before}
    found = {}
    for name, values in _mapping(f"{who.removeprefix(f'{WHO}: ')}: if", given).items():
        name = name.replace("-", "_")
        if name not in known:
            raise ValueError(f"{who}: if: {name} must be an option of the space before this one")
        allowed = tuple(values) if isinstance(values, list) else (values,)
        choices = known[name].choices
        wrong = [value for value in allowed if choices and value not in choices]
        if wrong or not choices or not allowed:
            raise ValueError(
                f"{who}: if: {name} must be among its values {choices}, got {values!r}"
            )
        found[name] = allowed
    return found


def _objective(given: Mapping[str, Any] | None) -> dict[str, str]:
    if given is None:
        return {"val_accuracy": "maximize"}
    goal: dict[str, str] = {}
    for direction, names in _known(_mapping("objective", given), DIRECTIONS, "direction").items():
        for name in names if isinstance(names, list) else [names]:
            if not isinstance(name, str) or name in goal:
                raise ValueError(f"{WHO}: objective must name each value once, got {name!r}")
            goal[name] = direction
    if not goal:
        raise ValueError(f"{WHO}: objective must name a value; write {{maximize: val_accuracy}}")
    return goal


def _choice(what: str, given: Any) -> dict[str, Any]:
    chosen = {"name": given} if isinstance(given, str) else dict(_mapping(what, given))
    if not isinstance(chosen.get("name"), str):
        raise ValueError(f"{WHO}: {what} must be a name, or have one: {{name: tpe}}, got {given!r}")
    return chosen


def _mapping(what: str, given: Any) -> Mapping[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ValueError(f"{WHO}: {what} must be a mapping of names to values, got {given!r}")
    return given


def _known(given: Mapping[str, Any], names: Sequence[str], what: str) -> dict[str, Any]:
    for name in given:
        if name not in names:
            raise ValueError(f"{WHO}: {unknown(what, str(name), [*names])}")
    return dict(given)


def _number(what: str, given: Any) -> Any:
    if isinstance(given, bool) or not isinstance(given, int | float) or not math.isfinite(given):
        raise ValueError(f"{WHO}: {what} must be a number, got {given!r}")
    return given


def _whole(what: str, given: Any, at_least: int) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or given < at_least:
        raise ValueError(f"{WHO}: {what} must be an integer from {at_least}, got {given!r}")
    return given


def argument(name: str, value: Any) -> str:
    """Return an option of a trial as an argument of `pydtnn.train`: ``--lr=0.1``."""
    flag, dot, item = name.partition(".")
    label = f"--{flag.replace('_', '-')}{dot}{item}"
    if isinstance(value, bool) and not dot:
        return label if value else f"--no-{label[2:]}"
    if value is None:
        return f"{label}=null"
    return f"{label}={value if isinstance(value, str) else plain_yaml.dump(value)}"
