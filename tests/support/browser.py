"""A tab in a real headless Chromium, and the moves that tests of the page share.

A visit fails on an error in the browser's console and on a request to any host but the one it opened.
"""

import contextlib
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
from playwright.sync_api import (
    Browser,
    ConsoleMessage,
    Locator,
    Page,
    Playwright,
    Request,
    expect,
    sync_playwright,
)

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
STORY = "Write a short story about a shy dragon who learns to share."
expect.set_options(timeout=60_000)


def find_chromium(playwright: Playwright) -> str | None:
    """A browser of the system, or Playwright's own."""
    for name in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"):
        if found := shutil.which(name):
            return found
    own = playwright.chromium.executable_path
    return own if Path(own).exists() else None


@contextlib.contextmanager
def open_browser() -> Iterator[Browser]:
    """A browser with a profile of its own; skips the test where there is none."""
    with sync_playwright() as playwright:
        executable = find_chromium(playwright)
        if executable is None:
            pytest.skip("no Chromium found: `apt install chromium` or `playwright install chromium`")
        browser = playwright.chromium.launch(executable_path=executable, args=ARGUMENTS)
        yield browser
        browser.close()


class Visit:
    """A tab of its own, and what must not happen in it."""

    def __init__(self, browser: Browser, **options: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        self.page = self.context.new_page()
        self.url = ""
        self.expected: re.Pattern[str] | None = None
        self.errors: list[str] = []
        self.hosts: set[str] = set()
        self.page.on("console", self._heard)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.hosts.add(urlsplit(request.url).netloc))

    def _heard(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.errors.append(message.text)

    def open(self, url: str, view: str = "playground") -> Page:
        self.url = url
        self.page.goto(f"{url}/#{view}")
        return self.page

    def __enter__(self) -> "Visit":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.context.close()
        if kind is not None:
            return  # the test has failed already, and says more
        surprises = [error for error in self.errors if not (self.expected and self.expected.search(error))]
        assert not surprises
        assert self.hosts <= {urlsplit(self.url).netloc}


def set_sampling(page: Page, *, temperature: float = 0.8, max_tokens: int = 60, seed: int = 7) -> None:
    fields = {"temperature": temperature, "top-p": 0.95, "max-tokens": max_tokens, "seed": seed}
    for name, value in fields.items():
        page.locator(f"#{name}").fill(str(value))


def ask(page: Page, text: str = STORY) -> None:
    page.locator("#message").fill(text)
    page.locator("#send").click()


def finished(page: Page) -> Locator:
    """The last answer, once it has ended."""
    answer = page.locator(".answer").last
    expect(answer).not_to_have_class(re.compile("streaming"), timeout=60_000)
    return answer


def posted(page: Page) -> list[dict]:
    """The bodies of the requests that are posted from now on."""
    bodies: list[dict] = []

    def heard(request: Request) -> None:
        if request.method == "POST":
            bodies.append(json.loads(request.post_data or "{}"))

    page.on("request", heard)
    return bodies


def answer_with(page: Page, pattern: str, events: list[dict], *, done: bool = False) -> None:
    """Puts a stream of the test's own in place of the server's: things a well-behaved server never says."""
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + (
        "data: [DONE]\n\n" if done else ""
    )
    page.route(pattern, lambda route: route.fulfill(content_type="text/event-stream", body=body))


def answer_chat_with(page: Page, chunks: list[dict], *, done: bool = True) -> None:
    answer_with(page, "**/v1/chat/completions", chunks, done=done)


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
