"""The command `python -m pydtnn oracle ask`: what a campaign costs, with the sums."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from math import inf, prod
from typing import Any

from pydtnn.tools.perfmodel.oracle.campaign import Terms, plan_campaign
from pydtnn.tools.perfmodel.oracle.options import OracleCase, add_run
from pydtnn.tools.perfmodel.oracle.ranking import Entry
from pydtnn.tools.perfmodel.oracle.table import format_times, percent
from pydtnn.training.workload import Workload
from pydtnn.utils.command import HelpFormatter, Parser, add_value, run_command
from pydtnn.utils.failures import NoHostError
from pydtnn.utils.units import align, parse_quantity

EXAMPLES = """example:
  python -m pydtnn oracle ask --model resnet50 --platform cpu-10gbit --ranks 32 \\
      --epochs 90 --watts 350 --price 0.8 --mtbf "365 d" --survive "1 s" --read "2 GB/s"
"""

REMOVED = ("--step", "--epoch", "--scaling")
"""Questions of earlier versions."""


def create_parser() -> Parser:
    """Return the parser of the questions."""
    parser = Parser(
        "python -m pydtnn oracle ask",
        usage="python -m pydtnn oracle ask --model NAME --platform NAME --epochs N [options]",
        description="Compute what the training of a network on a platform costs.",
        epilog=EXAMPLES,
        formatter_class=HelpFormatter,
    )
    costs = parser.add_argument_group("a campaign")
    add_value(costs, "--epochs", "N", "what do so many epochs cost?", type=int, required=True)
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
    parser.add_argument("--explain", action="store_true", help="show how they were computed")
    add_run(parser)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit status, 0 on success."""
    return run_command("pydtnn oracle", lambda: _run(arguments))


def _run(arguments: Sequence[str]) -> None:
    for name in (argument.partition("=")[0] for argument in arguments):
        if name in REMOVED:
            raise ValueError(
                f"ask: expected --epochs, got {name}, which has been removed; `python -m pydtnn "
                "oracle` prints times by ranks, and with --sweep by properties of the platform"
            )
    case = _Question(create_parser().parse_args(arguments))
    case.ranks.sort()
    terms = _terms(case.options, case.work)
    print(case.title)
    print(f"computed from: {case.source}")
    _print_campaign(case, terms)


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


class _Question(OracleCase):
    """The run and the platform that questions are about."""

    @property
    def source(self) -> str:
        rates = self.platform.compute.rates and not self.options.peaks_only
        compute = "measured rates of kernels" if rates else "peaks of computation and memory"
        return f"{compute}, links and storage of the platform {self.platform.name}"

    def fastest(self, ranks: int) -> Entry:
        entries = self.oracle.rank(self.strategies(ranks))
        if not entries or not entries[0].possible:
            why = entries[0].reason if entries else "there is no strategy"
            raise ValueError(f"ask: {ranks} ranks: {why}")
        return min((one for one in entries if one.possible), key=_epoch)


def _epoch(entry: Entry) -> float:
    return entry.projection.epoch if entry.projection else inf


def _print_campaign(case: _Question, terms: dict[str, Terms]) -> None:
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
