"""Takes the pictures of the page in docs/images, from a real server with the embedded model.

python benchmarks/page_screenshots.py [--only playground replay] [--url http://127.0.0.1:8080] [--chromium PATH]
"""

import argparse
import contextlib
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
from playwright.sync_api import Browser, Page, sync_playwright

IMAGES = Path(__file__).parent.parent / "docs" / "images"
SIZE = {"width": 1280, "height": 800}
LOAD_SECONDS = 110
RACES = 5
VIEWS = ["live", "playground", "replay", "race"]
DEPTHS = ("auto", 2, "off", 4, 6, "auto", 1)
PROMPTS = (
    "Write a short story about a shy dragon who learns to share.",
    "Explain to a child why the sky is blue.",
    "Write a letter to a friend who moved to another city.",
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Takes the pictures of the page.")
    parser.add_argument("--only", nargs="+", default=VIEWS, choices=VIEWS, help="the views to take")
    parser.add_argument("--url", help="a server that runs already; one is started without it")
    parser.add_argument("--chromium", default=shutil.which("chromium"), help="the browser's path")
    args = parser.parse_args()
    IMAGES.mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        url = args.url or stack.enter_context(serving())
        playwright = stack.enter_context(sync_playwright())
        browser = playwright.chromium.launch(
            executable_path=args.chromium, args=["--no-sandbox", "--disable-gpu"]
        )
        stack.callback(browser.close)
        if "live" in args.only:
            with working(url):
                live = open_page(browser, url, "live", height=1180)
                time.sleep(LOAD_SECONDS)
                take_live(live)
        if "playground" in args.only:
            take_conversation(open_page(browser, url), "playground")
            take_conversation(open_page(browser, url, scheme="dark"), "playground-dark", refused=True)
        if "replay" in args.only:
            take_replay(open_page(browser, url))
        if "race" in args.only:
            take_race(open_page(browser, url))


def open_page(
    browser: Browser, url: str, view: str = "playground", scheme: str = "light", height: int = 800
) -> Page:
    page = browser.new_page(viewport=SIZE | {"height": height}, color_scheme=scheme)  # type: ignore[arg-type]
    page.goto(f"{url}/#{view}")
    page.locator("#status[data-state=live]").wait_for()
    for field, value in {"seed": "7", "max-tokens": "170"}.items():
        page.evaluate("([id, value]) => { document.getElementById(id).value = value }", [field, value])
    return page


def ask(page: Page, prompt: str) -> None:
    page.locator("#message").fill(prompt)
    page.keyboard.press("Enter")


def take_live(page: Page) -> None:
    """While a request that drafts is running."""
    while page.locator("#tile-gain").inner_text() in ("–", "1.00"):
        time.sleep(0.2)
    save(page, "live")


def take_conversation(page: Page, name: str, *, refused: bool = False) -> None:
    """In the middle of an answer."""
    if refused:
        page.locator("#show-refused").check()
    ask(page, PROMPTS[0])
    page.locator(".answer .tok").nth(20 if refused else 60).wait_for()
    save(page, name)


def take_replay(page: Page) -> None:
    """At a step well into the text whose last draft alone was refused. Three drafts a step: by itself the server may
    choose none, where they do not pay."""
    page.locator("#k").select_option("3")
    page.locator("#max-tokens").fill("90")
    ask(page, PROMPTS[0])
    page.locator(".step-through:visible").click()
    page.locator("#replay-slider").fill("9")
    while not page.locator(".column:nth-child(4).missed").count():  # the labels are the first child
        page.locator("#replay-next").click()
    page.locator("#replay-next").click()
    page.locator("#replay-next").click()
    time.sleep(1)
    save(page, "replay")


def take_race(page: Page) -> None:
    """Side by side, the result known. One race is short and noisy: of several, the one with the median ratio."""
    page.evaluate("location.hash = 'race'")
    races = []
    for _ in range(RACES):
        page.locator("#race-start").click()
        page.locator("#race-result").wait_for()
        page.locator("#lane-plain .tok").nth(70).wait_for()
        races.append((float(page.locator("#race-ratio").inner_text().rstrip("×")), page.screenshot()))
        page.locator("#lane-plain.done").wait_for()
    races.sort(key=lambda race: race[0])
    print("races, MTP against plain:", ", ".join(f"{ratio:.2f}" for ratio, _ in races))
    (IMAGES / "race.png").write_bytes(races[RACES // 2][1])


def save(page: Page, name: str) -> None:
    target = IMAGES / f"{name}.png"
    page.screenshot(path=target)
    print(f"{target}: {target.stat().st_size // 1024} KB")


@contextlib.contextmanager
def working(url: str) -> Iterator[None]:
    """Gives the server one request after the other, and later two at a time, so that the charts show something."""
    ended = threading.Event()

    def work(pause: float) -> None:
        for number in range(10_000):
            if ended.wait(0 if number else pause):
                return
            body = {
                "messages": [{"role": "user", "content": PROMPTS[number % len(PROMPTS)]}],
                "max_tokens": 400,
            }
            body |= {
                "seed": number,
                "temperature": 0.7,
                "speculative": {"mtp": DEPTHS[number // 6 % len(DEPTHS)]},
            }
            with contextlib.suppress(httpx.TransportError):
                httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60, trust_env=False)

    workers = [threading.Thread(target=work, args=(pause,), daemon=True) for pause in (0, 0.7 * LOAD_SECONDS)]
    for worker in workers:
        worker.start()
    yield
    ended.set()
    for worker in workers:
        worker.join()


@contextlib.contextmanager
def serving() -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-m", "headlong.cli.main", "serve", "--port", str(port)])
    url = f"http://127.0.0.1:{port}"
    try:
        while process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                httpx.get(f"{url}/health", trust_env=False).raise_for_status()
                break
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    main()
