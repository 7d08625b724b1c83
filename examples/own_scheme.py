"""Write a parallel scheme and train with it: ``mpirun -np 2 python examples/own_scheme.py``.

Ranks send the signs of their gradients and follow the majority (Bernstein et al., "signSGD with
majority vote", 2019).
"""

import numpy as np

from pydtnn import Model, Trainer, create_communicator, load_dataset
from pydtnn.models import create_net
from pydtnn.optimizers import SGD
from pydtnn.parallel.exchange import AllReduce


class MajorityVote(AllReduce):
    """All-reduce of signs."""

    sums_gradients = False  # these are no longer gradients

    def bucket_ready(self, bucket):
        np.sign(bucket.grads, out=bucket.grads)
        super().bucket_ready(bucket)

    def update(self, optimizer):
        optimizer.step(self.vote)

    def vote(self, bucket):
        self.wait(bucket)
        np.sign(bucket.grads, out=bucket.grads)


comm = create_communicator()
train, test = load_dataset("digits")
model = Model(create_net("mlp", train.classes, train.input_shape), train.input_shape)
trainer = Trainer(model, SGD(lr=0.001), exchange=MajorityVote(comm))
trainer.fit(train, test, epochs=5, global_batch_size=32)
results = trainer.evaluate(test)
if comm.rank == 0:
    print(f"{comm.size} ranks: test accuracy {results['accuracy']:.3f}")
