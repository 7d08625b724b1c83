"""Commands of one process: options, output, and errors in one line."""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import re
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TextIO, cast

from pydtnn.utils.errors import describe, printable, requested_traceback
from pydtnn.utils.names import unknown
from pydtnn.utils.terminal import Lasting, encodable


@contextlib.contextmanager
def printing() -> Iterator[None]:
    """Context manager for a command that prints: escape its output, and flush it at the end.

    Names of classes, layers and the like are those of files, which others may have written: what
    is printed passes `printable`, so that no terminal executes it.

    Raises
    ------
    SystemExit
        If the output pipe is closed, as in ``... | head -1``, with the status of a program
        terminated by SIGPIPE. Nothing more is printed then, not even by the interpreter.
    OSError
        If the output cannot be written.
    """
    try:
        try:
            with contextlib.redirect_stdout(sys.stdout and cast(TextIO, _Printable(sys.stdout))):
                yield
        finally:
            _flush()
    except BrokenPipeError:
        discard()
        raise SystemExit(128 + signal.SIGPIPE) from None


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """Context manager for training, which output that cannot be written does not end: `Lasting`."""
    output, errors = (Lasting(one or open(os.devnull, "w")) for one in (sys.stdout, sys.stderr))  # noqa: SIM115
    with (
        contextlib.redirect_stdout(cast(TextIO, output)),
        contextlib.redirect_stderr(cast(TextIO, errors)),
    ):
        try:
            yield
        finally:
            if not output.flush():  # nothing remains for the interpreter, which would fail
                discard()


class _Printable:
    """A stream without control characters; no terminal, for which there would be some."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(encodable(printable(text), self._stream))
        return len(text)

    def isatty(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def discard() -> None:
    """Discard buffered and further output to the standard output."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _flush() -> None:
    if sys.stdout is None:  # a daemon has none
        return
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        discard()
        reason = (error.strerror or str(error)).lower()
        raise OSError(f"the standard output cannot be written: {reason}") from error


MAX_HELP_COLUMNS = 100
"""Maximum width of a help page, in columns."""

ALL = "all"
"""Section that is the complete help page."""


