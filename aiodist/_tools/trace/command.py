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


def add_trace(commands: _SubParsersAction[ArgumentParser]) -> None:
    """Add the `trace` command with its own."""
    trace = commands.add_parser("trace", help="show a trace that aiodist.trace, or AIODIST_TRACE, has written")
    traces = trace.add_subparsers(title="commands", metavar="COMMAND")
    trace.set_defaults(command=partial(print_help, trace))
    show = traces.add_parser(
        "show",
        help="a summary in the terminal",
        description="Print runs, collectives by call site, who held up the others, and a disagreement if there is one.",
    )
    show.add_argument("file", metavar="FILE", help="the trace, e.g. run.json")
    show.add_argument("--json", action="store_true", help="print it as JSON")
    show.set_defaults(command=_show)
    html = traces.add_parser(
        "html",
        help="one page with the timeline, for any browser",
        description="Write one self-contained page: a lane for each replica, a link for each collective, waits shaded.",
    )
    html.add_argument("file", metavar="FILE", help="the trace, e.g. run.json")
    html.add_argument("-o", "--output", metavar="PAGE", help="where to write it (default: FILE ending in .html)")
    html.set_defaults(command=_html)


def _read(arguments: Namespace) -> TraceFile:
    from aiodist._tools.trace.reader import TraceFileError, read_trace

    try:
        return read_trace(arguments.file)
    except TraceFileError as error:
        raise UsageError(str(error)) from error


def _show(arguments: Namespace) -> Exit:
    from aiodist._demos.terminal import open_console
    from aiodist._tools.trace.summary import as_json, show

    trace = _read(arguments)
    if arguments.json:
        print(as_json(trace))
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
