"""Loss against bytes: a small GPT on text with schemes that communicate rarely, at equal samples.

    python -m benchmarks.rare --output rare.png        # 4 ranks that are threads

All schemes start from the same weights, after `--pretrained` steps with all-reduce as in the paper
of DiLoCo, and train on the same samples with the same inner optimizer. Losses and bytes do not
depend on the speed of the machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from pydtnn import Model, Trainer, load_dataset, run_threads
from pydtnn.comm import Communicator
from pydtnn.comm.traffic import Traffic
from pydtnn.data.text import TokenDataset
from pydtnn.models import create_net
from pydtnn.optimizers import AdamW
from pydtnn.parallel.exchange import GradientExchange
from pydtnn.parallel.schemes import AllReduce, DiLoCo, LocalSGD, StreamingDiLoCo
from pydtnn.schedules import Constant, Cosine, WarmUp
from pydtnn.tools.schedules.allreduce_picture import INK
from pydtnn.tools.schedules.figures import PALETTE, STYLE

LENGTH, TESTED = 64, 512
"""Tokens of a sample, and samples that are evaluated."""

Scheme = Callable[[Communicator], GradientExchange]

SCHEMES: dict[str, Scheme] = {
    "all-reduce": AllReduce,
    "DiLoCo": DiLoCo,
    "Streaming DiLoCo": StreamingDiLoCo,
    "local SGD": partial(LocalSGD, period=50),
}


@contextmanager
def counted(exchange: GradientExchange) -> Iterator[Traffic]:
    """Count what the scheme alone sends: no losses, no evaluation."""
    part = Traffic()

    def call(method: Callable[..., None], *args: Any) -> None:
        with exchange.comm.traffic.counted(part):
            method(*args)

    for name in ("bucket_ready", "update"):
        setattr(exchange, name, partial(call, getattr(exchange, name)))
    yield part


def pretrain(given: argparse.Namespace, comm: Communicator) -> dict[str, Any]:
    """Return the weights with which all schemes start."""
    data, _ = load_dataset("text", length=LENGTH)
    model = Model(create_net("gpt_nano", 256, (LENGTH,)), (LENGTH,))
    rule = AdamW(WarmUp(Constant(given.lr), 100), clip_norm=1.0)
    trainer = Trainer(model, rule, exchange=AllReduce(comm), progress=False)
    if given.pretrained:
        trainer.fit(
            data,
            epochs=1,
            steps_per_epoch=given.pretrained,
            global_batch_size=given.batch,
            seed=2,
        )
    return model.state()


def train(
    scheme: Scheme, start: dict[str, Any], given: argparse.Namespace, comm: Communicator
) -> list[list[float]]:
    """Return the steps, MB sent and test losses after each epoch, an epoch being a part of all."""
    data, test = load_dataset("text", length=LENGTH)
    test = TokenDataset(test.tokens[: LENGTH * TESTED + 1], LENGTH, like=data)
    model = Model(create_net("gpt_nano", 256, (LENGTH,)), (LENGTH,))
    model.load(start)
    exchange, found = scheme(comm), []
    with counted(exchange) as sent:

        def note(trainer: Trainer) -> None:
            loss = trainer.history[-1]["val_loss"]
            found.append([trainer.optimizer.iterations, sent.bytes / 1e6, loss])
            if comm.rank == 0:
                print(*found[-1], flush=True)

        rule = AdamW(WarmUp(Cosine(given.lr, given.steps), 100), clip_norm=1.0)
        trainer = Trainer(model, rule, exchange=exchange, callbacks=[note], progress=False)
        trainer.fit(
            data,
            test,
            epochs=given.steps // given.every,
            steps_per_epoch=given.every,
            global_batch_size=given.batch,
            seed=1,
        )
    return found


def main() -> None:
    """Train in each way, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--pretrained", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=200, help="steps between evaluations")
    parser.add_argument("--batch", type=int, default=32, help="samples of all ranks")
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--only", nargs="+", choices=SCHEMES, default=list(SCHEMES))
    parser.add_argument("--output", help="file of the picture")
    given = parser.parse_args()
    courses = {}
    start = run_threads(given.ranks, partial(pretrain, given))[0]
    for name in given.only:
        print(name, flush=True)
        courses[name] = run_threads(given.ranks, partial(train, SCHEMES[name], start, given))[0]
    *_, (_, most, best) = courses[given.only[0]]
    print(f"{'':18}  MB sent by a rank  of {given.only[0]}  test loss  difference")
    for name, course in courses.items():
        *_, (_, sent, loss) = course
        print(f"{name:18} {sent:18.2f} {sent / most:14.4f} {loss:10.4f} {loss / best - 1:+11.1%}")
    if given.output:
        draw(courses, given)


def draw(courses: dict[str, list[list[float]]], given: argparse.Namespace) -> None:
    """Draw the test loss over the bytes of each scheme."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7, 4))
        axes = figure.add_subplot()
        for color, (name, course) in zip(PALETTE[::2], courses.items(), strict=False):
            _, sent, losses = zip(*course, strict=True)
            axes.semilogx(sent, losses, "o-", color=color, ms=3, lw=1.4, label=name)
        axes.legend(frameon=False, labelcolor="linecolor")
        tokens = given.steps * given.batch * LENGTH / 1e6
        title = (
            f"GPT of 100,000 parameters, {given.ranks} ranks, {tokens:.1f} million tokens each way"
        )
        axes.set_title(title, color=INK, size=10)
        axes.set_xlabel("MB that a rank has sent")
        axes.set_ylabel("test loss")
        figure.savefig(given.output, dpi=150)


if __name__ == "__main__":
    main()
