"""Train a small GPT on the bytes of a text, or on its tokens, then let it continue one.

python examples/gpt.py                                # the sources of Python's standard library
python examples/gpt.py FILE_OR_FOLDER --steps 2000
python examples/gpt.py FILE --tokenizer tokenizer.json  # see docs/models.md
mpirun -np 2 python examples/gpt.py                   # data-parallel
"""

import argparse

from pydtnn import Model, Trainer, create_communicator
from pydtnn.data import Tokenizer, load_text
from pydtnn.models import gpt
from pydtnn.optimizers import AdamW
from pydtnn.parallel.schemes import create_scheme
from pydtnn.tools.generation import generate

parser = argparse.ArgumentParser(description="Train a small GPT and let it continue a text.")
parser.add_argument("text", nargs="?", help="file or folder; default: Python's standard library")
parser.add_argument("--length", type=int, default=64, help="tokens of a sample")
parser.add_argument("--tokenizer", help="tokenizer.json; default: tokens are bytes")
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--begin", default="def ", help="text that is continued")
parser.add_argument("--count", type=int, default=200, help="tokens that are generated")
parser.add_argument("--temperature", type=float, default=0.7)
args = parser.parse_args()


comm = create_communicator()
train, test = load_text(args.text, length=args.length, tokenizer=args.tokenizer)
model = Model(gpt(train.classes, (args.length,), depth=2, heads=4, width=64), (args.length,))
exchange = create_scheme("allreduce", comm)
trainer = Trainer(model, AdamW(lr=3e-3), metrics=["perplexity"], exchange=exchange)
steps = min(args.steps, len(train) // 32)
epochs = -(-args.steps // steps)
trainer.fit(train, epochs=epochs, steps_per_epoch=steps, global_batch_size=32)
found = trainer.evaluate(test.subset(range(min(len(test), 512))))
if comm.rank == 0:
    print(f"{comm.size} ranks: test perplexity {found['perplexity']:.1f}")
    pairs = Tokenizer(args.tokenizer) if args.tokenizer else None
    begin = args.begin.encode()
    tokens = list(pairs.encode(begin) if pairs else begin)
    text = generate(model, tokens, args.count, temperature=args.temperature)
    print(pairs.decode(text) if pairs else bytes(text.tolist()).decode(errors="replace"))
