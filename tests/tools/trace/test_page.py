"""The trace page in a headless Chromium: what it draws and shows, by mouse and keys, for few and many replicas."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

import aiodist
from aiodist import CollectiveError, ReplicaContext
from aiodist._tools.trace.file import read_trace
from aiodist._tools.trace.show import page_of
from aiodist.testing import run_replicas
from tests.tools.trace.browser import CHROMIUM, Browser
from tests.workers.simulated import Job

_FOLDER = TemporaryDirectory()
"""For pages that several tests open; removed when the process ends."""


@cache
def page(replicas: int, rounds: int = 4, *, name: str = "x", parts_ways: bool = False) -> Path:
    """Write the page of a program in which replica 1 arrives last in every round, by a second; return its path."""

    async def step() -> None:
        ctx = aiodist.get_replica_context()
        for _ in range(rounds):
            await asyncio.sleep(2 if ctx.replica_id_in_sync_group == 1 else 1)
            await ctx.barrier(name=name)
        if parts_ways and ctx.replica_id_in_sync_group == 1:
            await ctx.all_reduce("SUM", 1.0)
        await ctx.all_reduce("MAX", 1.0)

    traced = Path(_FOLDER.name) / f"{replicas}-{rounds}-{len(name)}-{parts_ways}.json"
    with suppress(CollectiveError), aiodist.trace(traced):
        run_replicas(step, replicas)
    return page_beside(traced)


def page_beside(traced: Path) -> Path:
    written = traced.with_suffix(".html")
    written.write_text(page_of(read_trace(traced), "run.json"))
    return written


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed (Debian: apt install chromium)")
    with Browser() as found:
        yield found
        assert found.errors == []


def text(browser: Browser, selector: str) -> str:
    return str(browser.js(f"document.querySelector({selector!r}).innerText"))


def span(browser: Browser) -> float:
    """Return how many microseconds are visible."""
    return float(browser.js("aiodistPage.view.end - aiodistPage.view.begin"))


def place(browser: Browser, collective: int, replica: int) -> tuple[float, float]:
    """Return the point in the window where a replica waits in a collective."""
    x, y = browser.js(
        f"""(() => {{
          const page = aiodistPage, {{ trace, view }} = page, box = page.canvas.getBoundingClientRect();
          const at = trace.offset[{collective}] + {replica};
          const time = trace.first[{collective}] + trace.awaited[at] + trace.wait[at] / 2;
          return [box.left + view.x(time), box.top + view.y({replica}) + view.laneHeight / 2];
        }})()"""
    )
    return x, y


def color_at(browser: Browser, x: float, y: float) -> list[int]:
    """Return the red, green and blue of a point in the window."""
    found: list[int] = browser.js(
        f"""(() => {{
          const page = aiodistPage, box = page.canvas.getBoundingClientRect();
          const data = page.painter.context.getImageData({x} - box.left, {y} - box.top, 1, 1).data;
          return [...data].slice(0, 3);
        }})()"""
    )
    return found


def test_page_is_self_contained_and_data_cannot_end_its_script() -> None:
    written = page(2, name="</script><script>alert(1)</script><!--").read_text()
    assert re.findall(r"""(?:src|href)\s*=|url\(|@import|https?://|fetch\(|import\(""", written) == []
    assert written.count("<script") == 2
    assert "<!--" not in written


def test_page_of_a_trace_without_runs_says_so(browser: Browser, tmp_path: Path) -> None:
    with aiodist.trace(tmp_path / "run.json") as path:
        pass
    browser.open(page_beside(path))
    assert "This trace has no run" in text(browser, "body")
    assert browser.js("document.querySelector('main').offsetHeight") == 0


def test_facts_and_tables_are_shown_and_names_are_text(browser: Browser) -> None:
    browser.open(page(4, name="</script><img src=x onerror=alert(1)>"))
    assert text(browser, "#title") == "run.json"
    assert text(browser, "#facts").startswith("1 run · 5 collectives · 20 calls")
    first = text(browser, "#stragglers tbody tr").split()
    assert first == ["1", "CPU:1", "12.0", "s", "4", "of", "5", "8.00", "s", "0"]
    assert "</script><img src=x onerror=alert(1)>" in text(browser, "#sites")
    assert browser.js("document.querySelectorAll('img').length") == 0
    assert browser.js("document.querySelector('#trouble').hidden") is True
    assert text(browser, "#kinds").split() == ["barrier", "all_reduce"]
    assert browser.js("new Set(aiodistPage.painter.kindColors).size") == 2
    assert browser.js("aiodistPage.view.laneHeight * 4 / aiodistPage.view.plotHeight") == pytest.approx(1)


@pytest.mark.parametrize("replicas", [4, 2000])
def test_waits_are_shaded_and_the_disagreement_is_red_at_any_size(browser: Browser, replicas: int) -> None:
    browser.open(page(replicas, 2, parts_ways=True))
    red, green, blue = color_at(browser, *place(browser, 1, 0))
    assert red > green > blue
    browser.press("e")
    browser.press("Escape")
    red, green, blue = color_at(browser, *place(browser, 2, 0))
    assert red > 2 * green
    assert blue < red / 2
    assert browser.js("aiodistPage.state.lane") == 1


def test_lanes_of_a_worker_are_counted_from_its_first_replica(browser: Browser, tmp_path: Path) -> None:
    async def part(ctx: ReplicaContext) -> None:
        await ctx.all_reduce("SUM" if ctx.replica_id_in_sync_group == 2 else "MAX", 1.0)

    with aiodist.trace(tmp_path / "run.json") as path:
        asyncio.run(Job(1, 2).run(part))
    browser.open(page_beside(path))
    lanes = "aiodistPage.trace.tracks.map(one => [one.base, one.lanes])"
    suspects = "aiodistPage.trace.runs.map(one => [one.base, one.report.suspects])"
    assert (sorted(browser.js(lanes)), sorted(browser.js(suspects))) == ([[0, 1], [1, 2]], [[0, []], [1, [1]]])


def test_tooltip_shows_the_collective_under_the_pointer(browser: Browser) -> None:
    browser.open(page(4))
    browser.mouse("mouseMoved", *place(browser, 2, 3))
    assert text(browser, "#tip").splitlines()[0] == "barrier(name='x') #2"
    assert "replica 3 waited 1.00 s" in text(browser, "#tip")
    assert "last: replica 1" in text(browser, "#tip")
    browser.mouse("mouseMoved", 60, 400)
    assert browser.js("document.querySelector('#tip').hidden") is True


def test_collectives_are_selected_by_click_keys_and_search(browser: Browser) -> None:
    browser.open(page(4))
    browser.click(*place(browser, 1, 0))
    assert "barrier(name='x') #1" in text(browser, "#chosen")
    assert "replica 1, 1.00 s later" in text(browser, "#chosen")
    browser.press("]")
    assert "#2" in text(browser, "#chosen b")
    browser.press("Enter")
    assert span(browser) < 2e6
    browser.press("Escape")
    assert browser.js("document.querySelector('#chosen').hidden") is True
    browser.press("0")
    assert span(browser) > 8e6
    browser.press("/")
    browser.js("document.activeElement.value = 'BARRIER'; document.activeElement.dispatchEvent(new Event('input'))")
    assert text(browser, "#found") == "4 hits"
    assert "barrier(name='x') #0" in text(browser, "#chosen")
    browser.press("Enter")
    assert "barrier(name='x') #1" in text(browser, "#chosen")


def test_wheel_zooms_at_the_pointer_and_drag_and_arrows_move(browser: Browser) -> None:
    browser.open(page(4))
    x, y = place(browser, 2, 0)
    before = span(browser)
    browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=-300)
    assert span(browser) / before == pytest.approx(1 / 2.718, rel=0.01)
    assert place(browser, 2, 0)[0] == pytest.approx(x, abs=1)
    browser.mouse("mousePressed", 400, 400, button="left", buttons=1)
    browser.mouse("mouseMoved", 460, 400, button="left", buttons=1)
    browser.mouse("mouseReleased", 460, 400, button="left")
    assert place(browser, 2, 0)[0] == pytest.approx(x + 60, abs=1)
    browser.press("ArrowRight")
    assert place(browser, 2, 0)[0] < x + 60


