"""torchft on PyTorch: each rank is a replica that may be lost; gradients are averaged over gloo."""

from protocol import Job

job = Job()

import os  # noqa: E402
from importlib.metadata import version  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torchft  # noqa: E402
from torch_network import build, step_of, trace  # noqa: E402
from torchft.coordination import LighthouseServer  # noqa: E402

torch.set_num_threads(job.threads)
host, port = job.addresses[job.rank], job.port
if job.rank == 0:
    lighthouse = LighthouseServer(f"[::]:{port}", min_replicas=job.ranks)
store = dist.TCPStore(host, port + 1 + job.rank, is_master=True, wait_for_workers=False)
net = build(job).to(memory_format=torch.channels_last)
manager = torchft.Manager(
    torchft.ProcessGroupGloo(),
    net.load_state_dict,
    net.state_dict,
    min_replica_size=job.ranks,
    init_sync=False,  # all have the same weights; otherwise only one rank trains the first step
    rank=0,  # of a replica, which has one process
    world_size=1,
    store_addr=host,
    store_port=store.port,
    lighthouse_addr=f"http://{job.addresses[0]}:{port}",
    replica_id=f"{job.rank}",
    hostname=host,
)
model = torchft.DistributedDataParallel(manager, net)
step = step_of(job, model, lambda optimizer: torchft.Optimizer(manager, optimizer))
job.measure(step, version=version("torchft"), trace=trace)
os._exit(0)
