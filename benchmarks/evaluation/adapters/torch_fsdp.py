"""PyTorch: FSDP2 (fully_shard) over gloo: parameters, gradients and momentum in parts."""

from protocol import Job

job = Job()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch_network import build  # noqa: E402

torch.set_num_threads(job.threads)
dist.init_process_group("gloo", rank=job.rank, world_size=job.ranks)
mesh = dist.device_mesh.init_device_mesh("cpu", (job.ranks,))
model = build(job)  # FSDP refuses channels_last
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=job.rate, momentum=job.momentum)


def step(x, y):
    images, labels = torch.from_numpy(x).permute(0, 3, 1, 2), torch.from_numpy(y)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss.item()


job.measure(step, version=torch.__version__)
dist.destroy_process_group()