class Parser(argparse.ArgumentParser):
    """Parser that raises its errors as exceptions with a one-sentence message.

    If there are many options, ``--help`` prints the essential ones, ``--help all`` all of them, and
    ``--help SECTION`` those of a group; the sections are the groups with a title of their own.

    Parameters
    ----------
    *args, **keywords
        Of `argparse.ArgumentParser`.
    essential : sequence of str
        Destinations of the options that ``--help`` prints, in this order; by default it prints the
        complete page.

    Attributes
    ----------
    removed : dict of str to str
        Options, and first arguments, of earlier versions, and what to use instead.
    """

    def __init__(self, *args: Any, essential: Sequence[str] = (), **keywords: Any) -> None:
        self.essential = essential
        self.removed: dict[str, str] = {}
        if essential:
            keywords["add_help"] = False
        super().__init__(*args, **keywords)
        if essential:
            self.add_argument(
                "-h", "--help", action=_Help, help=f"show a section, or {ALL}, and exit"
            )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, after refusing what is removed."""
        given = sys.argv[1:] if args is None else [*args]
        options = [one.partition("=")[0] for one in given if one.startswith("--")]
        for name in (*given[:1], *options):
            if name in self.removed:
                raise ValueError(f"{name} has been removed: {self.removed[name]}")
        return super().parse_known_args(given, namespace)

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help")

    @property
    def sections(self) -> dict[str, argparse._ArgumentGroup]:
        """Groups of arguments by title, in the order of the page, without those of argparse."""
        return {
            str(group.title): group
            for group in self._action_groups
            if group.title not in ("positional arguments", "options")
        }

    def format_help(self, section: str = ALL) -> str:
        """Return the help page, or a part of it.

        Parameters
        ----------
        section : str
            The title of a section, or the beginning of a word in it; empty for the essential
            options.

        Raises
        ------
        ValueError
            If there is no such section; the message contains all of them.
        """
        if section == ALL:
            return super().format_help()
        formatter = self._get_formatter()
        sections = self.sections
        if section:
            given = section.lower()
            chosen = [title for title in sections if f" {title}".find(f" {given}") >= 0]
            if not chosen:
                self.error(unknown("section of --help", section, [*sections, ALL]))
            formatter.start_section(chosen[0])
            formatter.add_text(sections[chosen[0]].description)
            formatter.add_arguments(sections[chosen[0]]._group_actions)
            formatter.end_section()
            return formatter.format_help()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        shown = [action for action in self._actions if action.help != argparse.SUPPRESS]
        by_name = {action.dest: action for action in shown}
        formatter.start_section("most used options")
        formatter.add_arguments(map(_shortened, map(by_name.__getitem__, self.essential)))
        formatter.end_section()
        more = f"--help {ALL} shows all {len(shown)} options, --help SECTION those of a section: "
        formatter.add_text(textwrap.fill(more + ", ".join(sections), help_columns()))
        formatter.add_text(self.epilog)
        return formatter.format_help()


def add_value(
    group: Any, names: str, metavar: str, text: str = "", default: Any = None, **keywords: Any
) -> None:
    """Add an option with a value to a parser or a group of it.

    Parameters
    ----------
    group : ArgumentParser or group
    names : str
        Separated by spaces.
    metavar, text : str
        Of the help page, where the default is added to the text.
    default : object, optional
        If there is one, values have its type, and otherwise are text or of the keyword ``type``.
    **keywords
        Of `argparse.ArgumentParser.add_argument`.
    """
    if default is not None:
        keywords |= {"default": default, "type": type(default)}
        text = f"{text} (default: {default})".strip()
    group.add_argument(*names.split(), metavar=metavar, help=text, **keywords)


def _shortened(action: argparse.Action) -> argparse.Action:
    """Return an option with the first clause of its description, and its default."""
    shown, text = copy.copy(action), action.help or ""
    shown.help = "".join(
        [first_clause(text), *re.findall(r" \(default: .*\)", text.partition("\n")[0])]
    )
    return shown


def first_clause(text: str) -> str:
    """Return the first clause of the description of an option, without its default.

    >>> first_clause("samples per rank; by default 64 (default: 1)")
    'samples per rank'
    """
    return re.split(r"\n|; |:? by default|, or path/|(?:^| )\(default", text)[0]


class _Help(argparse.Action):
    """Option ``--help [SECTION]``."""

    def __init__(self, option_strings: Sequence[str], dest: str, **keywords: Any) -> None:
        own = {"nargs": "?", "const": "", "default": argparse.SUPPRESS, "metavar": "SECTION"}
        super().__init__(option_strings, dest, **{**keywords, **own})

    def __call__(self, parser: Any, namespace: Any, section: Any, option: Any = None) -> None:
        parser._print_message(parser.format_help(section), sys.stdout)
        parser.exit()


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Page as wide as the terminal, up to `MAX_HELP_COLUMNS`; names are not broken at hyphens."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=help_columns())

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, argparse.BooleanOptionalAction):
            return action.option_strings[0].replace("--", "--[no-]")
        return super()._format_action_invocation(action)

    def _split_lines(self, text: str, width: int) -> list[str]:
        wrapped: list[str] = []
        for line in text.splitlines():
            further = " " * (4 if line.startswith(" ") else 0)
            wrapped += textwrap.wrap(line, width, break_on_hyphens=False, subsequent_indent=further)
        return wrapped


def help_columns() -> int:
    """Return the width of help pages."""
    return min(shutil.get_terminal_size().columns - 2, MAX_HELP_COLUMNS)


def run_command(name: str, run: Callable[[], None]) -> int:
    """Run a command; return the exit status, 0 on success.

    Errors are printed in one line on the standard error, with PYDTNN_TRACEBACK=1 after the
    traceback.

    Parameters
    ----------
    name : str
        What the line begins with, such as "pydtnn.comm"; empty if errors name their origin.
    run : callable
        Prints the output.
    """
    try:
        with printing():
            run()
    except Exception as error:
        text = describe(error)
        if name:
            text = f"{name}: {text.removeprefix(name.rpartition('.')[2] + ': ')}"
        print(f"{requested_traceback(error)}{text}", file=sys.stderr)
        return 1
    return 0


def subcommands(name: str, description: str, examples: str) -> tuple[Parser, Any]:
    """Return the parser of ``python -m name``, and the group of its sub-commands."""
    parser = Parser(
        prog=f"python -m {name}",
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser, parser.add_subparsers(required=True, metavar="command")


def run_subcommand(name: str, parser: Parser, arguments: Sequence[str] | None) -> int:
    """Run the sub-command that the arguments name, as `run_command` does.

    Parameters
    ----------
    name : str
        As for `run_command`.
    parser : Parser
        Each of its sub-commands sets the option ``command``, a function of all options.
    arguments : sequence of str, optional
        Default: the arguments of this process.
    """

    def run() -> None:
        options = parser.parse_args(arguments)
        options.command(options)

    return run_command(name, run)
