"""However one rank ends, whenever, the others end too: within seconds, in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ahead import mpiexec
from tests.launch import Finished
from tests.small_run import TINY, only_line

PROGRAM = """
import os, sys
RANK = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))

class Odd(BaseException):
    pass

def strike(phase):
    if RANK == 1 and phase == os.environ["PHASE"]:
        exec(os.environ["ACT"])

import numpy as np
from pydtnn import train
from pydtnn.callbacks import Callback, HistoryWriter
from pydtnn.data import synthetic
from pydtnn.training.trainer import Trainer
import pydtnn.saving.weights

def patch(owner, name, phase):
    original = getattr(owner, name)
    def struck(*args, **keywords):
        strike(phase)
        return original(*args, **keywords)
    setattr(owner, name, struck)

patch(train, "Arguments", "parse")
import pydtnn.cli.build, pydtnn.training.workload
import pydtnn.callbacks.checkpointing
patch(pydtnn.cli.workload, "create_data", "data")
patch(pydtnn.training.workload.Workload, "create_net", "network")
patch(Trainer, "_begin", "step")
patch(HistoryWriter, "on_epoch_end", "callback")
patch(pydtnn.callbacks.checkpointing.Saver, "start", "checkpoint")
status = train.main()
strike("end")
sys.exit(status)
"""

PHASES = ["parse", "data", "network", "step", "callback", "checkpoint", "end"]
ACTS = {
    "fault": ("raise KeyError('thing')", "KeyError: 'thing'"),
    "sentence": ("raise ValueError('Bad: thing.')", "Bad: thing."),
    "exit": ("sys.exit(0)", "rank 1"),
    "base": ("raise Odd('thing')", "Odd: thing"),
}


CASES = [(phase, "fault") for phase in PHASES]
CASES += [(phase, "exit") for phase in ("data", "step", "end")]
CASES += [("parse", "sentence"), ("step", "base"), ("end", "base")]
SHORT = [("step", "exit"), ("parse", "sentence"), ("checkpoint", "fault")]
"""Those of `make test`; the others are long."""


def run(phase: str, act: str, folder: Path) -> Finished:
    ranks = 2 + (PHASES.index(phase) + [*ACTS].index(act)) % 2
    paths = {"PYTHONPATH": str(Path(__file__).parent.parent)}
    environment = {"PHASE": phase, "ACT": ACTS[act][0], **paths}
    arguments = ["-c", PROGRAM, *TINY, "--epochs=1", "--output-dir=run", "--straggler-factor=0"]
    return mpiexec(ranks, arguments, environment=environment, directory=folder)


@pytest.mark.ahead(call=run)
@pytest.mark.parametrize(
    ("phase", "act"),
    [pytest.param(*c, marks=[] if c in SHORT else pytest.mark.long) for c in CASES],
)
def test_a_rank_that_ends_in_any_phase_ends_all(phase, act, ahead):
    if (phase, act) == ("end", "exit"):  # all have trained, and may leave as they like
        assert (ahead.returncode, ahead.stderr) == (0, "")
        return
    assert ahead.returncode != 0
    assert ACTS[act][1] in only_line(ahead.stderr)
