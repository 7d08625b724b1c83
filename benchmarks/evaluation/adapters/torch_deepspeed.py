"""DeepSpeed on PyTorch over gloo: ZeRO stage 1, the optimizer's state in parts."""

from protocol import Job

job = Job()

import os  # noqa: E402
import sys  # noqa: E402

os.environ |= {"LOCAL_RANK": str(job.rank), "DS_ACCELERATOR": "cpu"}
# It compiles an extension when it is first used.
os.environ["TORCH_EXTENSIONS_DIR"] = f"{sys.prefix}/extensions"

import deepspeed  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch_network import build, trace  # noqa: E402

torch.set_num_threads(job.threads)
deepspeed.init_distributed("gloo", rank=job.rank, world_size=job.ranks)
net = build(job)
engine, _, _, _ = deepspeed.initialize(
    model=net,
    optimizer=torch.optim.SGD(net.parameters(), lr=job.rate, momentum=job.momentum),
    config={
        "train_micro_batch_size_per_gpu": job.batch,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # it clips by default
    },
)


def step(x, y):
    images, labels = torch.from_numpy(x).permute(0, 3, 1, 2), torch.from_numpy(y)
    loss = nn.functional.cross_entropy(engine(images), labels)
    engine.backward(loss)
    engine.step()
    return loss.item()


job.measure(step, None, deepspeed.__version__, trace)
os._exit(0)  # its threads do not end
