"""Plans: which layers are cut, how, and over which axis of the mesh."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydtnn.layers.collectives import PIPELINE
from pydtnn.utils.files import read_file
from pydtnn.utils.names import SuggestsNames, matches, select, unknown

NAMES = ("filter", "channel", "alternate", "spatial", "width", "context", "expert", "data")
"""The strategies of single layers."""

ALIASES = {"height": "spatial", "model": "alternate", "tensor": "alternate"}
"""Other names of axes of a mesh, with the strategy that they stand for."""


class Plan(SuggestsNames):
    """How the layers of a network are cut.

    Parameters
    ----------
    rules : mapping of str to mapping or list
        For patterns of names of layers or blocks (`pydtnn.utils.names.select`), the axis of the
        mesh for each strategy: ``{"stage1": {"spatial": "model"}, "*": {"filter": "model"}}``. The
        first pattern that matches a layer applies. An empty mapping leaves layers whole. For
        "pipeline", the layers or blocks with which the stages but the first begin:
        ``{"pipeline": ["stage2", "stage3"]}``; by default stages take about equal times.

    Attributes
    ----------
    stages : tuple of str
        Names for "pipeline".

    Notes
    -----
    The strategies are "filter" (filters of a convolution, features of a linear layer or heads of
    the attention after it, tokens of an embedding), "channel" (their input channels), "alternate"
    (channel where the input is already cut by channels, filter elsewhere), "spatial" (height of the
    maps), "width", "context" (positions of sequences), "expert"
    (experts, and samples in other layers) and "data" (samples). They apply to
    convolutions, linear layers and embeddings, and those of maps to pooling too; all other layers
    follow their inputs if they can. A layer that is used several times is cut like its first use.
    """

    def __init__(self, rules: Mapping[str, Mapping[str, str]]) -> None:
        if not isinstance(rules, Mapping):
            raise TypeError(f"Plan: expected a mapping of layers to strategies, got {rules!r}")
        stages: Any = rules.get(PIPELINE)
        own = {**rules}
        if isinstance(stages, list | tuple) and all(isinstance(name, str) for name in stages):
            del own[PIPELINE]
        else:
            stages = ()
        self.stages = tuple(stages)
        self.rules = {str(pattern): _checked(pattern, each) for pattern, each in own.items()}
        self.explicit = True

    @classmethod
    def named(cls, names: Mapping[str, str]) -> Plan:
        """Return the plan that uses strategies wherever layers allow it, with the axis of each."""
        plan = cls({"*": names})
        plan.explicit = False
        return plan

    def __repr__(self) -> str:
        stages = {PIPELINE: [*self.stages]} if self.stages else {}
        return f"Plan({ {**self.rules, **stages}!r})"

    def check(self, layers: Collection[str], axes: Collection[str]) -> None:
        """Raise ValueError if a pattern matches no layer, or an axis is not one of the mesh."""
        select("Plan", [p for p in self.rules if p != "*"], layers)
        for own in self.rules.values():
            for axis in own.values():
                if axis not in axes:
                    raise ValueError(f"Plan: {unknown('axis of the mesh', axis, [*axes])}")

    def strategies(self, layer: str) -> Mapping[str, str]:
        """Return the strategy of a layer along each axis that has one."""
        own = next((own for pattern, own in self.rules.items() if matches(pattern, layer)), {})
        return {axis: strategy for strategy, axis in own.items()}


def _checked(pattern: str, own: Any) -> dict[str, str]:
    if not isinstance(own, Mapping):
        raise TypeError(
            f"Plan: expected for {pattern} a mapping of strategies to axes of the mesh, such as "
            f'{{"filter": "filter"}}, got {own!r}'
        )
    for strategy, axis in own.items():
        if strategy not in NAMES:
            raise ValueError(f"Plan: {unknown('strategy', strategy, NAMES)}")
        if not isinstance(axis, str):
            raise TypeError(
                f"Plan: expected for {pattern} the name of an axis of the mesh, got {axis!r} for "
                f'{strategy}; use "{strategy}"'
            )
    if len({*own.values()}) != len(own):
        raise ValueError(f"Plan: {pattern} has two strategies along one axis; use two axes")
    return dict(own)


def _read(path: Path) -> Any:
    from pydtnn.utils import plain_yaml

    try:
        return plain_yaml.load(read_file("Plan", path, plain_yaml.MAX_B).decode())
    except OSError as error:
        raise ValueError(str(error)) from error
    except ValueError as error:
        raise ValueError(f"Plan: {path} cannot be read: {error}") from error


def _parse(text: str) -> Any:
    from pydtnn.utils import plain_yaml

    try:
        return plain_yaml.load(text)
    except ValueError as error:
        raise ValueError(f"Plan: the rules {text} cannot be read: {error}") from error


def find_plan(
    plan: Plan | str | Mapping[str, Any] | None, axes: Sequence[str], *, pipeline: bool = False
) -> Plan:
    """Return a plan from a name, a file or the axes of a mesh.

    Parameters
    ----------
    plan : Plan, mapping or str, optional
        A name of a strategy applies it along the only axis of the model, or the one of this name;
        the path of a YAML file contains the rules of a `Plan`, and so does text that begins with a
        brace. By default, each axis is used for the strategy of its name.
    axes : sequence of str
        The mesh's axes without "data" and "pipeline".
    pipeline : bool
        Whether the mesh has the axis "pipeline".

    Raises
    ------
    ValueError
    """
    if isinstance(plan, Mapping):
        plan = Plan(plan)
    elif isinstance(plan, str) and plan.lstrip().startswith("{"):
        plan = Plan(_parse(plan))
    elif isinstance(plan, str | Path) and Path(plan).suffix in (".yaml", ".yml"):
        plan = Plan(_read(Path(plan)))
    if (plan == PIPELINE or (isinstance(plan, Plan) and plan.stages)) and not pipeline:
        raise ValueError(
            "Plan: pipeline requires an axis of the mesh of this name; use Mesh(comm, pipeline=2)"
        )
    if isinstance(plan, Plan) and plan.rules:
        return plan
    if plan is None or plan == PIPELINE or isinstance(plan, Plan):
        known = [axis for axis in axes if ALIASES.get(axis, axis) in NAMES]
        for axis in axes:
            if axis not in known:
                raise ValueError(
                    f"Plan: the axis {axis} of the mesh has no plan and is not named after a "
                    f"strategy: {unknown('strategy', axis, NAMES)}"
                )
        named = Plan.named({ALIASES.get(axis, axis): axis for axis in known})
        named.stages = plan.stages if isinstance(plan, Plan) else ()
        return named
    if plan in NAMES:
        own = [axis for axis in axes if ALIASES.get(axis, axis) == plan] or list(axes)
        if len(own) != 1:
            raise ValueError(
                f"Plan: {plan} requires one axis of the mesh besides data, got "
                f"{', '.join(axes) or 'none'}; use Mesh(comm, {plan}=2)"
            )
        return Plan.named({plan: own[0]})
    raise ValueError(
        f"Plan: {unknown('strategy', str(plan), [*NAMES, PIPELINE])}; a file must end in .yaml"
    )
