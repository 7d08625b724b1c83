"""Synthetic images are worth learning: a ResNet tells them apart, a linear model does not."""

from __future__ import annotations

from pydtnn.comm import create_communicator
from pydtnn.data import load_dataset
from pydtnn.model import Model
from pydtnn.models import create_net
from pydtnn.optimizers import SGD
from pydtnn.parallel.exchange import AllReduce
from pydtnn.schedules import Triangular
from pydtnn.training.trainer import Trainer


def test_resnet20_passes_70_percent_in_200_steps_of_32_images() -> None:
    """It comes to 80 %. The linear half is in `test_synthetic.py`: below 40 %."""
    train, test = load_dataset("synthetic", samples=32 * 200, test_samples=500)
    model = Model(create_net("resnet20", train.classes, train.input_shape), train.input_shape)
    trainer = Trainer(
        model,
        SGD(Triangular(0.1, 200), momentum=0.9, weight_decay=1e-4),
        exchange=AllReduce(create_communicator("serial")),
    )
    trainer.fit(train, epochs=1, batch_size=32)
    assert trainer.evaluate(test)["accuracy"] > 0.7
