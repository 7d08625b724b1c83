"""The command `python -m pydtnn oracle ask`: questions, and answers with their sums."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

from pydtnn.tools.perfmodel.oracle.options import Case, add_run
from pydtnn.tools.perfmodel.oracle.questions import (
    ERRORS,
    PROPERTIES,
    Answer,
    Questions,
    Terms,
    plan_campaign,
)
from pydtnn.tools.perfmodel.oracle.ranking import Entry, Oracle
from pydtnn.tools.perfmodel.oracle.table import duration, format_times, percent
from pydtnn.tools.perfmodel.prediction import Prediction
from pydtnn.training.workload import Workload
from pydtnn.utils.command import HelpFormatter, Parser, add_value, run_command
from pydtnn.utils.failures import NoHostError
from pydtnn.utils.units import align, parse_quantity

EXAMPLES = """examples:
  python -m pydtnn oracle ask --model resnet50 --platform cpu-10gbit --ranks 1-64 \\
      --global-batch-size 1024 --step "400 ms"
  python -m pydtnn oracle ask --model resnet50 --platform cpu-10gbit --ranks 32 --scaling \\
      --epochs 90 --watts 350 --price 0.8 --mtbf "365 d" --survive "1 s" --read "2 GB/s"
"""


def create_parser() -> Parser:
    """Return the parser of the questions."""
    parser = Parser(
        "python -m pydtnn oracle ask",
        usage="python -m pydtnn oracle ask --model NAME --platform NAME QUESTION [options]",
        description="Answer questions about the training of a network on a platform.",
        epilog=EXAMPLES,
        formatter_class=HelpFormatter,
    )
    ask = parser.add_argument_group("questions")
    add_value(ask, "--step", "TIME", "what does a step of this time need, such as '100 ms'?")
    add_value(ask, "--epoch", "TIME", "what does an epoch of this time need, such as '1 h'?")
    add_value(ask, "--epochs", "N", "what do so many epochs cost?", type=int)
    text = "how do steps scale, strong and weak?"
    ask.add_argument("--scaling", action="store_true", help=text)
    costs = parser.add_argument_group("a campaign of --epochs")
    add_value(costs, "--watts", "W", "power of a host", type=float)
    add_value(costs, "--price", "X", "of a host for an hour", type=float)
    add_value(costs, "--mtbf", "TIME", "between two failures of a host: '365 d'")
    add_value(costs, "--restart", "TIME", "after a failure", "1 min")
    text = "or until the others continue without the host that failed, instead: '1 s'"
    add_value(costs, "--survive", "TIME", text)
    add_value(costs, "--read", "RATE", "of a file system that all ranks share: '2 GB/s'")
    text = "of a sample in a file (default: 1 B a value)"
    add_value(costs, "--sample-bytes", "SIZE", text)
    parser.set_defaults(watts=0.0, price=0.0)
    parser.add_argument("--explain", action="store_true", help="show how answers were computed")
    add_run(parser)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit status, 0 on success."""
    return run_command("pydtnn oracle", lambda: _run(create_parser().parse_args(arguments)))


def _run(options: argparse.Namespace) -> None:
    targets = {"step": options.step, "epoch": options.epoch}
    asked = {name: parse_quantity(f"--{name}", text, "s") for name, text in targets.items() if text}
    if not (asked or options.epochs is not None or options.scaling):
        raise ValueError(
            "ask: expected a question, got none; add --step, --epoch, --epochs or --scaling"
        )
    case = _Case(options)
    case.ranks.sort()
    terms = _terms(options, case.work) if options.epochs is not None else {}
    print(case.title)
    print(f"computed from: {case.source}")
    for name, target in asked.items():
        _print_inverse(case, name, target)
    if terms:
        _print_campaign(case, terms)
    if options.scaling:
        _print_scaling(case)


def _terms(options: argparse.Namespace, work: Workload) -> dict[str, Terms]:
    """Return the terms by what is done after a failure."""

    def of(name: str, unit: str) -> float | None:
        text = getattr(options, name.replace("-", "_"))
        return parse_quantity(f"--{name}", text, unit) if text else None

    for name in ("watts", "price"):
        if not 0 <= getattr(options, name) < float("inf"):
            raise ValueError(f"--{name}: expected at least 0, got {getattr(options, name)}")
    nbytes = of("sample-bytes", "B") or prod(work.input_shape)
    costs = {"watts": options.watts, "price": options.price}
    more = of("read", "B/s"), of("mtbf", "s"), of("restart", "s") or 0.0
    found = {"restart": Terms(options.epochs, nbytes, *more, **costs)}
    if survive := of("survive", "s"):
        if not options.mtbf:
            raise ValueError("ask: --survive: expected --mtbf, got none; add it")
        found["continue"] = replace(found["restart"], restart=survive, survive=True)
    return found


