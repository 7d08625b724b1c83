"""Write a layer with a parameter, check its gradients, train with it."""

from pydtnn import Model, Trainer, load_dataset
from pydtnn.layers import Flatten, Layer, Linear, Sequential
from pydtnn.optimizers import SGD
from pydtnn.tools.testing import check_layer


class ParametricReLU(Layer):
    """``x`` if positive, else ``slope x`` with one learned slope per channel (He et al. 2015)."""

    def build(self, shape):
        self.slope = self.parameter("slope", shape[-1:], "zeros", decay=False)
        return shape

    def forward(self, x, context):
        return self.xp.where(x > 0, x, self.slope.value * x), x

    def backward(self, dy, saved):
        x = saved
        negative = self.xp.where(x > 0, 0, dy)
        self.slope.store_grad((negative * x).reshape(-1, x.shape[-1]).sum(axis=0))
        return self.xp.where(x > 0, dy, self.slope.value * dy)


check_layer(ParametricReLU(), (4, 4, 3))

train, test = load_dataset("digits")
net = Sequential(Flatten(), Linear(64), ParametricReLU(), Linear(10))
trainer = Trainer(Model(net, train.input_shape), SGD(lr=0.05, momentum=0.9))
trainer.fit(train, test, epochs=5, batch_size=32)
print(f"test accuracy {trainer.evaluate(test)['accuracy']:.3f}")