def test_disagreement_is_marked_and_found(browser: Browser) -> None:
    browser.open(page(8, parts_ways=True))
    assert text(browser, "#trouble summary strong") == "CollectiveMismatchError: replicas disagree at collective #4"
    assert "> replica 1           CPU:1       all_reduce(SUM, float)" in text(browser, "#trouble pre")
    assert text(browser, "#trouble .good").strip().startswith("replicas 0 and 2-7")
    assert browser.js("document.querySelectorAll('#trouble .good').length") == 1
    browser.js("document.querySelector('#trouble summary button').click()")
    browser.frame()
    assert "replicas 0 and 2-7\nall_reduce(MAX, float) at" in text(browser, "#chosen")
    assert "replica 1\nall_reduce(SUM, float) at" in text(browser, "#chosen")


def test_lanes_of_thousands_scroll(browser: Browser) -> None:
    browser.open(page(2000, 2, parts_ways=True))
    assert browser.js("aiodistPage.view.lanes") == [0, 2000]
    browser.js("document.querySelector('#stragglers tbody tr').click()")
    browser.js("document.querySelector('#timeline').focus()")
    for _ in range(3):
        browser.press("PageDown")
    first, end = browser.js("aiodistPage.view.lanes")
    assert first > 10
    assert end - first < 200


@pytest.mark.parametrize(("scheme", "paper"), [("dark", "#14171d"), ("light", "#fbfbfa")])
def test_colour_scheme_is_followed(browser: Browser, scheme: str, paper: str) -> None:
    browser.prefer(scheme)
    browser.open(page(2))
    assert browser.js("aiodistPage.painter.colors.paper") == paper
