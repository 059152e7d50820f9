"""What a demo prints: labelled lines, the weights of every replica side by side, where the time went."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.text import Text

import aiodist
from aiodist.demos.digest import weights_digest
from aiodist.demos.timing import Account
from aiodist.demos.training import Trained


def count(number: int, noun: str) -> str:
    """Return ``1 replica``, ``4 replicas``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def tell(console: Console, label: str, text: str) -> None:
    """Print a labelled line."""
    console.print(Text.assemble((f"{label:<11}", "bold"), text), soft_wrap=True)


async def all_weights(strategy: aiodist.Strategy, trained: Sequence[Trained]) -> list[tuple[str, str]]:
    """Return the digest of every replica's weights, over all workers, and the device where that is in this process."""
    own = [np.array([int(weights_digest(one.weights), 16)], np.uint64) for one in trained]
    everywhere = await strategy.gather(aiodist.PerReplica(own) if len(own) > 1 else own[0], 0)
    devices = [one.device for one in trained] if len(everywhere) == len(trained) else [""] * len(everywhere)
    return [(f"{int(digest):016x}", device) for digest, device in zip(everywhere, devices, strict=True)]


def tell_weights(console: Console, weights: Sequence[tuple[str, str]]) -> bool:
    """Print the digest of every replica's weights, and return whether all are equal."""
    for replica, (digest, device) in enumerate(weights):
        tell(console, "weights" if replica == 0 else "", f"{digest}  replica {replica}  {device}".rstrip())
    equal = len({digest for digest, _ in weights}) == 1
    tell(console, "", "equal in every bit" if equal else "DIFFERENT: replicas did not make the same updates")
    return equal


def tell_time(console: Console, seconds: float, times: Account) -> None:
    """Print where the time of an average replica went."""
    parts = f"computing {times.computing:.1f}, reducing {times.reducing:.1f}, waiting {times.waiting:.1f}"
    tell(console, "time", f"{seconds:.1f} s; an average replica: {parts}")


def tell_sample(console: Console, label: str, text: str) -> None:
    """Print a text of several lines, indented, its longest lines broken."""
    console.print(label, style="bold")
    for line in text.rstrip().splitlines():
        console.print(textwrap.fill(line, 78, initial_indent="  ", subsequent_indent="  "), soft_wrap=True)
