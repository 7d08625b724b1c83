"""Former names of modules and classes, which are imported with a warning for one version."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, cast
from warnings import warn

MOVED = {
    **{
        f"pydtnn.layers.{name}": f"pydtnn.model.partition.{name}"
        for name in ("exchange", "exchanged_experts", "ring_attention", "striped_conv", "stripes")
    },
    "pydtnn.callbacks.measurements": "pydtnn.tools.measurements",
    **dict.fromkeys(
        ("pydtnn.callbacks.tensorboard", "pydtnn.callbacks.trackers"), "pydtnn.tools.trackers"
    ),
    "pydtnn.data.__main__": "pydtnn.tools.shards.__main__",
    "pydtnn.data.packing": "pydtnn.tools.shards.packing",
    "pydtnn.data.shards": "pydtnn.tools.shards.reading",
    **{
        f"pydtnn.comm.{name}": f"pydtnn.comm.monitor.{name}"
        for name in ("attendance", "failure", "signals", "supervision")
    },
    "pydtnn.comm.__main__": "pydtnn.tools.schedules.allreduce",
    **{
        f"pydtnn.comm.schedules.{name}": f"pydtnn.tools.schedules.{name}"
        for name in ("check", "timeline")
    },
    "pydtnn.comm.schedules.auto": "pydtnn.comm.schedules.rule",
    "pydtnn.comm.schedules.flows": "pydtnn.tools.perfmodel.engine.flows",
    "pydtnn.comm.schedules.network": "pydtnn.tools.perfmodel.network",
    "pydtnn.comm.schedules.picture": "pydtnn.tools.schedules.allreduce_picture",
    "pydtnn.model.generation": "pydtnn.tools.generation",
    "pydtnn.model.pipeline.__main__": "pydtnn.tools.schedules.pipeline",
    "pydtnn.model.pipeline.picture": "pydtnn.tools.schedules.pipeline_picture",
    "pydtnn.model.whole": "pydtnn.model.full_arrays",
    "pydtnn.parallel.pipeline": "pydtnn.model.pipeline",
    **{
        f"pydtnn.{name}": f"pydtnn.tools.{name}"
        for name in ("checkpoint", "interchange", "predict", "report", "runs", "search")
    },
    **{f"pydtnn.{name}": f"pydtnn.tools.{name}" for name in ("testing", "trace")},
    "pydtnn.calibrate": "pydtnn.tools.perfmodel.calibration",
    "pydtnn.cli.info": "pydtnn.tools.info",
    "pydtnn.info": "pydtnn.tools.info",
    "pydtnn.launch": "pydtnn.tools.launch",
    "pydtnn.oracle": "pydtnn.tools.perfmodel.oracle",
    "pydtnn.perfmodel.workload": "pydtnn.training.workload",
    "pydtnn.perfmodel": "pydtnn.tools.perfmodel",
    "pydtnn.training.recovery": "pydtnn.tools.survival.recovery",
    "pydtnn.tracing": "pydtnn.tools.tracing",
    "pydtnn.training.tracing": "pydtnn.tools.tracing",
}
"""Modules and packages by their former name; of two that match, the first."""

RENAMED = {
    "pydtnn.model": {"generate": "pydtnn.tools.generation.generate"},
    "pydtnn.layers.blocks": {"Graph": "GraphBuilder"},
    "pydtnn.comm.schedules": {"Step": "MessageStep"},
    "pydtnn.tools.perfmodel.search": {"Option": "UnitOption"},
    "pydtnn.tools.report": {"Run": "RunView"},
    "pydtnn.tools.tracing.analysis": {"Part": "PathPart", "Segment": "PathSegment"},
}
"""Public names of packages by their former names."""


class Moved:
    """Finder and loader of modules by their former names."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how to import a module, None if the name is not a former one."""
        for old, new in MOVED.items():
            if name == old or name.startswith(f"{old}."):
                found = find_spec(new + name[len(old) :])
                if found is None:
                    return None
                warn(f"{name} is now {found.name}", DeprecationWarning, stacklevel=2)
                package = found.submodule_search_locations is not None
                return ModuleSpec(name, cast(Any, self), origin=found.name, is_package=package)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module itself: both names are one object."""
        module = import_module(str(spec.origin))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its specification back, which the import has replaced."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state

    def get_code(self, name: str) -> Any:
        """Return the code that ``python -m`` executes."""
        spec = self.find_spec(name)
        assert spec is not None
        found = find_spec(str(spec.origin))
        assert found is not None
        return cast(Any, found.loader).get_code(found.name)


def install() -> None:
    """Let former names be imported."""
    if not any(isinstance(finder, Moved) for finder in sys.meta_path):
        sys.meta_path.insert(0, cast(Any, Moved()))


def renamed(package: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package (PEP 562) with classes that had other names."""

    def __getattr__(name: str) -> Any:
        if name not in RENAMED[package]:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home, _, new = RENAMED[package][name].rpartition(".")
        warn(f"{package}.{name} is now {RENAMED[package][name]}", DeprecationWarning, stacklevel=2)
        return getattr(import_module(home or package), new)

    return __getattr__
