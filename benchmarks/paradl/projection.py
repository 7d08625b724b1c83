"""Projections of one case, and sweeps over strategies and ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.paradl.case import ALIASES, Case, Projection
from benchmarks.paradl.corrected import Corrected
from benchmarks.paradl.layers import LayerList
from benchmarks.paradl.published import Published
from benchmarks.paradl.tool import Printed
from pydtnn.tools.perfmodel.platform import Platform
from pydtnn.utils.names import unknown

FORMULAS: dict[str, type[Published]] = {
    "published": Published,
    "printed": Printed,
    "corrected": Corrected,
}
"""Table III; the projections that the published tool has printed; Table III with corrections."""


def project(case: Case, formulas: str = "published") -> Projection:
    """Return time and memory of a case.

    If only the first layer has a time, it is that of the whole network, and is divided in
    proportion to operations.

    Parameters
    ----------
    case : Case
    formulas : str, default "published"
        A key of `FORMULAS`.

    Raises
    ------
    ValueError
        If the formulas are unknown.

    Examples
    --------
    >>> from benchmarks.paradl.layers import LayerSize
    >>> net = LayerList("net", 1_280_000, (LayerSize("FC", (1,), (62_367_776,), (1,)),))
    >>> case = Case(net, Platform.load("abci"), "data", ranks=2, batch=1024)
    >>> round(project(case).communication, 7)
    6.2592776
    """
    if formulas not in FORMULAS:
        raise ValueError(f"paradl: {unknown('formulas', formulas, FORMULAS)}")
    network = case.network.distribute(published=formulas != "corrected")
    own = replace(case, network=network)
    terms = FORMULAS[formulas](own)
    return Projection(
        own, formulas, terms.compute(), terms.communication(), terms.memory(), *terms.limit()
    )


def sweep(
    network: LayerList,
    platform: Platform,
    strategies: Sequence[str],
    ranks: Sequence[int],
    *,
    per_rank: int,
    batch: int | None = None,
    parts: int | None = None,
    segments: int = 4,
) -> Iterator[Case]:
    """Yield the cases of several strategies and numbers of ranks.

    Parameters
    ----------
    network : LayerList
    platform : Platform
    strategies : sequence of str
    ranks : sequence of int
    per_rank : int
        Samples of a rank, or of a group that shares samples.
    batch : int, optional
        Samples of all ranks; by default `per_rank` for each group with samples of its own.
    parts : int, optional
        Ranks of a group of a hybrid; by default those of a host. Numbers of ranks that it does not
        divide are left out.
    segments : int, default 4
        Parts of a batch in a pipeline.
    """
    within = parts or platform.cluster.ranks_per_host
    for given in strategies:
        strategy = ALIASES.get(given, given)
        for p in [1] if strategy == "serial" else ranks:
            groups = 1
            if "+" in strategy:
                if p % within:
                    continue
                groups = p // within
            own = batch or per_rank * (p if strategy == "data" else groups)
            yield Case(network, platform, strategy, p, own, groups, segments)
