"""The page when things go wrong, in a real headless Chromium: a server that dies, a key that is missing, a model
without a head, markup where text should be."""

import contextlib
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

import headlong
from headlong.server.keys import hash_key
from support.browser import (
    STORY,
    Visit,
    answer_chat_with,
    answer_with,
    ask,
    expect,
    finished,
    set_sampling,
    until,
)
from support.serving import RunningServer

DASHBOARD = Path(headlong.__file__).parent / "server" / "dashboard"
HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'
LOST = re.compile("ERR_CONNECTION_REFUSED|ERR_INCOMPLETE_CHUNKED|ERR_CONNECTION_RESET|ERR_EMPTY_RESPONSE")


class Cable:
    """Carries the connections to a server, and can be cut."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._ends: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def drop(self) -> None:
        for end in (self._listener, *self._ends):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def restore(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                self._ends += [near, far]
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=pair, daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


class Process:
    """`headlong serve` as a process that is killed, and started again on the same port."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self._port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self.restore()

    def drop(self) -> None:
        self._process.kill()
        self._process.wait()

    def restore(self) -> None:
        command = [sys.executable, "-m", "headlong.cli.main", "serve", "--port", str(self._port)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until(self._ready, 120)

    def _ready(self) -> bool:
        assert self._process.poll() is None, f"it ended with code {self._process.returncode}"
        try:
            return httpx.get(f"{self.url}/health", trust_env=False).status_code == 200
        except httpx.TransportError:
            return False


@pytest.fixture(params=["cable", pytest.param("process", marks=pytest.mark.slow)])
def line(request):
    """A way to a server that can be dropped and restored."""
    line = Cable(request.getfixturevalue("server").port) if request.param == "cable" else Process()
    yield line
    line.drop()


class TestConnection:
    @pytest.mark.usefixtures("unhurried")
    def test_a_dropped_connection_is_shown_and_recovers(self, visit, line):
        visit.expected = LOST
        page = visit.open(line.url)
        expect(page.locator("#status")).to_have_text("live")
        set_sampling(page, temperature=0, max_tokens=3500)
        ask(page)
        expect(page.locator(".answer .tok").nth(5)).to_be_visible()
        line.drop()
        expect(page.locator("#banner")).to_be_visible()
        expect(page.locator("#banner-text")).to_contain_text("Connection lost.")
        expect(page.locator("#countdown")).to_have_text(re.compile(r"Retrying in \d+ s\."))
        expect(page.locator("#status")).to_have_text("connection lost")
        answer = finished(page)
        expect(answer).to_have_class(re.compile("failed"))
        expect(answer.locator(".notice")).to_contain_text("Incomplete: The connection was cut")
        line.restore()
        expect(page.locator("#status")).to_have_text("live", timeout=60_000)
        expect(page.locator("#banner")).to_be_hidden()
        set_sampling(page, max_tokens=10)
        ask(page, "Again.")
        assert finished(page).locator(".tok").count() > 0

    def test_a_stream_without_its_end_is_incomplete(self, page):
        chunk = {"choices": [{"index": 0, "delta": {"content": "Half"}, "finish_reason": None}]}
        answer_chat_with(page, [chunk], done=False)
        ask(page)
        answer = finished(page)
        expect(answer.locator(".notice")).to_contain_text("Incomplete")
        expect(answer.locator(".tokens")).to_have_text("Half")

    def test_the_key_is_asked_for_and_kept_for_the_tab(self, browser):
        with RunningServer(api_keys=(hash_key("open-sesame"),)) as locked, Visit(browser) as visit:
            visit.expected = re.compile("status of 401")
            page = visit.open(locked.url)
            expect(page.locator("#key-dialog")).to_be_visible()
            page.locator("#key-cancel").click()
            expect(page.locator("#banner-text")).to_have_text("This server asks for an API key.")
            page.locator("#retry").click()
            page.locator("#key").fill("wrong")
            page.keyboard.press("Enter")
            expect(page.locator("#key-dialog")).to_be_visible()
            page.locator("#key").fill("open-sesame")
            page.keyboard.press("Enter")
            expect(page.locator("#status")).to_have_text("live")
            set_sampling(page, max_tokens=5)
            ask(page)
            assert finished(page).locator(".tok").count() > 0
            page.reload()
            expect(page.locator("#status")).to_have_text("live")
            expect(page.locator("#open-key")).to_be_visible()
            assert "open-sesame" not in page.evaluate("JSON.stringify(localStorage)")

    def test_without_mtp_it_says_why_and_works(self, browser):
        with RunningServer(mtp="off") as plain, Visit(browser) as visit:
            page = visit.open(plain.url)
            reason = plain.client().get("/v1/stats").json()["mtp"]["reason"]
            expect(page.locator("#no-mtp")).to_contain_text(reason)
            assert page.locator("#k").is_disabled() and page.locator("#race-start").is_disabled()
            set_sampling(page, max_tokens=10)
            ask(page)
            answer = finished(page)
            assert answer.locator(".tok.own").count() > 0 and answer.locator(".tok.drafted").count() == 0


class TestContent:
    def test_markup_from_outside_stays_text(self, page, server):
        snapshot = server.client().get("/v1/stats").json()
        request = (snapshot["requests"] or [dict.fromkeys(("finished_at", "prompt_tokens"), 0)])[0]
        request |= {
            "id": HOSTILE,
            "endpoint": HOSTILE,
            "mtp": False,
            "mtp_reason": HOSTILE,
            "finish_reason": HOSTILE,
        }
        snapshot |= {"model": HOSTILE, "requests": [request]}
        snapshot["mtp"] |= {"available": False, "reason": HOSTILE}
        answer_with(page, "**/v1/stats/stream", [snapshot])
        chunk = {
            "choices": [
                {
                    "index": 0,
                    "delta": {"content": HOSTILE, "reasoning_content": HOSTILE},
                    "finish_reason": "stop",
                }
            ],
            "headlong": {
                "tokens": [{"text": HOSTILE * 2, "drafted": False}],
                "num_drafted": 1,
                "rejected": [HOSTILE],
            },
        }
        chunk["choices"][0]["delta"]["tool_calls"] = [
            {"index": 0, "function": {"name": HOSTILE, "arguments": HOSTILE}}
        ]
        answer_chat_with(page, [chunk])
        page.reload()
        expect(page.locator("#model")).to_have_text(HOSTILE)
        expect(page.locator("#no-mtp-reason")).to_have_text(HOSTILE)
        ask(page, HOSTILE)
        answer = finished(page)
        expect(page.locator(".said")).to_have_text(HOSTILE)
        assert answer.locator("> .tokens .tok").all_text_contents() == [HOSTILE]
        assert answer.locator(".tool pre").inner_text() == HOSTILE
        answer.locator("> .tokens .tok").hover()
        expect(page.locator("#token-tip")).to_contain_text(HOSTILE)
        answer.locator(".step-through").click()
        page.locator("#replay-next").click()
        expect(page.locator("#replay-story")).to_contain_text(HOSTILE)
        page.goto(f"{server.url}/#live")
        expect(page.locator("#history tr").first).to_contain_text(HOSTILE)
        assert page.evaluate("window.hacked") is None
        assert page.locator("img:not([src='/static/icon.svg']), body script").count() == 0

    def test_reasoning_is_folded_away(self, visit, tool_server):
        page = visit.open(tool_server.url)
        expect(page.locator("#status")).to_have_text("live")
        set_sampling(page, max_tokens=30)
        ask(page)
        answer = finished(page)
        reasoning = answer.locator("details.reasoning")
        assert not reasoning.locator(".tok").first.is_visible()
        reasoning.locator("summary").click()
        expect(reasoning.locator(".tok.drafted").first).to_be_visible()
        body = {"messages": [{"role": "user", "content": STORY}], "max_tokens": 30, "seed": 7}
        body |= {"temperature": 0.8, "top_p": 0.95}
        message = tool_server.client().post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
        assert "".join(reasoning.locator(".tok").all_text_contents()) == message["reasoning_content"]

    def test_files_keep_to_a_strict_policy(self, server):
        """No inline code and nothing from elsewhere, whatever header a proxy may drop."""
        client = server.client()
        policy = client.get("/").headers["content-security-policy"]
        assert "default-src 'self'" in policy and "unsafe" not in policy
        markup = client.get("/").text
        assert not re.search(r"\son\w+=|\sstyle=|<style|javascript:", markup)
        assert not re.search(r"<script(?![^>]*\ssrc=\"/static/)", markup)
        links = re.findall(r"(?:src|href)=\"([^\"]+)\"", markup)
        assert links and all(link.startswith(("/static/", "#")) for link in links)
        for file in DASHBOARD.iterdir():
            text = file.read_text()
            assert not re.search(
                r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text
            ), file
            addresses = re.findall(r"https?://[^\s\"'`)]+", text)
            assert set(addresses) <= {"http://www.w3.org/2000/svg"}, file
