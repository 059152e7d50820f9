"""Make the pictures of README and index from real runs.

    python docs/pictures.py

Rich draws the report of README's program as SVG. Chromium, which must be on the path, photographs a trace page.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "_static"
TRACED = """
import asyncio
import time

import numpy as np

import aiodist


def work(replica, step):
    time.sleep(0.04 + 0.03 * ((replica + step) % 4))
    return np.ones(1000)


async def train():
    ctx = aiodist.get_replica_context()
    r = ctx.replica_id_in_sync_group
    for step in range(4):
        gradient = await ctx.run_sync(work, r, step)
        gradient = await ctx.all_reduce("SUM", gradient)
        if step % 2:
            await ctx.run_sync(work, 3 - r, step)
            await ctx.all_gather(gradient[:10], 0)
            await ctx.run_sync(work, r, 0)
            await ctx.barrier()


with aiodist.trace("run.json"):
    asyncio.run(aiodist.MirroredStrategy([f"CPU:{k}" for k in range(4)]).run(train))
"""


def blocks(language: str) -> list[str]:
    """Return README's fenced blocks of a language."""
    return re.findall(
        rf"^```{language}\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )


def program_of_readme() -> str:
    """Return README's program with the change that it shows."""
    program = next(block for block in blocks("python") if block.startswith("# train.py"))
    changed = next(block for block in blocks("diff")).splitlines()[2:]
    old, new = ("".join(f"{line[1:]}\n" for line in changed if line[:1] != sign) for sign in "+-")
    assert old in program
    return program.replace(old, new)


def python(arguments: list[str], folder: Path) -> str:
    """Run Python; return its standard error."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    run = [sys.executable, *arguments]
    return subprocess.run(run, cwd=folder, env=env, text=True, capture_output=True, check=False).stderr


def draw_report(report: str) -> None:
    """Draw a report, with the suspects in red and the first line in bold."""
    console = Console(record=True, width=112, file=io.StringIO())
    console.print(Text("$ python train.py", "green"))
    for number, line in enumerate(report.splitlines()):
        style = (
            "bold red" if number == 0 else "red" if line.startswith(">") else "dim" if line.startswith("    ") else ""
        )
        console.print(Text(line, style))
    console.save_svg(str(PICTURES / "report.svg"), title="aiodist", unique_id="report")


def photograph(page: Path) -> None:
    """Photograph a page."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("Chromium is not on the path")
    with tempfile.TemporaryDirectory() as profile:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--virtual-time-budget=5000"]
        size, target = "--window-size=1200,520", f"--screenshot={PICTURES / 'trace.png'}"
        subprocess.run([browser, *flags, f"--user-data-dir={profile}", size, target, page.as_uri()], check=True)


def main() -> None:
    """Run the programs, and make the pictures."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(program_of_readme(), encoding="utf-8")
        printed = python(["train.py"], folder)
        draw_report(printed[printed.index("aiodist.CollectiveMismatchError") :])
        (folder / "traced.py").write_text(TRACED, encoding="utf-8")
        python(["traced.py"], folder)
        python(["-m", "aiodist", "trace", "html", "run.json"], folder)
        photograph(folder / "run.html")


if __name__ == "__main__":
    main()
