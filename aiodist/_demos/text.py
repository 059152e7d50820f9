"""`aiodist demo text`: a character language model, trained by several replicas at once."""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
from rich.console import Console
from rich.text import Text

import aiodist
from aiodist._demos import interruption
from aiodist._demos.corpus import Corpus, load_topics, windows
from aiodist._demos.model import LanguageModel
from aiodist._demos.terminal import Watch
from aiodist._demos.training import Plan, Trained, mean_times, train_on, weights_digest
from aiodist._tools.output import open_console

PROMPT = 'The "replica" statement\n***********************\n\nA replica is '
SAMPLE = 300


def run_text(strategy: aiodist.Strategy, *, steps: int, seed: int) -> bool:
    """Train, examine, and print the results; return whether all replicas ended with the same weights.

    Raises:
        InterruptedRun: Ctrl-C came in the middle of the training.
    """
    cluster = strategy.cluster_resolver
    console = open_console(quiet=cluster is not None and cluster.task_id > 0)
    corpus = load_topics()
    model = LanguageModel(len(corpus.symbols))
    plan = Plan(model, *windows(corpus.train, model.context), steps, seed)
    _print_input(console, corpus, plan)
    start = time.perf_counter()
    with one_blas_thread():
        with Watch(console, steps, _count(strategy.num_replicas_in_sync, "replica"), _bits) as watch:
            trained = interruption.run(train_on, strategy, plan, watch.step)
        seconds = time.perf_counter() - start
        _print_skill(console, model, trained[0], corpus, seed)
    equal = _print_weights(console, interruption.run(_digests, strategy, trained))
    computing, reducing, waiting = mean_times([one.clock for one in trained])
    parts = f"computing {computing:.1f}, reducing {reducing:.1f}, waiting {waiting:.1f}"
    _print(console, "time", f"{seconds:.1f} s; an average replica: {parts}")
    return equal


def one_blas_thread() -> AbstractContextManager[object]:
    """Keep BLAS to the calling thread inside the block.

    Every replica has a worker thread already. If each of them splits its matrix products over all cores once more, the
    pieces wait for each other: 2 to 8 times slower on 2 cores. Without threadpoolctl only the speed changes.
    """
    try:
        from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]
    except ImportError:
        return nullcontext()
    limits: AbstractContextManager[object] = threadpool_limits(limits=1, user_api="blas")
    return limits


async def _digests(strategy: aiodist.Strategy, trained: Sequence[Trained]) -> list[tuple[str, str]]:
    """Return the digest of every replica's weights, over all workers, and its device if that is in this process."""
    own = [np.array([int(weights_digest(one.weights), 16)], np.uint64) for one in trained]
    everywhere = await strategy.gather(aiodist.PerReplica(own) if len(own) > 1 else own[0], 0)
    devices = [one.device for one in trained] if len(everywhere) == len(trained) else [""] * len(everywhere)
    return [(f"{int(digest):016x}", device) for digest, device in zip(everywhere, devices, strict=True)]


def _print_input(console: Console, corpus: Corpus, plan: Plan) -> None:
    learned, held_out, symbols = len(corpus.train), len(corpus.held_out), len(corpus.symbols)
    _print(console, "input", f"{corpus.name}, {corpus.characters:,} characters, sha256 {corpus.digest[:16]}")
    _print(console, "", f"{learned:,} to learn from, {held_out:,} held out; repeated paragraphs left out")
    _print(console, "", f"{symbols} symbols; at random {math.log2(symbols):.2f} bits per character")
    _print(console, "plan", f"{_count(plan.steps, 'step')} of {plan.batch} characters, divided among the replicas")


def _print_skill(console: Console, model: LanguageModel, trained: Trained, corpus: Corpus, seed: int) -> None:
    loss, right = model.examine(trained.weights, *windows(corpus.held_out, model.context))
    _print(console, "held out", f"{_bits(loss)}; {right:.0%} of next characters guessed right")
    sample = corpus.decode(model.sample(trained.weights, corpus.encode(PROMPT), SAMPLE, seed=seed))
    console.print("sample", style="bold")
    for line in (PROMPT + sample).rstrip().splitlines():
        console.print(textwrap.fill(line, 78, initial_indent="  ", subsequent_indent="  "), soft_wrap=True)


def _print_weights(console: Console, weights: Sequence[tuple[str, str]]) -> bool:
    for replica, (digest, device) in enumerate(weights):
        _print(console, "weights" if replica == 0 else "", f"{digest}  replica {replica}  {device}".rstrip())
    equal = len({digest for digest, _ in weights}) == 1
    _print(console, "", "equal in every bit" if equal else "DIFFERENT: replicas did not make the same updates")
    return equal


def _print(console: Console, label: str, text: str) -> None:
    console.print(Text.assemble((f"{label:<11}", "bold"), text), soft_wrap=True)


def _bits(loss: float) -> str:
    return f"{loss / math.log(2):.2f} bits/char"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
