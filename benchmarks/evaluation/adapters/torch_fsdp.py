"""PyTorch: FSDP2 (fully_shard) over gloo: parameters, gradients and momentum in parts."""

from protocol import Job

job = Job()

import os  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch_network import build, step_of, trace  # noqa: E402

torch.set_num_threads(job.threads)
dist.init_process_group("gloo", rank=job.rank, world_size=job.ranks)
mesh = dist.device_mesh.init_device_mesh("cpu", (job.ranks,))
model = build(job)  # FSDP refuses channels_last
fully_shard(model, mesh=mesh)


job.measure(step_of(job, model), None, torch.__version__, trace)
os._exit(0)  # threads of gloo may end the process with an error
