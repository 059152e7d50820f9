"""`aiodist demo text`: a character language model, trained by several replicas at once."""

from __future__ import annotations

import asyncio
import hashlib
import math
import textwrap
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

import aiodist
from aiodist._core.text import count
from aiodist._demos.language import LanguageModel, load_topics, windows
from aiodist._demos.training import Learner, Plan, one_blas_thread, train_on
from aiodist._tools.output import open_console

PROMPT = 'The "replica" statement\n***********************\n\nA replica is '
SAMPLE = 300
_LINES = 10


def run_text(strategy: aiodist.Strategy, *, steps: int, seed: int) -> bool:
    """Train, and print the results; return whether all replicas ended with the same weights."""
    cluster = strategy.cluster_resolver
    console = open_console(quiet=cluster is not None and cluster.task_id > 0)
    corpus = load_topics()
    symbols = len(corpus.symbols)
    model = LanguageModel(symbols)
    plan = Plan(model, *windows(corpus.codes, model.context), steps, seed)
    _print(console, "input", f"pydoc_data.topics: {len(corpus.codes):,} characters")
    _print(console, "", f"{symbols} symbols; at random {math.log2(symbols):.2f} bits per character")
    _print(console, "plan", f"{count(steps, 'step')} of {plan.batch} characters, divided among the replicas")
    on_step = _progress(console, steps, count(strategy.num_replicas_in_sync, "replica"))
    start = time.perf_counter()
    with one_blas_thread():
        learner, digests = asyncio.run(_train(strategy, plan, on_step))
    seconds = time.perf_counter() - start
    console.print("sample", style="bold")
    sample = corpus.decode(model.sample(learner.weights, corpus.encode(PROMPT), SAMPLE, seed=seed))
    for line in (PROMPT + sample).rstrip().splitlines():
        console.print(textwrap.fill(line, 78, initial_indent="  ", subsequent_indent="  "), soft_wrap=True)
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


def _progress(console: Console, steps: int, title: str) -> Callable[[float], None]:
    """Return a function that takes each step's loss, in nats, and prints some: the first, every tenth, and the last."""
    done, smooth, first = 0, 0.0, 0.0

    def step(loss: float) -> None:
        nonlocal done, smooth, first
        done, now = done + 1, time.perf_counter()
        smooth = 0.95 * smooth + 0.05 * loss if done > 1 else loss
        first = first or now  # what comes before the end of the first step is paid once
        if done in {1, steps} or done % max(steps // _LINES, 1) == 0:
            rate = f", {(done - 1) / (now - first):.0f} steps/s" if done > 1 else ""
            bits = f"{smooth / math.log(2):.2f} bits/char"
            console.print(f"{title}, step {done:>{len(str(steps))}} of {steps}: {bits}{rate}", soft_wrap=True)

    return step


def _print(console: Console, label: str, text: str) -> None:
    console.print(Text.assemble((f"{label:<11}", "bold"), text), soft_wrap=True)
