"""`aiodist explain`: why a torch.distributed job hangs, from its flight recorder dumps."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from aiodist._tools.usage import Exit, UsageError, positive

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_DESCRIPTION = """\
Read the dumps that PyTorch's flight recorder has written, one per rank, and say which rank is at which collective of
which process group, and where they differ. A dump is a pickle or JSON, and its name ends in the rank, as in
nccl_trace_rank_3 and 3.json. PyTorch is not needed, and nothing in a dump is run.
"""
_EPILOG = """\
Exit codes: 0 if the ranks agree and none waits, 1 if they do not or some wait, 2 for bad usage or a file that is not a
dump.
"""


def add_explain(commands: _SubParsersAction[ArgumentParser]) -> None:
    """Add the `explain` command."""
    explain = commands.add_parser(
        "explain", help="say why a torch.distributed job hangs, from its flight recorder dumps",
        description=_DESCRIPTION, epilog=_EPILOG,
    )  # fmt: skip
    explain.add_argument("dumps", metavar="DUMP", nargs="+", type=Path, help="a dump, or a folder of them")
    explain.add_argument(
        "--ranks", "--world-size", type=positive, metavar="N", dest="world_size",
        help="how many ranks the job had, where the dumps do not say",
    )  # fmt: skip
    explain.add_argument("--json", action="store_true", help="print the result as JSON")
    explain.set_defaults(command=_run_explain)


def _run_explain(arguments: Namespace) -> Exit:
    from aiodist._tools.output import open_console, print_json, print_report
    from aiodist._torch.dumps import DumpError, read_all
    from aiodist._torch.explain import explain

    try:
        found = explain(read_all(arguments.dumps), world_size=arguments.world_size)
    except DumpError as error:
        raise UsageError(str(error)) from error
    if arguments.json:
        print_json(found.to_dict())
    elif found.report is None:
        print(found)
    else:
        print_report(open_console(), str(found))
    return Exit.DONE if found.report is None else Exit.FAILED
