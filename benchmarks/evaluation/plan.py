"""The plan of an evaluation: what is run, frozen before the first run.

A plan is a YAML file. All combinations of its factors are run `repetitions` times.

```yaml
frameworks: [pydtnn, torch_ddp, torch_fsdp, jax]
networks: [mlp, resnet20, vgg11]
ranks: [1, 2]
threads: 1            # of a rank
batch: 32             # samples of a rank, or of all ranks together with `strong: true`
steps: {mlp: 200, resnet20: 40, vgg11: 20}   # that are timed, after warm_up; or one number for all
warm_up: 5
repetitions: 5
disturbed: {load: 0.5, steal: 0.02}   # a run beside more of this is repeated, at most twice
```

With `traced: 3`, three further steps of each run of the first repetition are recorded (`traces`).
With `epochs: 20`, `data: digits` (or another data set of pydtnn, such as cifar10) and `target:
0.95`, each run trains so many epochs, as many steps as they have, from weights and in an order that
its repetition determines, and the accuracy on the test set after each epoch is a response.

With `hosts: 2` and `link: 1gbit`, ranks run on emulated hosts, as many on each
(`benchmarks.comm.cluster_hosts`), which needs root and Open MPI.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from benchmarks.comm.cluster_hosts import bits_per_second
from benchmarks.evaluation.frameworks import FRAMEWORKS
from benchmarks.evaluation.networks import NETWORKS, walk
from pydtnn.data import load_dataset
from pydtnn.utils import plain_yaml
from pydtnn.utils.files import write_file
from pydtnn.utils.names import unknown

FROZEN = "plan.json"
"""The plan in the folder of results."""


class Cell(NamedTuple):
    """One run: a combination of factors, and its repetition."""

    repetition: int
    framework: str
    network: str
    ranks: int

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"{self.repetition}-{self.network}-{self.ranks}-{self.framework}"


@dataclass(frozen=True)
class Plan:
    """What is run; see the module."""

    frameworks: tuple[str, ...]
    networks: tuple[str, ...]
    ranks: tuple[int, ...]
    threads: int = 1
    batch: int = 32
    strong: bool = False
    data: str = ""
    epochs: int = 0
    target: float = 0.95
    steps: int | dict[str, int] = 20
    warm_up: int = 5
    repetitions: int = 5
    momentum: float = 0.9
    seed: int = 0
    traced: int = 0
    hosts: int = 1
    link: str = ""
    disturbed: dict[str, float] = field(default_factory=lambda: {"load": 0.5, "steal": 0.02})

    @classmethod
    def load(cls, path: Path) -> Plan:
        """Read a YAML file.

        Raises
        ------
        ValueError
            If a name or a number is not possible.
        """
        given: Any = plain_yaml.load(path.read_text())
        if not isinstance(given, dict):
            raise ValueError(f"{path}: expected entries such as `ranks: [1, 2]`, got {given!r}")
        known = cls.__dataclass_fields__
        for name in given:
            if name not in known:
                raise ValueError(f"{path}: {unknown('entry', name, known)}")
        for name in ("frameworks", "networks", "ranks"):
            if not isinstance(given.get(name), list) or not given[name]:
                raise ValueError(f"{path}: {name}: expected a list, got {given.get(name)!r}")
            given[name] = tuple(given[name])
        plan = cls(**given)
        for what, names, table in (
            ("framework", plan.frameworks, FRAMEWORKS),
            ("network", plan.networks, NETWORKS),
        ):
            for name in names:
                if name not in table:
                    raise ValueError(f"{path}: {unknown(what, name, table)}")
        if isinstance(plan.steps, dict) and {*plan.steps} != {*plan.networks}:
            raise ValueError(
                f"{path}: steps: expected a number, or one for each network, got {plan.steps}"
            )
        steps = plan.steps if isinstance(plan.steps, dict) else {"": plan.steps}
        numbers: dict[str, Any] = {f"steps {name}".strip(): steps[name] for name in steps}
        numbers |= {"repetitions": plan.repetitions, "batch": plan.batch}
        numbers |= {"threads": plan.threads, "ranks": min(plan.ranks), "hosts": plan.hosts}
        for name, number in numbers.items():
            if not isinstance(number, int) or number < 1:
                raise ValueError(f"{path}: {name}: expected a whole number from 1, got {number!r}")
        if uneven := [ranks for ranks in plan.ranks if plan.strong and plan.batch % ranks]:
            raise ValueError(
                f"{path}: batch: expected a multiple of {uneven[0]} ranks, got {plan.batch}"
            )
        if bool(plan.data) != bool(plan.epochs):
            raise ValueError(f"{path}: expected both `data` and `epochs`, got one of them")
        normed = [n for n in plan.networks if any(x[0] == "bn" for x in walk(NETWORKS[n].layers))]
        if plan.epochs and normed:
            raise ValueError(
                f"{path}: {normed[0]}: expected networks without batch norm, whose running "
                "statistics differ between frameworks; train digits"
            )
        if plan.data:
            shape = load_dataset(plan.data)[0].input_shape
            for name in plan.networks:
                if NETWORKS[name].shape != tuple(shape):
                    raise ValueError(
                        f"{path}: {name}: expected a network for samples of {plan.data}, "
                        f"{tuple(shape)}, got one for {NETWORKS[name].shape}"
                    )
        if plan.hosts > 1 or plan.link:
            bits_per_second(plan.link)
            uneven = [ranks for ranks in plan.ranks if ranks % plan.hosts_of(ranks)]
            if uneven:
                raise ValueError(
                    f"{path}: ranks: expected as many on each of {plan.hosts} hosts, "
                    f"got {uneven[0]}"
                )
        return plan

    def steps_of(self, network: str) -> int:
        """Return the number of steps that are timed."""
        return self.steps[network] if isinstance(self.steps, dict) else self.steps

    def batch_of(self, ranks: int) -> int:
        """Return the samples of a rank in a step."""
        return self.batch // ranks if self.strong else self.batch

    def hosts_of(self, ranks: int) -> int:
        """Return on how many hosts these ranks are."""
        return min(self.hosts, ranks)

    @property
    def digest(self) -> str:
        """A hash of all that is planned, and of the programs that are run."""
        programs = sorted((Path(__file__).parent / "adapters").glob("*.py"))
        networks = {name: NETWORKS[name] for name in self.networks}
        content = [json.dumps([asdict(self), networks], sort_keys=True).encode()]
        content += [program.read_bytes() for program in programs]
        return hashlib.sha256(b"".join(content)).hexdigest()

    def freeze(self, folder: Path) -> None:
        """Write the plan, or check that the results in a folder are of this plan.

        Raises
        ------
        ValueError
            If they are of another one.
        """
        path = folder / FROZEN
        if path.exists():
            found = json.loads(path.read_text())["digest"]
            if found != self.digest:
                raise ValueError(
                    f"{folder}: the results are of another plan, or of other adapters; use another "
                    "folder"
                )
            return
        content = {"digest": self.digest, "plan": asdict(self)}
        write_file("evaluation", path, json.dumps(content, indent=1).encode())

    def cells(self) -> Iterator[Cell]:
        """Yield all runs by repetition, each in an order of its own that `seed` determines.

        Frameworks that are compared, those of a network and a number of ranks, follow each other.
        """
        for repetition in range(self.repetitions):
            random = Random(f"{self.seed} {repetition}")
            blocks = [*product(self.networks, self.ranks)]
            random.shuffle(blocks)
            for network, ranks in blocks:
                names = [name for name in self.frameworks if FRAMEWORKS[name].runs_on(ranks)]
                random.shuffle(names)
                yield from (Cell(repetition, name, network, ranks) for name in names)
