"""`aiodist demo text`: a character language model, trained by several replicas at once."""

from __future__ import annotations

import math
import time

from rich.console import Console

import aiodist
from aiodist.demos import interruption
from aiodist.demos.blas import one_thread_each
from aiodist.demos.console import open_console
from aiodist.demos.corpus import Corpus, load_topics, windows
from aiodist.demos.language_model import LanguageModel
from aiodist.demos.progress import Watch
from aiodist.demos.sampling import continue_text
from aiodist.demos.summary import all_weights, count, tell, tell_sample, tell_time, tell_weights
from aiodist.demos.timing import account
from aiodist.demos.training import Plan, Trained, examine, train_on

PROMPT = 'The "replica" statement\n***********************\n\nA replica is '
SAMPLE = 300


def run_text(strategy: aiodist.Strategy, *, steps: int, seed: int) -> bool:
    """Train, examine, and print what came of it; return whether all replicas ended with the same weights.

    Raises:
        InterruptedRun: Ctrl-C came in the middle of the training.
    """
    cluster = strategy.cluster_resolver
    console = open_console(quiet=cluster is not None and cluster.task_id > 0)
    corpus = load_topics()
    model = LanguageModel(len(corpus.symbols))
    plan = _plan(model, corpus, steps, seed)
    title = count(strategy.num_replicas_in_sync, "replica")
    _introduce(console, corpus, plan)
    start = time.perf_counter()
    with one_thread_each():
        with Watch(console, plan.steps, title, _bits_per_character) as watch:
            trained = interruption.run(train_on, strategy, plan, watch.step)
        seconds = time.perf_counter() - start
        _show_skill(console, model, trained[0], corpus, seed)
    equal = tell_weights(console, interruption.run(all_weights, strategy, trained))
    tell_time(console, seconds, account([one.clock for one in trained]))
    return equal


def _plan(model: LanguageModel, corpus: Corpus, steps: int, seed: int) -> Plan:
    inputs, targets = windows(corpus.train, model.context)
    return Plan(model, inputs, targets, batch=512, steps=steps, seed=seed, rate=0.01, decay=0.1)


def _introduce(console: Console, corpus: Corpus, plan: Plan) -> None:
    learned, held_out, symbols = len(corpus.train), len(corpus.held_out), len(corpus.symbols)
    tell(console, "input", f"{corpus.name}, {corpus.characters:,} characters, sha256 {corpus.digest[:16]}")
    tell(console, "", f"{learned:,} to learn from, {held_out:,} held out; repeated paragraphs left out")
    tell(console, "", f"{symbols} symbols; at random {math.log2(symbols):.2f} bits per character")
    tell(console, "plan", f"{count(plan.steps, 'step')} of {plan.batch} characters, cut over the replicas")


def _bits_per_character(loss: float) -> str:
    return f"{loss / math.log(2):.2f} bits/char"


def _show_skill(console: Console, model: LanguageModel, trained: Trained, corpus: Corpus, seed: int) -> None:
    surprise, right = examine(model, trained.weights, *windows(corpus.held_out, model.context))
    tell(console, "held out", f"{_bits_per_character(surprise)}; {right:.0%} of next characters guessed right")
    sample = continue_text(model, trained.weights, corpus, PROMPT, SAMPLE, seed=seed)
    tell_sample(console, "sample", PROMPT + sample)
