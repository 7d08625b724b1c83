"""Batches of one rank's shard, prepared by threads while the model computes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from itertools import count, islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from pydtnn.data.augment.augmentation import Augmentation
from pydtnn.data.batch import Batch, each, has_several_inputs, parts, plain_parts, shapes_of
from pydtnn.data.comparison import check_data, evenly_spaced
from pydtnn.data.dataset import Dataset, read_samples
from pydtnn.data.order import Shard, assign_shards, max_shards
from pydtnn.data.prepare import Prepare
from pydtnn.utils.collective import Ranks, collective
from pydtnn.utils.names import SuggestsNames
from pydtnn.utils.observer import NO_ACTIVITY, Activity, Kind, Observer
from pydtnn.utils.validate import check_int

if TYPE_CHECKING:
    from pydtnn.data.mixing import Mixing

Array = NDArray[Any]


class Lanes:
    """Report the batches that threads prepare, each on a lane of its own.

    Parameters
    ----------
    observer : Observer
    name : str
        Prefix of the names of the lanes. If it is empty, batches are prepared in the thread of
        `observer`.
    """

    def __init__(self, observer: Observer, name: str) -> None:
        self._observer, self._name = observer, name
        self._numbers = count()
        self._own = threading.local()

    def loading(self) -> AbstractContextManager[None]:
        """Return the context in which the calling thread prepares a batch."""
        lane = self._observer
        if self._name:
            lane = getattr(self._own, "lane", None) or lane.lane(
                f"{self._name} {next(self._numbers)}"
            )
            self._own.lane = lane
        return Activity(lane, Kind.LOAD, "batch")


DEFAULT_BATCH = 64
"""Samples per rank and step, if neither `batch_size` nor `global_batch_size` is set."""


MOVED, UNCHANGED = "moved", "unchanged"
"""What augmentation does with targets."""


class Loader(SuggestsNames):
    """The batches of one rank.

    Step s of epoch e uses ``dataset.shuffled(seed, e)[s * B : (s + 1) * B]``; each rank reads its
    slice. The order and the augmentation depend only on (seed, epoch, sample), not on ranks or
    threads; the loader therefore has no state to save: ``epoch(e, start=step)`` continues at any
    step.

    Parameters
    ----------
    dataset : Dataset
    global_batch_size : int
        B, the samples of a step on all ranks; the last step of an epoch has the remaining ones,
        unless `drop_last` omits them.
    rank, size : int, default 0 and 1
        This rank and the number of ranks.
    comm : Communicator, optional
        Instead of both: the ranks, whose data sets are compared. Collective: all ranks call it.
    seed : int, default 0
    shuffle : bool, default True
        False keeps the order of the data set, for evaluation.
    augment : sequence of Augmentation
        Applied in order, before normalisation; their randomness changes with the epoch. Masks,
        targets with the rows and columns of the images, are moved with them, without interpolation;
        what comes from outside has the label `Dataset.ignore_index`, or 0.
    mix : sequence of Mixing
        Mixtures of samples and labels after normalisation; `Batch.y` then contains probabilities.
    targets : {"moved", "unchanged"}
        "unchanged" leaves all targets as they are. By default, those that are neither classes nor
        masks, such as boxes, are refused if an augmentation moves pixels.
    dtype : dtype, default float32
        Type of the model, ``Batch.x``, and targets other than labels if it has at least 32 bits.
    prefetch : int, default 2
        Batches prepared in advance; with 0 each is prepared on request, in the caller's thread.
    threads : int, default 1
        Threads that prepare them.
    steps_per_epoch : int, optional
        A limit on the number of steps.
    drop_last : bool, default False
        Omit the last step of an epoch if it has fewer samples than the others.
    shards : int, optional
        Slices into which each batch is divided; a rank has consecutive ones. By default one per
        rank.
    raw : bool, default False
        Return uint8 images without augmentation and normalisation, which the device performs: see
        `Batch.inputs`. Other samples are prepared here in any case.
    cuts : sequence of (tuple of slice or None)
        The part of each sample, for each input, that this rank reads, if not all of it.
    observer : Observer, optional
        Receives every batch that is prepared, on the lane of the thread that prepares it.
    lanes : str, default "loader"
        Prefix of the names of these lanes: "loader 0".

    Attributes
    ----------
    equal_numbers : bool
        Whether all ranks have as many shards in every batch, of which the last may have no rows.
    prepare : Prepare
        Augmentation and normalisation, on the host or on the device; of the first input if samples
        have several.
    why_not_raw : str
        With `raw`, the reason why samples are prepared here, if they are; otherwise empty.

    Raises
    ------
    TypeError
        If `dataset` or `augment` have another type, or a number is not an int.
    ValueError
        If the batch is larger than the data (and `shuffle` is true), or there are more ranks than
        samples in a batch, or a number is out of range.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        global_batch_size: int,
        rank: int = 0,
        size: int = 1,
        comm: Ranks | None = None,
        seed: int = 0,
        shuffle: bool = True,
        augment: Sequence[Augmentation] = (),
        mix: Sequence[Mixing] = (),
        targets: str = MOVED,
        dtype: DTypeLike = np.float32,
        prefetch: int = 2,
        threads: int = 1,
        steps_per_epoch: int | None = None,
        drop_last: bool = False,
        shards: int | None = None,
        raw: bool = False,
        cuts: Sequence[tuple[slice, ...] | None] = (),
        observer: Observer | None = None,
        lanes: str = "loader",
    ) -> None:
        if comm is not None:
            rank, size = comm.rank, comm.size
        self.dataset, self.rank, self.size, self.prefetch = dataset, rank, size, prefetch
        self.global_batch_size, self.seed, self.shuffle = global_batch_size, seed, shuffle
        self._check(augment, threads)
        if mix:
            from pydtnn.data import mixing  # few trainings mix samples

            mixing.check_mixings("Loader", mix, dataset)
            self._mixing = mixing
        self._moved = _find_masks(dataset, augment, targets)
        if shards is not None and shards < size:
            raise ValueError(
                f"Loader: expected at most as many ranks as shards ({shards}), got {size}; use "
                "fewer ranks or more shards"
            )
        self.cuts = cuts
        if comm is not None:
            with collective(comm, "Loader"):
                check_data(comm, "Loader", [("data set", dataset)])
        self._lanes = None if observer is None else Lanes(observer, lanes if prefetch else "")
        raw = raw and not any(cuts)
        whole_steps, rest = divmod(len(dataset), global_batch_size)
        steps = whole_steps + (rest > 0 and not drop_last)
        if steps_per_epoch is not None and not 1 <= steps_per_epoch <= steps:
            raise ValueError(
                f"Loader: steps_per_epoch must be in 1..{steps} for {len(dataset)} samples in "
                f"batches of {global_batch_size}, got {steps_per_epoch}"
            )
        self.mix, self.shards = tuple(mix), shards or size
        self.equal_numbers = False
        self._steps = steps_per_epoch or steps
        shapes = shapes_of(dataset.input_shape)
        statistics = parts(dataset.statistics or (None,) * len(shapes))
        self._prepares = tuple(
            Prepare(augment, known, shape, dtype)
            for known, shape in zip(statistics, shapes, strict=True)
        )
        self.prepare = self._prepares[0]
        self.why_not_raw = ""
        if raw and len(shapes) > 1:
            self.why_not_raw = f"the samples of {dataset.name} have several inputs"
        elif raw:
            pixels = "" if dataset.pixels else f"{dataset.name} has no uint8 pixels"
            mixed = "samples are mixed" if mix else ""
            self.why_not_raw = pixels or mixed or self.prepare.why_not
        self._raw = raw and not self.why_not_raw
        # Threads start with their first task, so an unused pool has no cost.
        self._pool = (
            ThreadPoolExecutor(threads, thread_name_prefix="pydtnn-loader") if prefetch else None
        )

    def _check(self, augment: Sequence[Augmentation], threads: int) -> None:
        """Raise TypeError or ValueError for invalid arguments."""
        dataset, batch = self.dataset, self.global_batch_size
        check_dataset("Loader", dataset)
        if isinstance(augment, str) or not all(isinstance(a, Augmentation) for a in augment):
            raise TypeError(
                f"Loader: augment must be a list of augmentations, got {augment!r}; use "
                "create_augmentations('crop:4,flip')"
            )
        check_int("Loader", "seed", self.seed, at_least=0)
        check_int("Loader", "the global batch", batch, at_least=1)
        n = len(dataset)
        if n == 0:
            raise ValueError(f"Loader: expected at least one sample, got none in {dataset.name}")
        if self.shuffle and batch > n:
            raise ValueError(
                f"Loader: the global batch must be at most the {n} samples of {dataset.name}, got "
                f"{batch}; use a batch of at most {n} over all ranks"
            )
        check_int("Loader", "rank", self.rank, at_least=0, at_most=self.size - 1)
        check_int("Loader", "prefetch", self.prefetch, at_least=0)
        check_int("Loader", "threads", threads, at_least=1)
        if self.size > batch:
            raise ValueError(
                f"Loader: expected at most one rank per sample of the global batch "
                f"({batch}), got {self.size} ranks; use fewer ranks or a larger batch"
            )
        several = has_several_inputs(dataset.input_shape)
        if augment and (several or len(dataset.input_shape) != 3):
            raise ValueError(
                f"Loader: augmentation requires images (height, width, channels), got samples of "
                f"shape {dataset.input_shape} in {dataset.name}; augment them in its read"
            )
        for one in augment:
            if one.pixels and not dataset.pixels:
                raise ValueError(
                    f"Loader: {type(one).__name__} requires pixels, uint8 or in [0, 1], got other "
                    f"numbers in {dataset.name}; use crop, flip or cutout"
                )
            one.check(dataset.input_shape)

    def __len__(self) -> int:
        """Count the steps of an epoch."""
        return self._steps

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Return the batches of an epoch from step `start` on; loading begins immediately.

        An exception in a thread is raised when its batch is requested. Iteration may stop at any
        time.

        Raises
        ------
        ValueError
            If the epoch or step does not exist.
        """
        if epoch < 0 or not 0 <= start <= len(self):
            raise ValueError(
                f"Loader: epoch must be at least 0 and start in 0..{len(self)}, got epoch "
                f"{epoch}, start {start}"
            )
        n = len(self.dataset)
        order = self.dataset.shuffled(self.seed, epoch) if self.shuffle else np.arange(n)
        load, steps, pool = partial(self._load, order, epoch), range(start, len(self)), self._pool
        if pool is None:
            return (load(step) for step in steps)
        tasks = (pool.submit(load, step) for step in steps)  # begun when they are taken
        return _drain(deque(islice(tasks, self.prefetch)), tasks)

    def _load(self, order: NDArray[np.int64], epoch: int, step: int) -> Batch:
        with NO_ACTIVITY if self._lanes is None else self._lanes.loading():
            return self._make(order, epoch, step)

    def _make(self, order: NDArray[np.int64], epoch: int, step: int) -> Batch:
        chosen = order[step * self.global_batch_size : (step + 1) * self.global_batch_size]
        rows, shards = self._divide(len(chosen))
        samples = chosen[rows]
        wanted = self._mixing.with_partners(chosen, rows) if self.mix else samples
        x, y = read_samples(self.dataset, wanted, epoch)
        y = each(self._target, y)
        words = self.prepare.draw(self.seed, epoch, wanted)
        if any(self._moved):
            move = partial(self.prepare.move, words=words, fill=self.dataset.ignore_index or 0)
            y = each(lambda part, mask: move(part) if mask else part, y, self._moved)
        if self._raw and x.dtype == np.uint8:
            x = np.ascontiguousarray(x)
            return Batch(x, y, samples, step, len(chosen), shards, words, self.prepare)
        x = each(lambda part, prepare: prepare.on_host(part, words), x, self._prepares)
        if self.mix:
            x, y = self._mix(x, y, epoch, samples)
        if any(self.cuts):
            x = each(lambda part, cut: part if cut is None else part[:, *cut].copy(), x, self.cuts)
        return Batch(x, y, samples, step, len(chosen), shards)

    def _divide(self, n: int) -> tuple[slice, tuple[Shard, ...]]:
        """Return this rank's rows of a batch, and its shards."""
        rows, shards = assign_shards(n, self.shards, self.rank, self.size)
        if self.equal_numbers:
            most = max_shards(n, self.shards, self.size)
            end = rows.stop - rows.start
            shards += (Shard(None, slice(end, end)),) * (most - len(shards))
        return rows, shards

    def _mix(self, x: Array, y: Array, epoch: int, samples: Array) -> tuple[Array, Array]:
        mixing, classes = self._mixing, self.dataset.classes
        mixing.check_labels(self.dataset.name, y, classes)
        words = mixing.draw_words(self.seed, epoch, samples)
        x, y = mixing.mix_samples(self.mix, x, y, words, classes)
        return x, self._target(y)

    def _target(self, y: Array) -> Array:
        # losses use at least float32
        return y.astype(self.prepare.normalize.arithmetic) if y.dtype.kind == "f" else y

    def close(self) -> None:
        """Stop the threads and discard remaining batches."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _drain(waiting: deque[Future[Batch]], tasks: Iterator[Future[Batch]]) -> Iterator[Batch]:
    """Yield batches in the order of their steps for any number of threads."""
    try:
        while waiting:
            batch = waiting.popleft().result()
            waiting.extend(islice(tasks, 1))
            yield batch
    finally:
        for future in waiting:
            future.cancel()


def samples_of_step(
    dataset: Dataset, ranks: int, batch_size: int | None, global_batch_size: int | None
) -> int:
    """Return the samples of all ranks in a step.

    Parameters
    ----------
    dataset : Dataset
    ranks : int
    batch_size : int, optional
        Samples per rank; by default `DEFAULT_BATCH`, or fewer if the data set has fewer samples.
    global_batch_size : int, optional
        Samples of all ranks, which replace `batch_size`.
    """
    if global_batch_size is not None:
        return global_batch_size
    if batch_size is not None:
        return batch_size * ranks
    check_dataset("Trainer", dataset)
    return max(min(DEFAULT_BATCH * ranks, len(dataset)), 1)


def _find_masks(
    dataset: Dataset, augment: Sequence[Augmentation], targets: str
) -> tuple[bool, ...]:
    """Return for each target whether it is a mask, which is moved with its image.

    Raises
    ------
    ValueError
        If an augmentation moves pixels, and not the targets that depend on positions.
    """
    if targets not in (MOVED, UNCHANGED):
        raise ValueError(f"Loader: targets must be {MOVED!r} or {UNCHANGED!r}, got {targets!r}")
    moving = [change for change in augment if change.moves]
    if not moving or targets == UNCHANGED:
        return ()
    some = dataset.read_targets(evenly_spaced(len(dataset)))
    found = parts(plain_parts(dataset.name, "y", some))
    masks = tuple(part.shape[1:3] == dataset.input_shape[:2] for part in found)
    for part, mask in zip(found, masks, strict=True):
        refused = [c for c in moving if not mask or type(c).on_masks is Augmentation.on_masks]
        if refused and not _are_labels(part):
            kind = "masks" if mask else f"targets of shape {part.shape[1:]}"
            raise ValueError(
                f"Loader: {type(refused[0]).__name__} moves the pixels of images, and cannot move "
                f"the {kind} of {dataset.name} with them; move both in the data set's `read`, or "
                f"set targets={UNCHANGED!r} in `fit` if they do not depend on positions"
            )
    return masks


def _are_labels(y: Array) -> bool:
    """Return whether targets are one class for each sample, or several of which each is 0 or 1."""
    one = y.ndim == 1 and y.dtype.kind in "iu"
    return one or (y.ndim <= 2 and bool(((y == 0) | (y == 1)).all()))


def check_dataset(who: str, dataset: Any) -> None:
    """Raise TypeError if an object is not a data set or lacks attributes.

    Raises
    ------
    TypeError
        With a message that begins with `who`.
    """
    kind = type(dataset).__name__
    if not isinstance(dataset, Dataset):
        raise TypeError(
            f"{who}: expected a data set, got {kind}; use ArrayDataset(x, y) for arrays or columns "
            "of a frame, and a Dataset with read(indices) for other samples"
        )
    for name in ("name", "input_shape", "classes"):
        if not hasattr(dataset, name):
            raise TypeError(f"{who}: the data set {kind} has no `{name}`; set it")
