"""The command `aiodist doctor`."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace, _SubParsersAction
from collections.abc import Callable, Sequence

from aiodist.tools.argument_types import names, positive
from aiodist.tools.doctor.findings import Section, as_json, as_text, missing
from aiodist.tools.exits import Exit
from aiodist.tools.usage import UsageError


def sections() -> Sequence[Callable[[], Section]]:
    """Return what looks at each subject, in the order in which they are told."""
    from aiodist.tools.doctor.gpus import gpus
    from aiodist.tools.doctor.libraries import libraries
    from aiodist.tools.doctor.machine import machine
    from aiodist.tools.doctor.reductions import reductions
    from aiodist.tools.doctor.workers import workers

    return machine, libraries, reductions, gpus, workers


def add_doctor(commands: _SubParsersAction[ArgumentParser]) -> None:
    """Add `doctor` to the commands."""
    doctor = commands.add_parser(
        "doctor",
        help="what this machine has, what works, what to install",
        description="Look at the machine: versions, cores, which kernels serve and from which sizes, and what to "
        "install for what is missing. Exit code 1 if something that is needed is missing.",
    )
    doctor.add_argument("--json", action="store_true", help="print it for a program")
    _add_workers(doctor)
    doctor.set_defaults(command=_run)


def _add_workers(doctor: ArgumentParser) -> None:
    """Add what asks for a look between workers."""
    doctor.add_argument("--workers", type=positive, metavar="N", help="measure between so many workers, too")
    doctor.add_argument("--hosts", type=names, default=(), metavar="NAME,NAME,...", help="on these machines")
    doctor.add_argument("--engine", help="over this engine, as of aiodist run")
    doctor.add_argument("--launcher", metavar="PATH", help="by this mpiexec")


def _run(arguments: Namespace) -> Exit:
    if arguments.workers is None and (arguments.hosts or arguments.engine or arguments.launcher):
        raise UsageError("--hosts, --engine and --launcher say between which workers to measure: give --workers, too")
    found = [look() for look in sections()]
    if arguments.workers is not None:
        from aiodist.tools.doctor.between import between

        found.append(between(arguments))
    print(json.dumps(as_json(found), indent=2, ensure_ascii=False) if arguments.json else as_text(found))
    return Exit.FAILED if missing(found) else Exit.DONE
