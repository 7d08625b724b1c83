"""The mesh of ranks that `--parallel` describes."""

from __future__ import annotations

import re
from math import prod

from pydtnn.comm import Communicator
from pydtnn.parallel.mesh import Mesh

AUTO = "auto"
"""Value of `--parallel` for the fastest strategy by the performance model."""

NOT_NAMES = ("batch", "comm", "self")
"""Names that an axis cannot have: one of the library, and arguments of `Mesh`."""


def read_axes(text: str | None) -> dict[str, int]:
    """Return the ranks along each axis of a mesh; none without a text, or for "auto".

    Raises
    ------
    ValueError
        If the text is not a list of axes with their ranks.

    Examples
    --------
    >>> read_axes("data=2,filter=4")
    {'data': 2, 'filter': 4}
    """
    axes: dict[str, int] = {}
    if text == AUTO:
        return axes
    for item in filter(None, (item.strip() for item in (text or "").split(","))):
        name, _, ranks = (part.strip() for part in item.partition("="))
        if not re.fullmatch(r"[a-z_]+", name) or not re.fullmatch(r"[1-9][0-9]{,8}", ranks):
            raise ValueError(
                "train: --parallel must be axes with their ranks, at least 1, such as "
                f"data=2,filter=4, got {item!r}"
            )
        if name in axes or name in NOT_NAMES:
            problem = "occurs twice" if name in axes else "is not possible as a name"
            raise ValueError(f"train: --parallel: the axis {name} {problem}; use another name")
        axes[name] = int(ranks)
    return axes


def create_mesh(text: str | None, comm: Communicator) -> Mesh | None:
    """Return the mesh that `--parallel` describes, None if it is not set. Collective.

    Raises
    ------
    ValueError
        If the axes do not multiply to the number of ranks.
    """
    axes = read_axes(text)
    if not axes:
        return None
    if prod(axes.values()) != comm.size:
        raise ValueError(
            f"--parallel: axes must multiply to the number of ranks, {comm.size}, got {text}, "
            f"which is {prod(axes.values())}; use mpirun -np {prod(axes.values())}, or other axes"
        )
    return Mesh(comm, **axes)


def describe_mesh(mesh: Mesh) -> str:
    """Describe the axes of a mesh: "data 2 x filter 4"."""
    return " x ".join(f"{axis} {ranks}" for axis, ranks in mesh.shape.items())
