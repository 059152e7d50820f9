"""`aiodist demo ...`: the commands that show the library at work."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from functools import partial
from typing import TYPE_CHECKING

import aiodist
from aiodist._arrays import environment
from aiodist._tools.launch.run import launch
from aiodist._tools.usage import Exit, UsageError, devices, natural, positive, print_help

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_TEXT = """\
Train a character language model in NumPy on the manual pages of the standard library (pydoc_data.topics). Every replica
computes on its part of each batch in the worker thread of its device; one merge_call per step sums the gradients and
updates the weights. The exit code is 1 if the replicas end with different weights.
"""


def add_demo(commands: _SubParsersAction[ArgumentParser]) -> None:
    """Add the `demo` command with a command for each demo."""
    what = "see the library at work: a training run, or the report on a mistake"
    demo = commands.add_parser("demo", help=what, description=f"S{what[1:]}. Neither needs data or a network.")
    demos = demo.add_subparsers(title="demos", metavar="DEMO")
    demo.set_defaults(command=partial(print_help, demo))
    text = demos.add_parser(
        "text", help="train a character language model on the Python manual", description=_TEXT
    )  # fmt: skip
    option = text.add_argument
    option("-n", "--replicas", type=positive, metavar="N", help="how many replicas (default: 4)")
    option("--workers", type=positive, metavar="N", help="distribute the replicas over N processes")
    option("--steps", type=positive, metavar="N", default=1300, help="how many steps (default: %(default)s)")
    same = "the same seed gives the same weights (default: %(default)s)"
    option("--seed", type=natural, metavar="N", default=0, help=same)
    each = "one device for each replica (default: CPU:0,CPU:1,...)"
    option("--devices", type=devices, metavar="NAME,NAME,...", help=each)
    text.set_defaults(command=_run_text)
    mismatch = demos.add_parser(
        "mismatch",
        help="show the report on a program in which one replica takes another branch",
        description="Run a wrong program and print the report on it. The exit code is 0: showing it is the purpose.",
    )
    mismatch.set_defaults(command=_run_mismatch)


def _run_text(arguments: Namespace) -> int:
    from aiodist._demos.text import run_text

    devices, workers = arguments.devices, arguments.workers
    replicas = arguments.replicas or (len(devices) if devices else 4)
    if devices and len(devices) != replicas:
        raise UsageError(f"--replicas {replicas} with {len(devices)} --devices: name one device for each replica")
    if workers is not None and replicas < workers:
        raise UsageError(f"--replicas {replicas} with --workers {workers}: each worker needs at least one")
    started = environment.launched_workers()
    if started is None and workers is not None and workers > 1:
        return launch(workers, [sys.executable, *sys.orig_argv[1:]])
    if workers is not None and workers != (started or 1):
        raise UsageError(f"--workers {workers} in a job of {started} workers: omit --workers or the launcher")
    devices = devices or tuple(f"CPU:{index}" for index in range(replicas))
    return (
        Exit.DONE if run_text(_strategy(devices, workers), steps=arguments.steps, seed=arguments.seed) else Exit.FAILED
    )


def _strategy(devices: tuple[str, ...], workers: int | None) -> aiodist.Strategy:
    """Return a strategy; one on several workers has this one's part of the devices here."""
    if workers is not None:
        rank = environment.worker_rank()
        begin, end = (len(devices) * k // workers for k in (rank, rank + 1))
        return aiodist.MultiWorkerMirroredStrategy(devices=devices[begin:end])
    try:
        return aiodist.MirroredStrategy(devices)
    except ValueError as error:  # there is no such device, or one is named twice
        raise UsageError(f"--devices: {error}") from error


def _run_mismatch(_: Namespace) -> Exit:
    from aiodist._demos.mismatch import run_mismatch

    return Exit.DONE if run_mismatch() else Exit.FAILED
