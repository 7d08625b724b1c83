"""Train a small GPT on the bytes of a text, then let it continue one.

python examples/gpt.py                     # the sources of Python's standard library
python examples/gpt.py FILE_OR_FOLDER --steps 2000
mpirun -np 2 python examples/gpt.py        # data-parallel
"""

import argparse

import numpy as np

from pydtnn import Loader, Model, Trainer
from pydtnn.comm import create_communicator
from pydtnn.data import load_text
from pydtnn.models import gpt
from pydtnn.optimizers import AdamW

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("text", nargs="?", help="file or folder; default: Python's standard library")
parser.add_argument("--length", type=int, default=64, help="bytes of a sample")
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--begin", default="def ", help="text that is continued")
parser.add_argument("--count", type=int, default=200, help="bytes that are generated")
parser.add_argument("--temperature", type=float, default=0.7)
args = parser.parse_args()


def generate(model: Model, begin: bytes, count: int, temperature: float) -> bytes:
    """Append bytes, each drawn from the probabilities after those before it."""
    rng, text = np.random.default_rng(0), bytearray(begin)
    (length,) = model.input_shapes[0]
    for _ in range(count):
        seen = text[-length:]
        window = np.zeros((1, length), model.dtype)
        window[0, : len(seen)] = list(seen)  # what follows has no influence: attention is causal
        logits = model.predict(window)[0, len(seen) - 1].astype("float64") / temperature
        probabilities = np.exp(logits - logits.max())
        text.append(rng.choice(len(logits), p=probabilities / probabilities.sum()))
    return bytes(text)


comm = create_communicator()
train, test = load_text(args.text, length=args.length)
model = Model(gpt(256, (args.length,), layers=2, heads=4, features=64), (args.length,))
trainer = Trainer(model, AdamW(lr=3e-3), metrics=["perplexity"], comm=comm)
epochs = -(-args.steps * 32 // len(train))
steps = min(args.steps, len(train) // 32)
trainer.fit(
    Loader(train, global_batch_size=32, rank=comm.rank, size=comm.size, steps_per_epoch=steps),
    epochs=epochs,
)
found = trainer.evaluate(test.subset(range(min(len(test), 256))))
if comm.rank == 0:
    print(f"perplexity {found['perplexity']:.2f}")
    print(
        generate(model, args.begin.encode(), args.count, args.temperature).decode(errors="replace")
    )
