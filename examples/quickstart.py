"""Build, fit, evaluate, predict, save and load."""

import numpy as np

from pydtnn import Model, Trainer, load_dataset
from pydtnn.models import create_net
from pydtnn.optimizers import SGD
from pydtnn.weights import load_weights, save_weights

train, test = load_dataset("digits")
net = create_net("mlp", train.classes, train.input_shape)
model = Model(net, train.input_shape)
trainer = Trainer(model, SGD(lr=0.05, momentum=0.9))

trainer.fit(train, test, epochs=5, batch_size=32)
print(trainer.evaluate(test))
print(model.summary())

save_weights(model, "digits.safetensors")
load_weights(model, "digits.safetensors")
x, y = test.read(np.arange(10))
print(model.predict(test.normalize(x)).argmax(axis=1), y)
