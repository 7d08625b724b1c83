"""What one MPI rank does of some exact runs: ``python -m tests.fuzz.mpi_runs FOLDER SEED...``.

Each run begins where an earlier launch has stopped it and goes on to its end, or with
``SEED:STEPS`` until it is stopped after so many steps. Rank 0 writes what the ranks have at the end
into FOLDER.
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

os.environ["PYDTNN_TUNING"] = "fixed"

from pydtnn.comm import Communicator, create_communicator
from tests.fuzz.training_runs import Run, carry_out, different
from tests.small_training import Interrupted


def main(folder: Path, runs: list[str], comm: Communicator) -> None:
    for text in runs:
        seed, _, at = text.partition(":")
        run = Run(int(seed))
        way = run.way(comm.size)
        try:
            mine = carry_out(run, way, comm, folder / seed, int(at or 0))
        except Interrupted:
            continue
        odd = [name for other in comm.gather_object(mine) for name in different(other, mine)]
        assert not odd, f"{run} on {way}: ranks differ in {odd}"
        if comm.rank == 0:
            (folder / f"{seed}.pickle").write_bytes(pickle.dumps((mine, way)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:], create_communicator())
