"""The recipe of `cifar.py`, carried out by pydtnn and by PyTorch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.gpu.work import THREADS, compiled, create_backend, finish, settle_torch
from pydtnn.callbacks import Callback
from pydtnn.data import Batch, Dataset, Loader, create_augmentations, load_dataset
from pydtnn.data.order import below
from pydtnn.model import Model
from pydtnn.models import create_net
from pydtnn.optimizers import SGD
from pydtnn.schedules import get_schedule

BATCH, LR, MOMENTUM, DECAY = 128, 0.4, 0.9, 5e-4
CROP = 4
AUGMENT = f"crop:{CROP},flip"
FIRST = 10  # steps: algorithms are chosen, the graph is captured, PyTorch compiles

Told = Callable[[dict[str, Any]], None]


class Recipe:
    """What both sides do.

    Parameters
    ----------
    dataset, model, folder : str
    samples : int
        Of the training set; 0 takes all. Fewer are a way to try the script out.
    epochs : int
    dtype, device : str
    """

    def __init__(
        self,
        dataset: str,
        model: str,
        folder: str,
        samples: int,
        epochs: int,
        dtype: str,
        device: str,
    ) -> None:
        train, self.test = load_dataset(dataset, data_dir=folder or None)
        self.train: Dataset = train.subset(np.arange(samples)) if samples else train
        assert self.train.statistics is not None  # measured now, and in nobody's time
        self.model, self.epochs, self.dtype, self.device = model, epochs, dtype, device
        self.steps = -(-len(self.train) // BATCH)
        self.rate = get_schedule("triangular", LR, epochs * self.steps, self.steps)

    def network(self, **options: Any) -> Model:
        """Make the model with its initial weights, which depend on its names alone."""
        net = create_net(self.model, self.train.classes, self.train.input_shape)
        return Model(net, self.train.input_shape, **options)


class Clock(Callback):
    """Tells when the first steps and each epoch are over."""

    def __init__(self, told: Told, synchronize: Callable[[], None]) -> None:
        self.told, self.synchronize = told, synchronize
        self.start, self.steps = time.perf_counter(), 0
        self.first = 0.0

    def on_step_end(self, trainer: Any) -> None:
        """Count the steps."""
        self.steps += 1
        if self.steps == FIRST:
            self.synchronize()
            self.first = time.perf_counter() - self.start

    def on_epoch_end(self, trainer: Any) -> None:
        """Tell the loss."""
        self.epoch(trainer.epoch, trainer.logs["loss"])

    def epoch(self, epoch: int, loss: float) -> None:
        """Tell the loss of an epoch."""
        seconds = time.perf_counter() - self.start
        self.told({"epoch": epoch, "loss": loss, "seconds": seconds})


def ours(recipe: Recipe, told: Told) -> dict[str, float]:
    """Train with pydtnn; return accuracy and seconds."""
    from pydtnn.comm import create_communicator
    from pydtnn.parallel.exchange import AllReduce
    from pydtnn.training.trainer import Trainer

    backend = create_backend(recipe.device)
    model = recipe.network(backend=backend, dtype=recipe.dtype)
    clock = Clock(told, lambda: finish(backend))
    trainer = Trainer(
        model,
        SGD(recipe.rate, momentum=MOMENTUM, weight_decay=DECAY),
        exchange=AllReduce(create_communicator("serial")),
        callbacks=[clock],
        progress=False,
    )
    clock.start = time.perf_counter()
    trainer.fit(
        recipe.train,
        epochs=recipe.epochs,
        batch_size=BATCH,
        augment=create_augmentations(AUGMENT),
        loader_threads=THREADS,
    )
    finish(backend)
    trained = time.perf_counter()
    accuracy = trainer.evaluate(recipe.test, batch_size=1000)["accuracy"]
    return results(accuracy, clock, trained)


def results(accuracy: float, clock: Clock, trained: float) -> dict[str, float]:
    """Collect what a side has to tell."""
    return {
        "accuracy": float(accuracy),
        "seconds": trained - clock.start,
        "first": clock.first,
        "evaluation": time.perf_counter() - trained,
    }


class OnTorch:
    """Batches of a loader for PyTorch: brought to the device, augmented and normalised there.

    Parameters
    ----------
    loader : Loader
        With `raw`.
    device : str
    """

    def __init__(self, loader: Loader, device: str) -> None:
        import torch

        self.torch, self.loader, self.device = torch, loader, device
        self.stream = torch.cuda.Stream() if device == "cuda" else None
        scale, shift = loader.prepare.normalize.coefficients(np.uint8)
        fill = np.rint(255 * loader.prepare.normalize.mean).astype("uint8")
        self.scale, self.shift, self.fill = (
            torch.from_numpy(np.array(values)).to(device) for values in (scale, shift, fill)
        )
        self.scale, self.shift = self.scale.float(), self.shift.float()

    def epoch(self, epoch: int) -> Iterator[tuple[Any, Any]]:
        """Return images (N, C, H, W) in `channels_last` and labels, sent one batch ahead."""
        ahead = None
        for batch in self.loader.epoch(epoch):
            sent = self.send(batch)
            if ahead is not None:
                yield self.arrived(*ahead)
            ahead = sent
        if ahead is not None:
            yield self.arrived(*ahead)

    def send(self, batch: Batch) -> tuple[Any, Any, Any]:
        """Begin to bring a batch to the device."""
        if self.stream is None:
            return *self.prepared(batch), None
        with self.torch.cuda.stream(self.stream):
            return *self.prepared(batch), self.stream.record_event()

    def arrived(self, x: Any, y: Any, event: Any) -> tuple[Any, Any]:
        """Let the current stream have a batch."""
        if event is not None:
            current = self.torch.cuda.current_stream()
            current.wait_event(event)
            for tensor in (x, y):
                tensor.record_stream(current)
        return x, y

    def prepared(self, batch: Batch) -> tuple[Any, Any]:
        """Do what `batch.prepare` does."""
        assert batch.prepare is not None
        x, words = self.bring(batch.x), batch.words
        if batch.prepare.augment:
            assert words is not None
            n, height, width, channels = batch.x.shape
            top = below(words[:, 0], 2 * CROP + 1)[:, None] + np.arange(height)
            left = below(words[:, 1], 2 * CROP + 1)[:, None] + np.arange(width)
            mirrored = (words[:, 4] >> np.uint32(31)).astype(bool)
            left[mirrored] = left[mirrored, ::-1]
            padded = self.fill.expand(n, height + 2 * CROP, width + 2 * CROP, channels).clone()
            padded[:, CROP:-CROP, CROP:-CROP] = x
            rows, columns = self.bring(top), self.bring(left)
            images = self.torch.arange(n, device=self.device)[:, None, None]
            x = padded[images, rows[:, :, None], columns[:, None, :]]
        return (x * self.scale + self.shift).permute(0, 3, 1, 2), self.bring(batch.y)

    def bring(self, array: np.ndarray) -> Any:
        """Copy an array by way of pinned memory."""
        tensor = self.torch.from_numpy(np.ascontiguousarray(array))
        if self.stream is None:
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)


def theirs(recipe: Recipe, told: Told, peer: str) -> dict[str, float]:
    """Train with PyTorch; return accuracy and seconds."""
    from benchmarks.common.torch_twin import Twin

    torch = settle_torch()
    device = recipe.device
    twin = Twin(recipe.network(backend="numpy", fuse=False)).to(device)
    decayed = [p for p in twin.parameters() if p.ndim > 1]
    others = [p for p in twin.parameters() if p.ndim <= 1]
    optimizer = torch.optim.SGD(
        [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}],
        LR,
        momentum=MOMENTUM,
        fused=True,
    )

    def forward(x: Any) -> Any:
        with torch.autocast(device, torch.bfloat16, enabled=recipe.dtype == "bfloat16"):
            return twin(x).float()

    def loss_of(x: Any, y: Any) -> Any:
        return torch.nn.functional.cross_entropy(forward(x), y)

    fast = compiled(loss_of) if peer == "compiled" else loss_of
    options: dict[str, Any] = {"raw": True, "threads": THREADS, "prefetch": 2 * THREADS}
    augment = create_augmentations(AUGMENT)
    step = 0

    def synchronize() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    clock = Clock(told, synchronize)
    with Loader(recipe.train, global_batch_size=BATCH, augment=augment, **options) as loader:
        batches = OnTorch(loader, device)
        clock.start = time.perf_counter()
        for epoch in range(recipe.epochs):
            total = torch.zeros((), device=device)
            for x, y in batches.epoch(epoch):
                for group in optimizer.param_groups:
                    group["lr"] = recipe.rate(step)
                optimizer.zero_grad(set_to_none=True)
                loss = (fast if len(x) == BATCH else loss_of)(x, y)
                loss.backward()
                optimizer.step()
                total += loss.detach() * len(x)
                step += 1
                clock.on_step_end(None)
            clock.epoch(epoch + 1, float(total) / len(recipe.train))
    synchronize()
    trained = time.perf_counter()
    twin.eval()
    right = 0
    plain = {"global_batch_size": 1000, "shuffle": False, "raw": True}
    with torch.no_grad(), Loader(recipe.test, **plain) as loader:
        for x, y in OnTorch(loader, device).epoch(0):
            right += int((forward(x).argmax(dim=1) == y).sum())
    return results(right / len(recipe.test), clock, trained)
