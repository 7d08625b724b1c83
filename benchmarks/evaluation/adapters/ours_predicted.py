"""The step that pydtnn predicts: these ranks measure their computation, virtual ones exchange."""

import json
import sys
from pathlib import Path

from ours import backend, build, comm, job, measure, total

from pydtnn.tools.perfmodel.job import platform_of
from pydtnn.tools.perfmodel.virtual import SharedCores
from pydtnn.training.workload import Workload

sys.path.append(str(Path(__file__).parents[3]))

from benchmarks.accuracy.rank import predict
from benchmarks.common.work import rest

measure()
work = Workload(
    lambda classes, shape: build(job.layers),
    job.x.shape[1:],
    batch=total,
    axes={"data": job.ranks},
    optimizer_options={"lr": job.rate, "momentum": job.momentum},
)
platform = platform_of(comm, backend, work, rates=False)
groups = tuple(map(tuple, job.cores))  # a rank does not leave its core
shared = SharedCores(1, groups, platform.messages.wake is None)
found = predict(work, comm, platform, job.steps, shared if len({*groups}) < job.ranks else None)
rest(comm)
seconds = max(comm.gather_object(max((one.step.seconds for one in found), default=0.0)))
path = job.folder / f"result-{job.rank}.json"
result = json.loads(path.read_text())
path.write_text(json.dumps(result | {"times": [seconds] * len(result["times"])}))
