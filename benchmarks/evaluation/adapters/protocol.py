"""What all adapters share: the job, the batches, and the measurement of steps.

An adapter is started on every rank as ``python adapter.py JOB`` with the environment variables
RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or by mpirun. It needs NumPy and its framework only.
"""

import ctypes
import json
import os
import resource
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np

RANKS = [os.environ[n] for n in ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "RANK") if n in os.environ]
TESTED = 1000  # samples of the test set at once
RANK = int(RANKS[0]) if RANKS else 0


class Job:
    """What a run is: the content of the file JOB, and the arrays beside it.

    Attributes: ranks, threads, batch (samples of a rank), steps, warm_up, rate, momentum, layers,
    slower (a share of each step that is added to it), epoch (steps of an epoch, or 0 for samples in
    the order of the file), seed (of the order), addresses (of the hosts of the ranks), and
    `weights`, a list of arrays, see `networks.py`.
    """

    def __init__(self) -> None:
        self.folder = Path(sys.argv[1]).parent
        self.__dict__.update(json.loads(Path(sys.argv[1]).read_text()))
        self.rank = RANK
        os.sched_setaffinity(0, self.cores[RANK])
        arrays = np.load(self.arrays)
        self.x, self.y = arrays["x"], arrays["y"]
        names = {"x", "y", "test_x", "test_y"}
        self.weights = [arrays[f"w{i}"] for i in range(len({*arrays.files} - names))]
        self.test = [arrays[name] for name in ("test_x", "test_y")] if self.epoch else []
        self.port = int(os.environ.get("MASTER_PORT", 0))

    def batch_of(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return this rank's samples of a step, NHWC, and their labels."""
        epoch, step = divmod(step, self.epoch) if self.epoch else (0, step)
        first = (step * self.ranks + self.rank) * self.batch
        at = np.arange(first, first + self.batch) % len(self.x)
        if self.epoch:
            at = np.random.default_rng([self.seed, epoch]).permutation(len(self.x))[at]
        return self.x[at], self.y[at]

    def measure(self, step, sent=None, version="", trace=None, predict=None) -> None:
        """Time `step(x, y)`, which returns this rank's loss when the step is done.

        `sent()` returns the bytes and the messages sent so far; by default, those through TCP. The
        context `trace(path)` records a profile, its result is called around each further step.
        `predict(x)` returns the outputs for samples of the test set, after each epoch.
        """
        count = sent or _through_tcp
        losses, times, accuracy = [], [], []
        for index in range(self.warm_up + self.steps):
            if index == self.warm_up:
                before, link = np.array(count()), _link_bytes()
            x, y = self.batch_of(index)
            begin = time.perf_counter()
            loss = float(step(x, y))
            end = begin + (time.perf_counter() - begin) * (1 + self.slower)
            while time.perf_counter() < end:
                pass
            times.append(time.perf_counter() - begin)
            losses.append(loss)
            if predict and self.epoch and (index + 1) % self.epoch == 0:
                accuracy.append(self._accuracy(predict))
            if index == 0:
                ready = time.time() - self.started
        nbytes, messages = ((np.array(count()) - before) / self.steps).tolist()
        found = {
            "version": version,
            "losses": losses,
            "times": times,
            "accuracy": accuracy,
            "start_up": ready,
            "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "bytes": nbytes,
            "messages": messages,
            "counted_by": "framework" if sent else "TCP",
            "link_bytes": (_link_bytes() - link) / self.steps,
            "cpu": time.process_time(),
            "traced": self._profile(step, trace) if trace and self.traced else [],
        }
        (self.folder / f"result-{self.rank}.json").write_text(json.dumps(found))

    def _accuracy(self, predict) -> float:
        x, y = self.test
        parts = [np.asarray(predict(x[i : i + TESTED])) for i in range(0, len(x), TESTED)]
        return float(np.mean(np.concatenate(parts).argmax(1) == y))

    def _profile(self, step, trace) -> list[int]:
        """Record further steps; return when they began, in ns of the machine's clock."""
        begun = []
        with trace(self.folder / f"trace-{self.rank}.json") as annotate:
            for index in range(self.traced):
                x, y = self.batch_of(self.warm_up + self.steps + index)
                with annotate(index):
                    begun.append(time.time_ns())
                    float(step(x, y))
        return begun


@contextmanager
def trace_sums(path: Path, owner, name: str):
    """Record steps, and the calls of a method of `owner` that sums gradients."""
    events, method = [], getattr(owner, name)

    def timed_sum(*given, **named):
        with timed(events, "sum"):
            return method(*given, **named)

    setattr(owner, name, timed_sum)
    yield lambda index: timed(events, "step")
    write_events(path, events)


@contextmanager
def timed(events, what):
    """Append an event by the machine's clock, see `write_events`."""
    begin = time.time_ns() / 1e3
    yield
    events.append((what, "main", begin, time.time_ns() / 1e3 - begin))


def write_events(path: Path, events) -> None:
    """Write events (name, thread, start in us, duration in us) as those of Chrome's format."""
    keys = ("name", "tid", "ts", "dur")
    threads = {event[1] for event in events}
    written = [{"ph": "X", **dict(zip(keys, event, strict=True))} for event in events]
    written += [{"name": "thread_name", "tid": one, "args": {"name": one}} for one in threads]
    path.write_text(json.dumps({"traceEvents": written}))


def _through_tcp() -> tuple[float, float]:
    """Return the bytes and the messages that this process has sent through TCP (`messages.c`)."""
    here = ctypes.CDLL(None)
    if not hasattr(here, "sent_bytes"):
        return np.nan, np.nan
    here.sent_bytes.restype = ctypes.c_long
    return here.sent_bytes(), here.sent_messages()


def _link_bytes() -> int:
    """Return the bytes that the network cards of this host have sent."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    cards = dict(line.split(":") for line in lines)
    return sum(int(own.split()[8]) for card, own in cards.items() if card.strip() != "lo")
