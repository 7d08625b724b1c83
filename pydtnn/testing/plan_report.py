"""The report of `check_plan`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydtnn.testing.plan_problem import STEPS
from pydtnn.testing.plan_rank import KINDS


def mesh_name(axes: Mapping[str, int]) -> str:
    """Return the axes of a mesh: "data=2, filter=2"."""
    return ", ".join(f"{name}={ranks}" for name, ranks in axes.items())


@dataclass(frozen=True)
class PlanRow:
    """A plan on one mesh.

    Attributes
    ----------
    mesh : dict of str to int
    differences : dict of str to float
        For each kind of arrays the largest difference from serial training, relative to the largest
        magnitude of the kind, over all steps, with and without fusion; "training" is that of
        losses, norms of gradients and parameters in the steps of a trainer, if they were checked.
    messages, bytes : float
        Messages that rank 0 sends in a step, and B, those for gradients included.
    refused : str
        Why the plan is not possible on this mesh; an empty string if it is.
    """

    mesh: dict[str, int]
    differences: dict[str, float]
    messages: float = 0.0
    bytes: float = 0.0
    refused: str = ""


@dataclass(frozen=True)
class PlanReport:
    """Result of `check_plan`; its string is a table.

    Attributes
    ----------
    plan : str
    parameters : int
        Number of parameters of the network.
    batch : int
    rows : tuple of PlanRow
        One for each mesh.
    """

    plan: str
    parameters: int
    batch: int
    rows: tuple[PlanRow, ...]

    def __str__(self) -> str:
        width = max(len(mesh_name(row.mesh)) for row in self.rows)
        kinds = [kind for kind in KINDS if kind != "initial value"]
        if any("training" in row.differences for row in self.rows):
            kinds.append("training")
        short = {"gradient of input": "dx"}
        head = "".join(f"{short.get(kind, kind):>11}" for kind in kinds)
        lines = [
            f"{self.plan}: {self.parameters} parameters, {STEPS} steps of {self.batch} samples, "
            "float64; largest difference from serial training, relative",
            f"{'mesh':{width}}{head}  messages/step    B/step",
        ]
        for row in self.rows:
            name = f"{mesh_name(row.mesh):{width}}"
            if row.refused:
                lines.append(f"{name}  not possible: {row.refused}")
                continue
            found = "".join(f"{row.differences[kind]:11.1e}" for kind in kinds)
            lines.append(f"{name}{found}  {row.messages:13.1f}  {row.bytes:8.0f}")
        return "\n".join(lines)