class _Case(Case):
    """The run and the platform that questions are about."""

    def questions(self, name: str, oracle: Oracle | None = None) -> Questions:
        def measure(one: Prediction) -> float:
            return one.seconds if name == "step" else one.epoch

        return Questions(oracle or self.oracle, self.strategies, measure)

    @property
    def source(self) -> str:
        rates = self.platform.compute.rates and not self.options.peaks_only
        compute = "measured rates of kernels" if rates else "peaks of computation and memory"
        return f"{compute}, links and storage of the platform {self.platform.name}"

    def fastest(self, ranks: int) -> Entry:
        questions = self.questions("epoch")
        found = questions.fastest(self.oracle, self.strategies(ranks))
        if found is None or found.projection is None or not found.possible:
            why = found.reason if found else "there is no strategy"
            raise ValueError(f"ask: {ranks} ranks: {why}")
        return found


def _print_inverse(case: _Case, name: str, target: float) -> None:
    questions, most = case.questions(name), case.ranks[-1]
    what = "a step" if name == "step" else "an epoch"
    print(f"\n{what} of {duration(target)} needs one of these, and all else as it is")
    answers = [questions.ranks(target, case.ranks)]
    answers += [questions.property(axis, target, most) for axis in PROPERTIES]
    answers.append(questions.memory(target, most))
    rows = [["", "answer", "strategy", name, "limited by"]]
    rows += [_row(one, questions) for one in answers]
    print("\n".join(align(rows, 3)))
    print(f"all besides the first with {most} ranks")
    if case.options.explain:
        for one in answers:
            print("\n".join([f"{one.what}:", *(f"  {line}" for line in one.sums)]))


def _row(one: Answer, questions: Questions) -> list[str]:
    entry, seconds = one.entry, questions.seconds(one.entry)
    value = one.value or "not enough"
    if entry is None or seconds == float("inf"):
        return [one.what, value, "none is possible", "-", entry.reason if entry else "-"]
    return [one.what, value, entry.work.strategy, duration(seconds), entry.bottleneck]


def _print_campaign(case: _Case, terms: dict[str, Terms]) -> None:
    entries = {ranks: case.fastest(ranks) for ranks in case.ranks}
    projector, found = case.oracle.projector, {}
    names = "ranks, after a failure, strategy, time, host h, kWh, cost, failures, limited by"
    rows: list[list[Any]] = [names.split(", ")]
    for ranks, entry in entries.items():
        for after, given in terms.items():
            words = [str(ranks), after if given.mtbf else "-", entry.work.strategy]
            try:
                one = plan_campaign(entry, projector, given)
            except NoHostError as error:
                rows.append([*words, *["-"] * 5, str(error)])
                continue
            found[ranks, after] = one
            limit = max(one.parts, key=lambda name: one.parts[name])
            numbers = one.host_hours, one.energy / 3.6e6, one.cost, one.failures
            rows.append([*words, one.seconds, *(f"{number:.4g}" for number in numbers)])
            rows[-1].append(entry.bottleneck if limit == "compute" else limit)
    format_times(rows, 3)
    print(f"\n{case.options.epochs} epochs")
    print("\n".join(align(rows, 3)))
    ranks, after = min(found, key=lambda key: found[key].seconds)
    one = found[ranks, after]
    parts = {**one.parts, "all": one.seconds}
    rows = [[name, s, percent(s, one.seconds)] for name, s in parts.items()]
    format_times(rows, 1)
    print(f"\nthe fastest, {entries[ranks].work.strategy}, on {one.hosts} hosts")
    print("\n".join(align(rows, 1)))
    if case.options.explain:
        print("\n".join(f"  {line}" for line in one.sums))


def _print_scaling(case: _Case) -> None:
    spread = ", ".join(f"{name} {100 * error:.0f} %" for name, error in ERRORS.items())
    most = case.ranks[-1]
    per_rank = case.options.batch_size or max(case.work.batch // most, 1)
    batch = case.options.global_batch_size or per_rank * most
    projector = case.oracle.projector
    work = replace(case.work, batch=batch)
    strong = Oracle(projector), "strong", f"{batch} samples per step"
    weak = Oracle(projector, per_rank), "weak", f"{per_rank} samples per rank"
    for oracle, name, what in (strong, weak):
        questions = case.questions("step", oracle)
        names = "ranks, strategy, step, interval, samples/s, efficiency, limited by"
        rows: list[list[Any]] = [names.split(", ")]
        for ranks in case.ranks:
            works = [replace(one, batch=work.batch) for one in case.strategies(ranks)]
            entry = questions.fastest(oracle, works)
            one = entry.projection if entry and entry.possible else None
            if entry is None or one is None:
                rows.append([str(ranks), entry.reason if entry else "-", *["-"] * 5])
                continue
            interval = " to ".join(map(duration, questions.interval(entry.work)))
            rows.append([str(ranks), entry.work.strategy, one.seconds, interval])
            rows[-1] += [f"{one.throughput:.4g}", percent(entry.efficiency, 1.0), entry.bottleneck]
        format_times(rows, 2)
        print(f"\n{name} scaling: {what}")
        print("\n".join(align(rows, 2)))
    print(f"intervals: all rates better or worse by {spread}")
    if case.options.explain:
        print("efficiency: samples/s over those of one rank times the ranks")
