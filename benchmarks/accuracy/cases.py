"""The workloads of `benchmarks.oracle`, by names such as "resnet20/data-2/64"."""

from __future__ import annotations

from typing import Any

from benchmarks.common.work import CIFAR, IMAGENET, MNIST
from pydtnn.training.workload import Workload

TRANSFORMER = {"width": 256, "depth": 4, "heads": 4, "tied": False}

NETWORKS: dict[str, tuple[tuple[int, ...], int, dict[str, Any]]] = {
    "resnet20": (CIFAR, 10, {}),
    "resnet44": (CIFAR, 10, {}),
    "vgg11": (CIFAR, 10, {}),
    "vgg16_bn": (CIFAR, 10, {}),
    "cnn": (MNIST, 10, {}),
    "resnet18": (IMAGENET, 1000, {}),
    "gpt": ((128,), 256, TRANSFORMER),
    "moe_gpt": ((128,), 256, TRANSFORMER | {"experts": 4}),
}
"""Shape of a sample, number of classes, and options of the model."""

BATCHES = {"resnet18": (8, 16), "gpt": (16,), "moe_gpt": (16,)}
"""Samples of all ranks per step; those of other networks are `USUAL`."""

USUAL = (32, 64)

PLANS: dict[str, dict[str, Any]] = {
    "one": {},
    "data-2": {"axes": {"data": 2}},
    "spatial-2": {"axes": {"spatial": 2}},
    "filter-2": {"axes": {"filter": 2}},
    "pipeline-2": {"axes": {"pipeline": 2}},
    "recompute": {"recompute": 4},
    "tensor-2": {"axes": {"tensor": 2}},
    "context-2": {"axes": {"context": 2}},
    "expert-2": {"axes": {"expert": 2}},
    "sharded-2": {"axes": {"data": 2}, "scheme": "sharded"},
    "sharded_gradients-2": {"axes": {"data": 2}, "scheme": "sharded_gradients"},
    "sharded_parameters-2": {"axes": {"data": 2}, "scheme": "sharded_parameters"},
    "interleaved-2": {"axes": {"pipeline": 2}, "pipeline_schedule": "interleaved:2"},
    "zb_h1-2": {"axes": {"pipeline": 2}, "pipeline_schedule": "zb_h1"},
    "zb_v-2": {"axes": {"pipeline": 2}, "pipeline_schedule": "zb_v"},
    "data-4": {"axes": {"data": 4}},
    "sharded-4": {"axes": {"data": 4}, "scheme": "sharded"},
    "top_k-4": {"axes": {"data": 4}, "compress": "top_k", "compress_options": {"share": 0.01}},
    "power_sgd-4": {
        "axes": {"data": 4},
        "compress": "power_sgd",
        "compress_options": {"rank": 2},
    },
    "local_sgd-4": {
        "axes": {"data": 4},
        "scheme": "local_sgd",
        "scheme_options": {"period": 4},
    },
    "spatial-4": {"axes": {"spatial": 4}},
    "filter-4": {"axes": {"filter": 4}},
    "pipeline-4": {"axes": {"pipeline": 4}},
    "data-spatial-4": {"axes": {"data": 2, "spatial": 2}},
    "data-3": {"axes": {"data": 3}},
    "pipeline-3": {"axes": {"pipeline": 3}},
    "data-8": {"axes": {"data": 8}},
    "filter-8": {"axes": {"filter": 8}},
    "data-spatial-8": {"axes": {"data": 4, "spatial": 2}},
}
"""Arguments of `Workload` by name; a number at the end is that of the ranks."""

OPTIMIZER = {"lr": 1e-8, "momentum": 0.9, "weight_decay": 1e-4}
"""Labels are random: with larger rates, networks without batch norm diverge."""

HERE = ("one", "data-2", "spatial-2", "filter-2", "pipeline-2", "recompute")
"""Plans that are compared on this machine."""

SCHEMES = {
    "gpt": (
        *("one", "data-2", "tensor-2", "context-2", "sharded-2", "sharded_gradients-2"),
        *("sharded_parameters-2", "pipeline-2", "interleaved-2", "zb_h1-2", "zb_v-2"),
    ),
    "moe_gpt": ("one", "data-2", "expert-2"),
}
"""The same for transformers."""

CROWDED = ("data-3", "pipeline-3", "data-4", "filter-4", "data-spatial-4", "data-8", "filter-8")
"""Plans with more ranks than this machine may have cores."""

ON_CLUSTER = tuple(name for name in PLANS if name.endswith("-4"))
"""Plans that are compared on emulated clusters of four ranks."""


def ranks_of(plan: str) -> int:
    """Return the number of ranks of a plan.

    >>> ranks_of("data-spatial-4"), ranks_of("recompute")
    (4, 1)
    """
    number = plan.rpartition("-")[2]
    return int(number) if number.isdecimal() else 1


def workload_of(case: str) -> Workload:
    """Return the workload of a network, plan and batch size: "resnet20/data-2/64".

    Raises
    ------
    ValueError
        If there is none.
    """
    network, _, rest = case.partition("/")
    plan, _, batch = rest.partition("/")
    if network not in NETWORKS or plan not in PLANS or not batch.isdecimal():
        raise ValueError(
            f"oracle: expected NETWORK/PLAN/BATCH with one of {', '.join(NETWORKS)} and of "
            f"{', '.join(PLANS)}, got {case}"
        )
    shape, classes, options = NETWORKS[network]
    more = {"model_options": options, "optimizer_options": OPTIMIZER, **PLANS[plan]}
    return Workload(network, shape, classes, int(batch), **more)
