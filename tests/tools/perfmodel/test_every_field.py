"""Every field of the description of a run changes a prediction, is declared, or is refused."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from pydtnn.tools.perfmodel.compute import AnalyticCosts
from pydtnn.tools.perfmodel.platform import Platform
from pydtnn.tools.perfmodel.projection import Projector
from pydtnn.tools.perfmodel.virtual.steps import predict
from pydtnn.training.workload import Workload, names_of_fields
from pydtnn.utils.errors import RankError
from tests.each import each
from tests.tools.perfmodel.small import small_work

PLATFORM = Platform.load("cpu-1gbit")

WITH: dict[str, dict[str, Any]] = {
    "model_options": {"model": "mlp"},
    "plan": {"axes": {"filter": 2}},
    "memory_limit": {"recompute": "auto", "memory_limit": 1 << 40},
    "scheme_options": {"scheme": "local_sgd"},
    "compress_options": {"compress": "top_k"},
    "shards": {"exact": True},
    "micro_batches": {"axes": {"pipeline": 2}},
    "pipeline_schedule": {"axes": {"pipeline": 2}, "batch": 32, "micro_batches": 8},
}
"""Fields without which another one means nothing."""

VALUES: dict[str, Any] = {
    **{"model": "mlp", "input_shape": (12, 12, 4), "classes": 8, "batch": 16},
    **{"axes": {"filter": 2}, "plan": "channel", "model_options": {"hidden": [64]}},
    **{
        "samples": 1000,
        "seed": 1,
        "dtype": "float64",
        "formats": "weights=e2m1:32",
        "fusion": False,
        "bucket_bytes": 512,
    },
    **{"recompute": 2, "memory_limit": 6_300_000, "freeze": ("conv1",), "scheme": "sharded"},
    **{"scheme_options": {"period": 3}, "compress": "top_k", "compress_options": {"share": 0.5}},
    **{"allreduce": "ring", "overlap": False, "exact": True, "shards": 4},
    **{"optimizer": "adam", "optimizer_options": {"momentum": 0.9, "clip_norm": 1.0}, "ema": 0.9},
    **{"accumulation": 2, "micro_batches": 4, "pipeline_schedule": "gpipe"},
    **{"sync_batch_norm": True, "loader_threads": 0, "threads": 3, "device": "numpy"},
    **{"tuning": "direct"},
}
"""Another value of each field."""

UNTIMED = {
    "samples": "of an epoch",
    "seed": "kernels take as long for other numbers",
    "ema": "an average is updated between steps",
    "loader_threads": "work while a step runs; predictions add the time that a step waits for them",
}

WITHOUT_EFFECT = {"formulas": {"seed": UNTIMED["seed"]}, "virtual ranks": UNTIMED}
"""Fields that are declared to have no effect, with the reasons; loaders add waits, see below."""


def by_formulas(work: Workload) -> tuple[float, ...]:
    costs = AnalyticCosts.of(work, PLATFORM)
    one = Projector(work, PLATFORM, costs).project(work)
    return one.seconds, one.epoch, one.memory.total


def on_virtual_ranks(work: Workload) -> tuple[float, ...]:
    one = predict(work, PLATFORM)
    return one.seconds, one.checkpoint, one.memory.total


PATHS = {"formulas": by_formulas, "virtual ranks": on_virtual_ranks}


@functools.cache
def result(path: str, name: str, changed: bool) -> tuple[float, ...] | str:
    """Return the prediction, or why it is refused."""
    given = {"axes": {"data": 2}, "optimizer_options": {}} | WITH.get(name, {})
    work = replace(small_work(), **given)
    try:
        return PATHS[path](replace(work, **{name: VALUES[name]}) if changed else work)
    except (ValueError, RankError) as error:
        return str(error)


@each("name", names_of_fields(), few=23)
@each("path", PATHS)
def test_a_field_changes_the_prediction_has_no_effect_or_is_refused(path, name):
    base, found = result(path, name if name in WITH else "samples", False), result(path, name, True)
    if isinstance(found, str):
        wanted = {"shards": "exact"}.get(name, name)
        if path == "formulas" and name == "scheme_options":
            wanted = "scheme"
        assert wanted in found
        assert "got" in found or "no formula for" in found
    elif name in WITHOUT_EFFECT[path] and name != "loader_threads":
        assert found == base
    else:
        assert found != base
