"""Horovod on PyTorch: an optimizer whose gradients are averaged by MPI."""

from protocol import Job

job = Job()

import os  # noqa: E402

os.environ |= {"HOROVOD_TIMELINE": "DYNAMIC"} if job.traced else {}  # it is started later

import horovod  # noqa: E402
import horovod.torch as hvd  # noqa: E402
import torch  # noqa: E402
from horovod_timeline import trace_of  # noqa: E402
from torch_network import build, predict_of, step_of, trace  # noqa: E402

torch.set_num_threads(job.threads)
hvd.init()
net = build(job)  # Horovod refuses channels_last
step = step_of(job, net, lambda own: hvd.DistributedOptimizer(own, net.named_parameters()))
version = f"{horovod.__version__}, PyTorch {torch.__version__}"
job.measure(step, None, version, trace_of(hvd, trace), predict_of(net))
hvd.shutdown()
os._exit(0)
