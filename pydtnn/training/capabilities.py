"""What the features of a training run need and exclude: the table that `docs/running.md` shows.

A feature is a name with how the parts of a trainer, or the options of a command line, are seen to
have it. `Trainer` resolves a run against the table, and so do the command line and the oracle,
before anything is created. A scheme declares in its class what it excludes (`GradientExchange`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from pydtnn.model.pipeline import actions_of
from pydtnn.optimizers import Optimizer
from pydtnn.parallel.exchange import GathersParameters
from pydtnn.parallel.sums import Sums
from pydtnn.training.axis_sums import further_axes
from pydtnn.training.setup import Setup


class Feature(NamedTuple):
    """How a run is seen to have a feature, and what that needs and excludes.

    Attributes
    ----------
    found : callable
        Returns whether a run has the feature, or what sentences say of it. By default no run does,
        unless `why_not` asks.
    options : str
        Parts of a command line that choose the feature, with " or " between them.
    excludes, needs : mapping of str to str
        Other features, and why: a sentence that ends with what to do, in which {0} and {1} are what
        `found` returns of the feature and of the other.
    """

    found: Callable[[Setup], Any] = lambda setup: False
    options: str = ""
    excludes: Mapping[str, str] = {}
    needs: Mapping[str, str] = {}


class Conflict(NamedTuple):
    """Two features that a run cannot combine, or of which it lacks the other.

    Attributes
    ----------
    feature, other : str
    lacks : bool
    why : str
    """

    feature: str
    other: str
    lacks: bool
    why: str


def conflicts(features: Mapping[str, Feature], find: Callable[[str], Any]) -> Iterator[Conflict]:
    """Yield the conflicts of a run; `find` returns what is found of a feature."""
    for name, feature in features.items():
        if (feature.needs or feature.excludes) and (first := find(name)):
            for lacks, others in ((True, feature.needs), (False, feature.excludes)):
                for other, why in others.items():
                    if bool(second := find(other)) != lacks:
                        yield Conflict(name, other, lacks, why.format(first, second))


def check(setup: Setup) -> None:
    """Raise ValueError if features of a run cannot be combined."""
    scheme = _scheme(setup)
    features = FEATURES | {scheme: Feature(excludes=getattr(setup.exchange, "excludes", {}))}
    found = conflicts(
        features, lambda name: (name == scheme and name) or features[name].found(setup)
    )
    for conflict in found:
        raise ValueError(f"Trainer: {conflict.why}")


def why_not(name: str, setup: Setup) -> str:
    """Return why a run cannot have a feature as well; an empty string if it can."""
    find = {name: FEATURES[name]}
    found = conflicts(find, lambda other: other == name or FEATURES[other].found(setup))
    return next((conflict.why for conflict in found), "")


def _scheme(setup: Setup) -> str:
    return type(setup.exchange).__name__


def _shares_stages(setup: Setup) -> bool:
    pipeline = setup.model.pipeline
    return pipeline is not None and len(pipeline.owners.paths) > 1


def _keeps_gradients(setup: Setup) -> str:
    parts = (setup.exchange, setup.exchange.sums)
    keep = (part for part in parts if getattr(part, "keeps_gradients", False))
    return next((type(part).__name__ for part in keep), "")


def _residuals_of_parts(setup: Setup) -> bool:
    cut = setup.mesh is not None and bool(setup.mesh.model_axes)
    return cut and setup.exchange.sums.keeps_gradients


def _further_sums(setup: Setup) -> str:
    named = ((p.name, further_axes(p.group)) for p in setup.model.parameters.values())
    found = (f"{name}, summed over {', '.join(axes)}" for name, axes in named if axes)
    return next(found, "")


def _no_plain_sums(setup: Setup) -> str:
    plain = setup.exchange.exact and type(setup.exchange.sums) is Sums
    return "" if plain else f"{_scheme(setup)} with {type(setup.exchange.sums).__name__}"


def _halves(setup: Setup) -> bool:
    stage = setup.model.pipeline
    if stage is None:
        return False
    actions = actions_of(setup.model.schedule, stage.rank, stage.ranks, 2 * stage.ranks)
    return any(action.kind == "backward_inputs" for action in actions)


def _gathers_norm(setup: Setup) -> str:
    divided = getattr(setup.exchange, "exact_norms", False)
    return _scheme(setup) if divided and setup.optimizer.clip_norm is not None else ""


NO_SUMS = (
    "{1}: ranks do not sum gradients, so these cannot be compressed or summed exactly; use a "
    "scheme that sums gradients, such as AllReduce"
)

FEATURES = {
    "pipeline": Feature(
        lambda setup: setup.model.pipeline is not None,
        "--parallel pipeline=2",
        {
            "accumulation": "the micro-batches of a pipeline accumulate gradients, so accumulation "
            "must be 1, got {1}; use micro_batches",
            "sync_batch_norm": "the stages of a pipeline normalise each micro-batch by itself, so "
            "sync_batch_norm must be False; use fewer micro-batches",
            "float16": "the loss scale of a float16 model depends on the gradients of all stages "
            "of a pipeline, which is not supported; use bfloat16",
        },
    ),
    "stages of several ranks": Feature(
        _shares_stages,
        excludes={
            "sums that are not plain": "stages that several ranks of a pipeline have require sums "
            "of gradients that are neither exact nor compressed, as those of allreduce and "
            "sharded, got {1}; use one, a schedule such as 1f1b, or --parallel exact=true instead",
        },
    ),
    "asynchronous pipeline": Feature(
        lambda setup: setup.asynchronous,
        "--parallel schedule=2bw",
        {
            "sums that are not plain": "steps that overlap require plain sums of gradients, got "
            "{1}; use AllReduce, or the schedule 1f1b",
            "parts of parameters": "two versions are kept of whole weights, got {1}; use AllReduce",
            "clipped gradients": "stages do not wait for each other, so clip_norm must be None",
            "GPU": "asynchronous pipelines are not supported on a GPU; use the schedule 1f1b",
        },
    ),
    "micro_batches": Feature(
        lambda setup: (setup.model.pipeline or setup.micro_batches != 1) and setup.micro_batches,
        "--parallel micro_batches",
        needs={
            "pipeline": "micro_batches={0} requires a model that is cut into the stages of a "
            "pipeline; use accumulation, or Mesh(comm, pipeline=2)",
        },
    ),
    "exact training": Feature(
        lambda setup: setup.exchange.sums.shards is not None,
        "--exact",
        {
            "micro_batches": "in exact training the shards are the micro-batches of a pipeline, so "
            "micro_batches must be omitted, got {1}; choose the number of shards",
            "accumulation": "exact training computes shard by shard, so accumulation must be 1; "
            "use more shards",
            "compression": "exact training sums gradients as they are; omit it",
            "scheme without sums": NO_SUMS,
            "scheme that depends on ranks": "{1}: results depend on the number of ranks, so exact "
            "sums are not supported; use AllReduce or ShardedOptimizer",
            "backward in halves": "exact training adds up whole gradients of micro-batches, so the "
            "schedule of a pipeline must compute backward in one piece; use 1f1b, or --parallel "
            "exact=true instead",
            "measured algorithms": "exact training requires algorithms that are not chosen by "
            'measurement; use the tuning "fixed"',
            "sums over further axes": "exact training requires gradients that are summed over the "
            "axis data only, got those of {1}, too; use another plan, or --parallel exact=true "
            "instead",
        },
    ),
    "compression": Feature(
        lambda setup: setup.exchange.sums.shards is None and type(setup.exchange.sums) is not Sums,
        "--compress",
        {"scheme without sums": NO_SUMS},
    ),
    "norm of divided exact gradients": Feature(
        _gathers_norm,
        excludes={
            "GPU": "{0} gathers gradients for the norm of exact training, which is not supported "
            "on a GPU; omit clip_norm or use AllReduce",
        },
    ),
    "float16": Feature(
        lambda setup: setup.loss_scale,
        "--dtype float16",
        {
            "gradients of earlier steps": "{1} keeps gradients between steps, which a float16 "
            "model scales by different factors; use bfloat16",
        },
    ),
    "average of an optimizer": Feature(
        lambda setup: setup.optimizer.offset and type(setup.optimizer).__name__,
        "--optimizer schedule_free",
        {
            "ranks that differ": "{0} evaluates an average of the parameters, which must be the "
            "same on all ranks, got {1}; use a scheme such as AllReduce",
        },
    ),
    "average of parameters": Feature(
        options="--ema",
        excludes={
            "average of an optimizer": "requires a rule that is evaluated at the parameters that "
            "it trains, got {1}, which averages them; omit it"
        },
    ),
    "mirrored evaluation": Feature(
        options="--augment mirrored",
        excludes={
            "parts of the network": "requires whole images and outputs on each rank, got parts "
            "along {1}; omit it",
            "several inputs or outputs": "requires one image and one output; omit it",
        },
    ),
    "format of optimizer state": Feature(
        lambda setup: setup.model.formats and setup.model.formats.optimizer,
        excludes={
            "slots of other types": "a format of optimizer state rounds slots like the parameters, "
            "got those of {1}; use a rule such as AdamW",
            "divided state": "a format of optimizer state requires whole arrays on each rank, got "
            "{1}, which divides them; use AllReduce",
        },
    ),
    "equal ranks": Feature(
        options="--check-equal or --ema",
        excludes={
            "ranks that differ": "requires the same parameters on all ranks, got {1}, with "
            "different ones on each rank; use a scheme such as AllReduce, or omit it"
        },
    ),
    "verified steps": Feature(
        options="--verify-steps",
        excludes={
            "scheme without sums": "{1} does not sum gradients, which are compared; use AllReduce",
            "sync_batch_norm": "gradients depend on samples of other ranks; omit sync_batch_norm",
            "parts of the network": "others do not have the parts along {1}; use the axis data",
            "GPU": "gradients are compared in the memory of the host; use the device cpu",
            "one rank": "no other rank can compute its gradients; use at least 2 ranks",
        },
    ),
    "survival": Feature(
        options="--survive",
        excludes={
            "residuals of parts": "residuals of compression are not kept for networks "
            "that are cut; omit --compress",
            "asynchronous pipeline": "steps that overlap end on all ranks; use the schedule 1f1b",
        },
    ),
    "recycling": Feature(
        options="--survive stages=recycle",
        excludes={
            "exact training": "exact sums of gradients have a fixed order, which ranks that take "
            "over micro-batches change; use stages=recut",
            "sums that are not plain": "ranks that take over micro-batches sum gradients that are "
            "neither exact nor compressed, as those of allreduce and sharded, got {1}; use one, or "
            "stages=recut",
        },
    ),
    "CUDA graph": Feature(
        excludes={
            "eager optimizer": "{1} does not say that it is `capturable`",
            "pipeline": "the model is a stage of a pipeline",
            "several inputs or outputs": "the model has several inputs or outputs",
            "ignored targets": "the number of targets that are not ignored changes between steps",
            "steps that differ": "the steps of {1} are not all alike",
            "sums on the host": "{1} works on the host",
            "messages by MPI": "messages go by way of MPI (--comm nccl avoids it)",
        },
    ),
    # -- what others need or exclude --------------------------------------------------------------
    "accumulation": Feature(
        lambda setup: setup.accumulation > 1 and setup.accumulation, "--accumulation"
    ),
    "sync_batch_norm": Feature(lambda setup: setup.sync_batch_norm, "--sync-batch-norm"),
    "GPU": Feature(lambda setup: setup.model.backend.name == "cuda", "--device cuda"),
    "measured algorithms": Feature(
        lambda setup: setup.model.backend.autotuner.mode == "measure", "--tuning measure"
    ),
    "scheme without sums": Feature(
        lambda setup: not setup.exchange.sums_gradients and _scheme(setup)
    ),
    "scheme that depends on ranks": Feature(
        lambda setup: not setup.exchange.exact and _scheme(setup)
    ),
    "backward in halves": Feature(_halves),
    "sums on the host": Feature(
        lambda setup: not setup.exchange.sums.capturable and type(setup.exchange.sums).__name__
    ),
    "divided state": Feature(
        lambda setup: getattr(setup.exchange, "parts", 1) > 1 and _scheme(setup)
    ),
    "ranks that differ": Feature(lambda setup: not setup.exchange.equal and _scheme(setup)),
    "gradients of earlier steps": Feature(_keeps_gradients),
    "sums that are not plain": Feature(_no_plain_sums),
    "sums over further axes": Feature(_further_sums),
    "slots of other types": Feature(
        lambda setup: (
            type(setup.optimizer).slot_form is not Optimizer.slot_form
            and type(setup.optimizer).__name__
        )
    ),
    "residuals of parts": Feature(_residuals_of_parts),
    "parts of parameters": Feature(
        lambda setup: isinstance(setup.exchange, GathersParameters) and _scheme(setup)
    ),
    "clipped gradients": Feature(lambda setup: setup.optimizer.clip_norm is not None),
    "parts of the network": Feature(lambda setup: setup.mesh and ", ".join(setup.mesh.model_axes)),
    "one rank": Feature(lambda setup: setup.data.size == 1),
    "format of weights": Feature(lambda setup: any(b.rounding for b in setup.model.buffers)),
    "eager optimizer": Feature(
        lambda setup: not setup.optimizer.capturable and type(setup.optimizer).__name__
    ),
    "several inputs or outputs": Feature(
        lambda setup: len(setup.model.input_shapes) + len(setup.model.graph.outputs) > 2
    ),
    "ignored targets": Feature(
        lambda setup: any(loss.counts_targets for loss in setup.objective.losses)
    ),
    "steps that differ": Feature(lambda setup: not setup.exchange.static and _scheme(setup)),
    "messages by MPI": Feature(lambda setup: not setup.exchange.comm.capturable),
}
"""The features of a run by name, in the order in which they are checked."""
