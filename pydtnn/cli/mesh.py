"""The mesh of ranks that `--parallel` describes."""

from __future__ import annotations

from math import prod

from pydtnn.comm import Communicator
from pydtnn.parallel.mesh import Mesh, parse_axes

AUTO = "auto"
"""Value of `--parallel` for the fastest strategy by the performance model."""


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
    return {} if text == AUTO else parse_axes("train: --parallel", text or "")


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
    ranks = prod(axes.values())
    if ranks != comm.size:
        raise ValueError(
            f"train: --parallel: axes must multiply to the number of ranks, {comm.size}, got "
            f"{text}, which is {ranks}; use mpirun -np {ranks}, or other axes"
        )
    return Mesh(comm, **axes)


def describe_mesh(mesh: Mesh) -> str:
    """Describe the axes of a mesh: "data 2 x filter 4"."""
    return " x ".join(f"{axis} {ranks}" for axis, ranks in mesh.shape.items())
