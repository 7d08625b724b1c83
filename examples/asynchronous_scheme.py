"""No rank waits for another: ``mpirun -np 4 python examples/asynchronous_scheme.py``.

Each rank trains alone. After a step it sends its parameters to one of the others, unless its last
message is still on its way, and averages its own with those that have arrived, from any of
them (Lian et al., "Asynchronous decentralized parallel SGD", 2018, without the locks). Rank 1
sleeps after each step here: with all-reduce, all ranks would be as slow.
"""

import time

import numpy as np

from pydtnn import Callback, Model, Trainer, create_communicator, load_dataset
from pydtnn.models import create_net
from pydtnn.optimizers import SGD
from pydtnn.parallel.exchange import GradientExchange


class AsynchronousGossip(GradientExchange):
    """Average with the parameters that have arrived, from any rank."""

    def start(self, buckets):
        super().start(buckets)
        length = sum(len(bucket.values) for bucket in buckets)
        self.outgoing, self.incoming = np.empty((2, length), buckets[0].values.dtype)
        self.sent = np.zeros(self.comm.size, int)  # messages to each rank so far
        self.received = 0
        self.sending = self.receiving = None

    def loss_scale(self, local, total):
        return 1 / max(local, 1)

    def update(self, optimizer):
        self.step_alone(optimizer)
        if self.comm.size > 1:
            self.receive()
            if self.sending is None or self.sending.test():
                self.send(optimizer.iterations)
        self.samples = 1  # equal weights when parameters are averaged for evaluation

    def receive(self):
        while self.receiving is not None and self.receiving.test():
            self.received += 1
            begin = 0
            for bucket in self.buckets:
                end = begin + len(bucket.values)
                bucket.values[...] = (bucket.values + self.incoming[begin:end]) / 2
                begin = end
            self.receiving = self.comm.irecv(self.incoming, None)
        self.receiving = self.receiving or self.comm.irecv(self.incoming, None)

    def send(self, step):
        to = (self.comm.rank + 1 + step % (self.comm.size - 1)) % self.comm.size
        np.concatenate([bucket.values for bucket in self.buckets], out=self.outgoing)
        self.sending = self.comm.isend(self.outgoing, to)
        self.sent[to] += 1

    def average_parameters(self):
        self.settle()
        super().average_parameters()

    def settle(self):
        """Receive and drop all messages that are on their way; all ranks call it together."""
        expected = sum(self.comm.gather_object(self.sent))[self.comm.rank]
        while self.received < expected:
            self.receiving = self.receiving or self.comm.irecv(self.incoming, None)
            self.receiving.wait()
            self.receiving, self.received = None, self.received + 1
        if self.receiving is not None:  # no message is left for it but one of this rank's own
            own = self.comm.isend(np.zeros_like(self.incoming), self.comm.rank)
            self.receiving.wait()
            own.wait()
        if self.sending is not None:
            self.sending.wait()
        self.sending = self.receiving = None


class Sleeper(Callback):
    """Sleep after each step on rank 1, and time the others."""

    def on_epoch_start(self, trainer):
        self.begin = time.perf_counter()

    def on_step_end(self, trainer):
        if trainer.own_steps:  # the last step of an epoch sums the losses of all ranks
            self.seconds = time.perf_counter() - self.begin
        if trainer.comm.rank == 1:
            time.sleep(0.02)


if __name__ == "__main__":
    comm = create_communicator()
    train, test = load_dataset("digits")
    model = Model(create_net("mlp", train.classes, train.input_shape), train.input_shape)
    sleeper = Sleeper()
    trainer = Trainer(model, SGD(lr=0.05), exchange=AsynchronousGossip(comm), callbacks=[sleeper])
    trainer.fit(train, test, epochs=5, global_batch_size=32 * comm.size)
    results = trainer.evaluate(test)
    seconds = comm.gather_object(sleeper.seconds)
    if comm.rank == 0:
        own = ", ".join(f"{one:.2f}" for one in seconds)
        print(f"{comm.size} ranks: test accuracy {results['accuracy']:.3f}; last epoch {own} s")
