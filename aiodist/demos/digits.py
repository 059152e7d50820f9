"""`aiodist demo digits`: one training run on 1, 2, 4 and 8 replicas, with the same global batch and the same curve."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console

import aiodist
from aiodist.demos import interruption
from aiodist.demos.blas import one_thread_each
from aiodist.demos.console import open_console
from aiodist.demos.digest import weights_digest
from aiodist.demos.images import Digits, load_digits
from aiodist.demos.perceptron import Perceptron
from aiodist.demos.progress import Watch
from aiodist.demos.summary import count, tell, tell_table
from aiodist.demos.timing import Account, account
from aiodist.demos.training import Plan, Trained, examine, train_on

TOLERANCE = 1e-3
_ROWS = 10


@dataclass(frozen=True, slots=True)
class Run:
    """One number of replicas: what each ended with, and the seconds that it took."""

    trained: tuple[Trained, ...]
    seconds: float

    @property
    def title(self) -> str:
        """How many replicas, in words."""
        return count(len(self.trained), "replica")

    @property
    def digests(self) -> list[str]:
        """The digests of the replicas' weights, equal ones once."""
        return sorted({weights_digest(one.weights) for one in self.trained})

    @property
    def times(self) -> Account:
        """Where the time of an average replica went."""
        return account([one.clock for one in self.trained])


def run_digits(strategies: Sequence[aiodist.Strategy], *, steps: int, seed: int) -> bool:
    """Train on every strategy, and compare; return whether weights and curves agree.

    Inside a run every replica must end with the same bits. Between runs the sums of a step are grouped differently, so
    that curves differ by what float32 rounds, and by no more than `TOLERANCE`.

    Raises:
        InterruptedRun: Ctrl-C came in the middle of a training.
        MissingExtraError: scikit-learn is not installed.
    """
    console = open_console()
    digits = load_digits()
    model = Perceptron((64, 128, 64, 10))
    plan = Plan(model, *digits.train, batch=128, steps=steps, seed=seed, rate=0.005, decay=0.1)
    _introduce(console, digits, plan)
    with one_thread_each():
        runs = [_train_on(console, strategy, plan) for strategy in strategies]
    _show_results(console, plan, digits, runs)
    difference = _show_curves(console, runs)
    return difference <= TOLERANCE and all(len(run.digests) == 1 for run in runs)


def _train_on(console: Console, strategy: aiodist.Strategy, plan: Plan) -> Run:
    title = count(strategy.num_replicas_in_sync, "replica")
    start = time.perf_counter()
    with Watch(console, plan.steps, title, "loss {:.3f}".format, lines=2) as watch:
        trained = interruption.run(train_on, strategy, plan, watch.step)
    return Run(trained, time.perf_counter() - start)


def _introduce(console: Console, digits: Digits, plan: Plan) -> None:
    learned, held_out = len(digits.train[1]), len(digits.held_out[1])
    tell(console, "input", f"{digits.name}, {learned + held_out} images, sha256 {digits.digest[:16]}")
    tell(console, "", f"{learned} to learn from, {held_out} held out")
    tell(console, "plan", f"{count(plan.steps, 'step')} of {plan.batch} images, the same on any number of replicas")


def _show_results(console: Console, plan: Plan, digits: Digits, runs: Sequence[Run]) -> None:
    heads = ["", "held out", "weights", "seconds", "computing", "reducing", "waiting"]
    console.print()
    tell_table(console, [heads, *(_result(plan, digits, run) for run in runs)])


def _result(plan: Plan, digits: Digits, run: Run) -> list[str]:
    _, right = examine(plan.model, run.trained[0].weights, *digits.held_out)
    digests = [digest[:8] for digest in run.digests]
    weights = f"{digests[0]}, equal" if len(digests) == 1 else f"DIFFERENT: {' '.join(digests)}"
    seconds = (run.seconds, run.times.computing, run.times.reducing, run.times.waiting)
    return [run.title, f"{right:.1%} right", weights, *(f"{value:.2f}" for value in seconds)]


def _show_curves(console: Console, runs: Sequence[Run]) -> float:
    """Print the runs' losses side by side; return the largest difference between two of them at any step."""
    losses = np.array([run.trained[0].losses for run in runs])
    steps = losses.shape[1]
    rows = np.unique(np.linspace(0, steps - 1, min(_ROWS, steps)).round().astype(int))
    console.print()
    heads = ["loss at step", *(run.title for run in runs)]
    tell_table(console, [heads, *([str(row + 1), *(f"{loss:.7f}" for loss in losses[:, row])] for row in rows)])
    difference = float(np.ptp(losses, axis=0).max())
    console.print()
    tell(console, "curves", f"largest difference at any step: {difference:.1e} (float32 rounds at 6e-08)")
    return difference
