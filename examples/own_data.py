"""Train on arrays of one's own: classify points by the ring they lie on."""

import numpy as np

from pydtnn import ArrayDataset, Model, Trainer
from pydtnn.layers import Linear, ReLU, Sequential
from pydtnn.optimizers import Adam

rng = np.random.default_rng(0)
points = rng.normal(size=(2000, 2)).astype("float32")
rings = np.digitize(np.hypot(*points.T), [0.8, 1.5])
train = ArrayDataset(points[:1600], rings[:1600])
test = ArrayDataset(points[1600:], rings[1600:])

net = Sequential(Linear(32), ReLU(), Linear(32), ReLU(), Linear(3))
trainer = Trainer(Model(net, (2,)), Adam(lr=0.01))
trainer.fit(train, test, epochs=10, batch_size=32)
print(f"test accuracy {trainer.evaluate(test)['accuracy']:.3f}")
