"""`aiodist demo text`: a character language model, trained by several replicas at once."""

from __future__ import annotations

import asyncio
import hashlib
import math
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

import aiodist
from aiodist._core.text import count
from aiodist._demos.language import Corpus, LanguageModel, load_topics, windows
from aiodist._demos.training import Clock, Learner, Plan, mean_times, one_blas_thread, train_on
from aiodist._tools.output import open_console

PROMPT = 'The "replica" statement\n***********************\n\nA replica is '
SAMPLE = 300
_REFRESH_SECONDS = 0.1
_LINES = 10


def run_text(strategy: aiodist.Strategy, *, steps: int, seed: int) -> bool:
    """Train, examine, and print the results; return whether all replicas ended with the same weights."""
    cluster = strategy.cluster_resolver
    console = open_console(quiet=cluster is not None and cluster.task_id > 0)
    corpus = load_topics()
    model = LanguageModel(len(corpus.symbols))
    plan = Plan(model, *windows(corpus.train, model.context), steps, seed)
    _print_input(console, corpus, plan)
    start = time.perf_counter()
    with one_blas_thread():
        with _progress(console, steps, count(strategy.num_replicas_in_sync, "replica")) as on_step:
            learner, clocks, digests = asyncio.run(_train(strategy, plan, on_step))
        seconds = time.perf_counter() - start
        _print_skill(console, learner, model, corpus, seed)
    for replica, digest in enumerate(digests):
        _print(console, "" if replica else "weights", f"{digest:016x}  replica {replica}")
    equal = len(set(digests)) == 1
    _print(console, "", "equal in every bit" if equal else "DIFFERENT: replicas did not make the same updates")
    computing, reducing, waiting = mean_times(clocks)
    parts = f"computing {computing:.1f}, reducing {reducing:.1f}, waiting {waiting:.1f}"
    _print(console, "time", f"{seconds:.1f} s; an average replica: {parts}")
    return equal


async def _train(
    strategy: aiodist.Strategy, plan: Plan, on_step: Callable[[float], None]
) -> tuple[Learner, Sequence[Clock], list[int]]:
    """Train; return what was learned, the clocks of this process's replicas, and the digests of all weights."""
    learner, clocks = await train_on(strategy, plan, on_step)
    digests = strategy.experimental_local_results(await strategy.run(_digests, (learner,)))
    return learner, clocks, digests[0].tolist()


async def _digests(learner: Learner) -> Any:
    """Return a digest of each replica's weights, over all workers, in a replica."""
    digest = int.from_bytes(hashlib.sha256(learner.vector.tobytes()).digest()[:8])
    return await aiodist.get_replica_context().all_gather(np.array([digest], np.uint64), 0)


@contextmanager
def _progress(console: Console, steps: int, title: str) -> Iterator[Callable[[float], None]]:
    """Give a function that shows another step and its loss, in nats: as a bar in a terminal, as lines elsewhere."""
    done, smooth, first, shown = 0, 0.0, 0.0, 0.0
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[text]}", style="cyan"),
        TimeElapsedColumn(),
    )
    bar = Progress(*columns, console=console, auto_refresh=False)  # no thread of its own
    task = bar.add_task(title, total=steps, text="")

    def step(loss: float) -> None:
        nonlocal done, smooth, first, shown
        done += 1
        smooth = 0.95 * smooth + 0.05 * loss if done > 1 else loss
        now = time.perf_counter()
        text = _bits(smooth)
        if done == 1:  # what comes before the end of the first step is paid once
            first = now
        else:
            text += f", {(done - 1) / (now - first):.0f} steps/s"
        if not console.is_interactive:
            if done in {1, steps} or done % max(steps // _LINES, 1) == 0:
                console.print(f"{title}, step {done:>{len(str(steps))}} of {steps}: {text}", soft_wrap=True)
                console.file.flush()
        elif done == steps or now - shown > _REFRESH_SECONDS:
            shown = now
            bar.update(task, completed=done, text=text, refresh=True)

    if console.is_interactive:
        bar.start()
    try:
        yield step
    finally:
        if console.is_interactive:
            bar.stop()  # leaves the last bar, and gives the cursor back


def _print_input(console: Console, corpus: Corpus, plan: Plan) -> None:
    learned, held_out, symbols = len(corpus.train), len(corpus.held_out), len(corpus.symbols)
    _print(console, "input", f"pydoc_data.topics, {corpus.characters:,} characters, sha256 {corpus.digest[:16]}")
    _print(console, "", f"{learned:,} to learn from, {held_out:,} held out; repeated paragraphs left out")
    _print(console, "", f"{symbols} symbols; at random {math.log2(symbols):.2f} bits per character")
    _print(console, "plan", f"{count(plan.steps, 'step')} of {plan.batch} characters, divided among the replicas")


def _print_skill(console: Console, learner: Learner, model: LanguageModel, corpus: Corpus, seed: int) -> None:
    _print(console, "held out", _bits(model.examine(learner.weights, *windows(corpus.held_out, model.context))))
    sample = corpus.decode(model.sample(learner.weights, corpus.encode(PROMPT), SAMPLE, seed=seed))
    console.print("sample", style="bold")
    for line in (PROMPT + sample).rstrip().splitlines():
        console.print(textwrap.fill(line, 78, initial_indent="  ", subsequent_indent="  "), soft_wrap=True)


def _print(console: Console, label: str, text: str) -> None:
    console.print(Text.assemble((f"{label:<11}", "bold"), text), soft_wrap=True)


def _bits(loss: float) -> str:
    return f"{loss / math.log(2):.2f} bits/char"
