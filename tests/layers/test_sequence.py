"""Layers of sequences (N, T, D): a class token, positional embeddings, and those of vectors."""

import numpy as np

from pydtnn.layers import Dropout, StepContext
from pydtnn.model import Model


def test_positions_are_dropped_independently(backend):
    model = Model(Dropout(0.5), (40, 50), backend=backend)
    x = np.ones((1, 40, 50), "float32")
    y, _ = model.forward(backend.asarray(x), StepContext(training=True, samples=np.arange(1)))
    assert len(np.unique(backend.to_numpy(y)[0], axis=0)) == 40
