"""`aiodist demo text`: a character language model, trained by several replicas at once."""

from __future__ import annotations

import asyncio
import hashlib
import math
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

import aiodist
from aiodist._core.text import count
from aiodist._demos.language import Corpus, LanguageModel, load_topics, windows
from aiodist._demos.training import Learner, Plan, one_blas_thread, train_on
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
    symbols = len(corpus.symbols)
    model = LanguageModel(symbols)
    plan = Plan(model, *windows(corpus.train, model.context), steps, seed)
    learned, held_out = f"{len(corpus.train):,} characters to learn from", f"{len(corpus.held_out):,} held out"
    _print(console, "input", f"pydoc_data.topics: {learned}, {held_out}; repeated paragraphs left out")
    _print(console, "", f"{symbols} symbols; at random {math.log2(symbols):.2f} bits per character")
    _print(console, "plan", f"{count(steps, 'step')} of {plan.batch} characters, divided among the replicas")
    start = time.perf_counter()
    with one_blas_thread():
        with _progress(console, steps, count(strategy.num_replicas_in_sync, "replica")) as on_step:
            learner, digests = asyncio.run(_train(strategy, plan, on_step))
        seconds = time.perf_counter() - start
        _print_skill(console, learner, model, corpus, seed)
    for replica, digest in enumerate(digests):
        _print(console, "" if replica else "weights", f"{digest:016x}  replica {replica}")
    equal = len(set(digests)) == 1
    _print(console, "", "equal in every bit" if equal else "DIFFERENT: replicas did not make the same updates")
    _print(console, "time", f"{seconds:.1f} s")
    return equal


async def _train(strategy: aiodist.Strategy, plan: Plan, on_step: Callable[[float], None]) -> tuple[Learner, list[int]]:
    """Train; return what was learned, and the digests of all replicas' weights."""
    learner = await train_on(strategy, plan, on_step)
    digests = strategy.experimental_local_results(await strategy.run(_digests, (learner,)))
    return learner, digests[0].tolist()


async def _digests(learner: Learner) -> Any:
    """Return a digest of each replica's weights, over all workers, in a replica."""
    digest = int.from_bytes(hashlib.sha256(learner.vector.tobytes()).digest()[:8])
    return await aiodist.get_replica_context().all_gather(np.array([digest], np.uint64), 0)


@contextmanager
def _progress(console: Console, steps: int, title: str) -> Iterator[Callable[[float], None]]:
    """Give a function that shows another step and its loss, in nats: as a bar in a terminal, as lines elsewhere."""
    done, smooth, first, shown = 0, 0.0, 0.0, 0.0
    columns = (
        TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(),
        TextColumn("{task.fields[text]}", style="cyan"), TimeElapsedColumn(),
    )  # fmt: skip
    bar = Progress(*columns, console=console, auto_refresh=False, disable=not console.is_interactive)  # and no thread
    task = bar.add_task(title, total=steps, text="")

    def step(loss: float) -> None:
        nonlocal done, smooth, first, shown
        done, now = done + 1, time.perf_counter()
        smooth = 0.95 * smooth + 0.05 * loss if done > 1 else loss
        first = first or now  # what comes before the end of the first step is paid once
        text = _bits(smooth) + (f", {(done - 1) / (now - first):.0f} steps/s" if done > 1 else "")
        if console.is_interactive and (done == steps or now - shown > _REFRESH_SECONDS):
            shown = now
            bar.update(task, completed=done, text=text, refresh=True)
        elif not console.is_interactive and (done in {1, steps} or done % max(steps // _LINES, 1) == 0):
            console.print(f"{title}, step {done:>{len(str(steps))}} of {steps}: {text}", soft_wrap=True)
            console.file.flush()

    with bar:  # which leaves the last bar in the end, and gives the cursor back
        yield step


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
