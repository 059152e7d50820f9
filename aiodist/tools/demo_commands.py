"""`aiodist demo ...`: the commands that show the library at work."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

import aiodist
from aiodist._arrays import environment
from aiodist.tools.argument_types import devices, natural, positive
from aiodist.tools.exits import Exit
from aiodist.tools.launch import Engine, launch
from aiodist.tools.usage import UsageError

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add_demo(commands: _SubParsersAction[ArgumentParser]) -> None:
    """Add the `demo` command with a command for each demo."""
    demo = commands.add_parser("demo", help="training runs and an error report, to see the library at work")
    demos = demo.add_subparsers(title="demos", metavar="DEMO", required=True)
    _add_text(demos)
    _add_mismatch(demos)


def _add_text(demos: _SubParsersAction[ArgumentParser]) -> None:
    text = demos.add_parser(
        "text",
        help="train a character language model on the Python manual",
        description="Train a character language model in NumPy on the manual pages of the standard library "
        "(pydoc_data.topics). Every replica computes on its part of each batch in the worker thread of its device; "
        "gradients are summed by all_reduce, the weights are variables. Exit code 1 if the replicas end with different "
        "weights.",
    )
    text.add_argument("--replicas", type=positive, metavar="N", help="how many replicas (default: 4)")
    text.add_argument("--workers", type=positive, metavar="N", help="lay them out over N processes")
    text.add_argument(
        "--engine",
        choices=[engine.value for engine in Engine],
        help="what connects the processes (default: mpi; gloo needs PyTorch and no MPI)",
    )
    text.add_argument("--steps", type=positive, metavar="N", default=1300, help="how many steps (default: %(default)s)")
    text.add_argument(
        "--seed",
        type=natural,
        metavar="N",
        default=0,
        help="the same seed gives the same weights (default: %(default)s)",
    )
    text.add_argument(
        "--devices", type=devices, metavar="NAME,NAME,...", help="one for each replica (default: CPU:0,CPU:1,...)"
    )
    text.set_defaults(command=_run_text, patient=True)


def _add_mismatch(demos: _SubParsersAction[ArgumentParser]) -> None:
    mismatch = demos.add_parser(
        "mismatch",
        help="the report on a program in which one replica takes another branch",
        description="Run a wrong program and print the report on it. Exit code 0: showing it is the purpose.",
    )
    mismatch.set_defaults(command=_run_mismatch, patient=True)


def _run_text(arguments: Namespace) -> int:
    from aiodist._demos.text import run_text

    names = arguments.devices
    replicas = arguments.replicas or (len(names) if names else 4)
    if names and len(names) != replicas:
        raise UsageError(f"--replicas {replicas} with {len(names)} --devices: name one device for each replica")
    if arguments.workers is not None and replicas < arguments.workers:
        raise UsageError(f"--replicas {replicas} with --workers {arguments.workers}: each worker needs one at least")
    if arguments.engine is not None and arguments.workers is None:
        raise UsageError(f"--engine {arguments.engine} is for several --workers")
    if arguments.workers is None:
        strategy: aiodist.Strategy = strategy_on(names or cpus(replicas))
    elif environment.launched_workers() is None and arguments.workers > 1:
        engine = Engine(arguments.engine or Engine.MPI)
        return launch(arguments.workers, [sys.executable, *sys.orig_argv[1:]], engine=engine)
    else:
        strategy = _strategy_on_workers(names or cpus(replicas), arguments.workers)
    return _exit(run_text(strategy, steps=arguments.steps, seed=arguments.seed))


def _strategy_on_workers(names: Sequence[str], workers: int) -> aiodist.MultiWorkerMirroredStrategy:
    """Return a strategy on several workers, of which this one has its part of the devices.

    Raises:
        UsageError: a launcher has started another number of workers.
    """
    from aiodist.workers.engines import default_communicator

    started = environment.launched_workers() or 1
    if started != workers:
        raise UsageError(f"--workers {workers} in a job of {started}: leave --workers out, or the launcher")
    communicator = default_communicator()
    begin, end = (len(names) * k // workers for k in (communicator.rank, communicator.rank + 1))
    return aiodist.MultiWorkerMirroredStrategy(communicator, names[begin:end])


def _run_mismatch(_: Namespace) -> Exit:
    from aiodist._demos.mismatch import run_mismatch

    return _exit(run_mismatch())


def strategy_on(devices: Sequence[str]) -> aiodist.MirroredStrategy:
    """Return a strategy on the given devices.

    Raises:
        UsageError: there are no such devices, or one is named twice.
    """
    try:
        return aiodist.MirroredStrategy(devices)
    except ValueError as error:
        raise UsageError(f"--devices: {error}") from error


def cpus(count: int) -> tuple[str, ...]:
    """Name the first `count` logical CPU devices."""
    return tuple(f"CPU:{index}" for index in range(count))


def _exit(as_expected: bool) -> Exit:
    return Exit.DONE if as_expected else Exit.FAILED
