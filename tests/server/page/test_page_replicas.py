"""The page of a server before several replicas, in a real browser."""

import time

import pytest

pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
from playwright.sync_api import expect

from headlong.engine.client import EngineStats, Rates, ReplicaStatus, Totals, Usage
from support.browser import Visit
from support.scripted import ScriptedEngine, ScriptedEngines
from support.serving import RunningServer


@pytest.fixture(scope="module")
def engine():
    return ScriptedEngine("A dragon slept.")


@pytest.fixture(scope="module")
def server(engine):
    with RunningServer(loader=ScriptedEngines(engine), generation_config="auto") as server:
        yield server


def status(name: str, cached: int, **given) -> ReplicaStatus:
    stats = EngineStats(
        usage=Usage(3, 1, 5, 20, 3, 8),
        totals=Totals(asked_tokens=1000, cached_tokens=cached, drafted=10, accepted=9),
        recent=Totals(),
        rates=Rates(12.5, 0.0, 0.0, None, None, None),
    )
    return ReplicaStatus(
        **({"id": name, "state": "ready", "node": "left", "started": time.time(), "stats": stats} | given)
    )


def test_one_view_of_all_replicas(page, server, engine):
    page.goto(f"{server.url}/#live")
    expect(page.locator("#replicas")).to_be_hidden()
    engine.others = [
        status("a1b2c3d4", 100, state="lost", why="its process ended"),
        status("e5f6a7b8", 900, requests=41, taken_over=3, repeated=2),
        status("c9d0e1f2", 800, state="draining"),
    ]
    rows = page.locator("#replicas-body tr")
    expect(rows).to_have_count(3)
    expect(page.locator("#replicas-sum")).to_have_text(
        "1 of 2 replicas ready, 1 lost, 60% of the prompts' tokens from a cache, 3 streams resumed."
    )
    expect(rows.nth(0)).to_contain_text("lost: its process ended")
    told = rows.nth(1).locator("td").all_text_contents()
    assert [told[0], told[1], told[2], *told[4:]] == [
        "e5f6a7b8", "ready", "left", "3", "1", "12.5", "90%", "90%", "25%", "41", "3", "2",
    ]  # fmt: skip
    assert rows.nth(0).locator("td").nth(4).text_content() == "–", "what is lost runs nothing"
    engine.others = []
    expect(page.locator("#replicas")).to_be_hidden()


def test_it_fits_a_narrow_screen(browser, server, engine):
    engine.others = [status("a1b2c3d4", 100, state="lost", why="x" * 300), status("e5f6a7b8", 900)]
    with Visit(browser, viewport={"width": 320, "height": 760}) as visit:
        page = visit.open(server.url, "live")
        expect(page.locator("#replicas-body tr")).to_have_count(2)
        assert page.evaluate("document.documentElement.scrollWidth") <= 320
    engine.others = []
