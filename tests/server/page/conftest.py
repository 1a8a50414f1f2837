"""A browser for each file, a tab for each test. Imports inside: without Playwright the tests skip themselves.

Playwright keeps an event loop in this thread for as long as its browser lives, hence no wider scope.
"""

import time

import pytest

from headlong.engine.engine import Engine


@pytest.fixture(scope="module")
def browser():
    from support.browser import open_browser

    with open_browser() as browser:
        yield browser


@pytest.fixture
def visit(browser):
    from support.browser import Visit

    with Visit(browser) as visit:
        yield visit


@pytest.fixture
def page(visit, server):
    page = visit.open(server.url)
    page.locator("#status[data-state=live]").wait_for()
    return page


@pytest.fixture
def unhurried(monkeypatch):
    """Engines of this process take their time, so that an answer is still being given when the test acts on it."""
    step = Engine.step

    def slow_step(engine):
        time.sleep(0.03)
        return step(engine)

    monkeypatch.setattr(Engine, "step", slow_step)
