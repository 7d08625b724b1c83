"""Log lines of MLPerf training, which the compliance checker of MLCommons reads."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydtnn.comm.agree import on_rank_0
from pydtnn.training.callback import Callback, Training, write_if_possible
from pydtnn.utils import clock
from pydtnn.utils.files import write_file


class MLPerfLog(Callback):
    """Write the log of MLPerf training to a file, on rank 0: lines ``:::MLLOG {...}``.

    The initialisation lasts from the creation of this object to the start of training; each epoch
    has its training and its evaluation, with the accuracy (or the validation loss) as
    `eval_accuracy`. Times are those of the run's clock, so those of virtual ranks are virtual.

    Parameters
    ----------
    path : str or Path
        Replaced when training starts.
    facts : mapping
        Values by key, logged once: "submission_benchmark", "seed", "train_samples", ...

    References
    ----------
    https://github.com/mlcommons/logging, constants of `mllog`.
    """

    reads_gradients = False

    def __init__(self, path: str | Path, facts: Mapping[str, Any]) -> None:
        self.path, self.facts = Path(path), dict(facts)
        self._origin = time.time_ns() - clock.now_ns()
        self._lines: list[str] = []
        self._before = 0.0
        self._add("cache_clear", False)  # the key is required; no cache is cleared
        self._add("init_start", kind="INTERVAL_START")

    def on_fit_ready(self, trainer: Training, epochs: int, steps: int) -> None:
        """Write the file, so that an error of the folder is raised before any work."""
        if trainer.epoch + trainer.step == 0 and not trainer.recovered:
            del self._lines[2:]  # of an earlier training
        optimizer = trainer.optimizer
        facts = {
            **self.facts,
            "global_batch_size": trainer.global_batch_size,
            "opt_name": type(optimizer).__name__.lower(),
            "opt_base_learning_rate": optimizer.lr_now,
            "opt_weight_decay": optimizer.weight_decay,
        }
        for key, value in facts.items():
            self._add(key, value)
        self._add("init_stop", kind="INTERVAL_END")
        self._add("run_start", kind="INTERVAL_START")
        on_rank_0(trainer.comm, self._write)

    def on_epoch_start(self, trainer: Training) -> None:
        """Log the start of an epoch."""
        self._before = trainer.seconds["evaluation"]
        self._add("epoch_start", kind="INTERVAL_START", epoch_num=trainer.epoch + 1)

    def on_epoch_end(self, trainer: Training) -> None:
        """Log the end of an epoch, and its evaluation, and write. Collective: all ranks call it."""
        number: dict[str, Any] = {"epoch_num": trainer.epoch}
        logs = trainer.logs
        evaluated = trainer.seconds["evaluation"] - self._before
        self._add("epoch_stop", kind="INTERVAL_END", ago=evaluated, **number)
        self._add("eval_start", kind="INTERVAL_START", ago=evaluated, **number)
        self._add("eval_stop", kind="INTERVAL_END", **number)
        found = logs.get("val_accuracy", logs.get("val_loss", math.nan))
        self._add("eval_accuracy", found if math.isfinite(found) else None, **number)
        write_if_possible(trainer.comm, self._write)

    def on_fit_end(self, trainer: Training) -> None:
        """Log the end of the run."""
        self._stop(trainer, "success")

    def on_interrupt(self, trainer: Training) -> None:
        """Log the end of the run."""
        self._stop(trainer, "aborted")

    def _stop(self, trainer: Training, status: str) -> None:
        self._add("run_stop", kind="INTERVAL_END", status=status)
        write_if_possible(trainer.comm, self._write)

    def _add(
        self,
        key: str,
        value: Any = None,
        *,
        kind: str = "POINT_IN_TIME",
        ago: float = 0.0,
        **metadata: Any,
    ) -> None:
        now = (self._origin + clock.now_ns()) / 1e6 - 1e3 * ago
        line: dict[str, Any]
        line = {"namespace": "", "time_ms": round(now), "event_type": kind, "key": key}
        line |= {"value": value, "metadata": {"file": "mlperf.py", "lineno": 0, **metadata}}
        self._lines.append(f":::MLLOG {json.dumps(line)}\n")

    def _write(self) -> None:
        write_file("MLPerfLog", self.path, "".join(self._lines).encode())
