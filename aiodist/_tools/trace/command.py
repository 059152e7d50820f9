"""`aiodist trace ...`: the commands that show what is in a trace file."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from aiodist._tools.usage import Exit, UsageError, print_help

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from aiodist._tools.trace.reader import TraceFile

_DESCRIPTION = """\
Show the timeline of a program's replicas: which collectives they made, who waited, and for whom. A trace is a file
written by the block `with aiodist.trace("run.json"):` or, for a whole process, by setting the environment variable
AIODIST_TRACE=run.json. https://ui.perfetto.dev also shows it.
"""


def add_trace(commands: _SubParsersAction[ArgumentParser]) -> None:
    """Add the `trace` command with its subcommands."""
    trace = commands.add_parser("trace", help="show the timeline of a run", description=_DESCRIPTION)
    traces = trace.add_subparsers(title="commands", metavar="COMMAND")
    trace.set_defaults(command=partial(print_help, trace))
    show = traces.add_parser(
        "show",
        help="print a summary",
        description="Print runs, collectives by call site, which replicas held up the others, and any disagreement.",
    )
    html = traces.add_parser(
        "html",
        help="write one page with the timeline, for any browser",
        description="Write one self-contained page: a lane for each replica, waits shaded, a line for each collective.",
    )
    for parser, command in ((show, _show), (html, _html)):
        parser.add_argument("file", metavar="FILE", help="the trace, such as run.json")
        parser.set_defaults(command=command)
    show.add_argument("--json", action="store_true", help="print the result as JSON")
    html.add_argument("-o", "--output", metavar="PAGE", help="where to write it (default: FILE ending in .html)")


def _read(arguments: Namespace) -> TraceFile:
    from aiodist._tools.trace.reader import TraceFileError, read_trace

    try:
        return read_trace(arguments.file)
    except TraceFileError as error:
        raise UsageError(str(error)) from error


def _show(arguments: Namespace) -> Exit:
    from aiodist._tools.output import open_console, print_json
    from aiodist._tools.trace.summary import as_json, show

    trace = _read(arguments)
    if arguments.json:
        print_json(as_json(trace))
    else:
        show(trace, open_console())
    return Exit.DONE


def _html(arguments: Namespace) -> Exit:
    from aiodist._tools.trace.page import write_page

    trace = _read(arguments)
    path = Path(arguments.output or Path(arguments.file).with_suffix(".html"))
    try:
        write_page(trace, Path(arguments.file).name, path)
    except OSError as error:
        raise UsageError(str(error)) from error
    print(f"wrote {path}")
    return Exit.DONE
