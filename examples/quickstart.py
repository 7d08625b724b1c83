"""Build, fit, evaluate, save, load and predict."""

import pydtnn
from pydtnn import Model, Trainer, load_dataset
from pydtnn.models import create_net

train, test = load_dataset("digits")  # of scikit-learn: the extra `data` installs it
model = Model(create_net("mlp", train.classes, train.input_shape), train.input_shape)
trainer = Trainer(model, "sgd")
trainer.fit(train, test, epochs=5, batch_size=32)
print(trainer.evaluate(test))
trainer.save("digits.pydtnn")
model = pydtnn.load("digits.pydtnn")  # also in another program: it needs neither code nor data
print(model.predict_classes(test.read(range(10))[0]))
