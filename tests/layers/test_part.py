"""Parts of arrays."""

from __future__ import annotations

import numpy as np

from pydtnn.comm import Communicator, run_threads
from pydtnn.layers.parameters import Cut, ParameterPart
from pydtnn.parallel.mesh import Mesh


def test_parts_of_all_ranks_are_the_whole():
    whole = np.arange(5.0 * 24).reshape(5, 24)
    part = ParameterPart((5, 24), (Cut(0, "a", (0, 3, 5)), Cut(1, "b", (0, 1, 2, 4), blocks=6)))

    def rank(comm: Communicator) -> tuple[int, ...]:
        mesh = Mesh(comm, a=2, b=3)
        own = part.take(whole, mesh.position)
        assert own.shape == part.local_shape(mesh.position)
        assert (mesh.gather(own, part) == whole).all()
        return own.shape

    shapes = run_threads(6, rank)
    assert shapes == [(3, 6), (3, 6), (3, 12), (2, 6), (2, 6), (2, 12)]
