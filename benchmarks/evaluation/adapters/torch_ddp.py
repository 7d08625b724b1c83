"""PyTorch: DistributedDataParallel over gloo, channels_last."""

from protocol import Job

job = Job()

import os  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch_network import build, predict_of, step_of, trace  # noqa: E402

torch.set_num_threads(job.threads)
net = build(job).to(memory_format=torch.channels_last)
if job.ranks > 1:
    dist.init_process_group("gloo", rank=job.rank, world_size=job.ranks)
    model = nn.parallel.DistributedDataParallel(net)
else:
    model = net


job.measure(step_of(job, model), None, torch.__version__, trace, predict_of(net))
os._exit(0)  # threads of gloo may end the process with an error
