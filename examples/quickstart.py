"""Build, fit, evaluate, save, load and predict."""

import numpy as np

import pydtnn
from pydtnn import Model, Trainer, load_dataset
from pydtnn.models import create_net
from pydtnn.optimizers import SGD

train, test = load_dataset("digits")  # of scikit-learn: the extra `data` installs it
net = create_net("mlp", train.classes, train.input_shape)
model = Model(net, train.input_shape)
trainer = Trainer(model, SGD(lr=0.05, momentum=0.9))

trainer.fit(train, test, epochs=5, batch_size=32)
print(trainer.evaluate(test))
print(model.summary())

trainer.save("digits.pydtnn")
model = pydtnn.load("digits.pydtnn")  # also in another program: it needs neither code nor data
images, labels = test.read(np.arange(10))  # raw pixels
print(model.predict_classes(images), labels)
