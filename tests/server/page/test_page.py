"""The page at `/`, in a real headless Chromium against a real server with the embedded model: what a person sees
of a stream, of a step and of the server's state."""

import json
import re

import pytest

from support.browser import STORY, Page, Visit, ask, expect, finished, set_sampling, until
from support.serving import RunningServer


def request_body(**changes) -> dict:
    body = {"messages": [{"role": "user", "content": STORY}], "temperature": 0.8, "top_p": 0.95, "seed": 7}
    return body | {"max_tokens": 60} | changes


def trace_of(server: RunningServer, **changes) -> list[dict]:
    """The steps of a request, from the wire."""
    body = request_body(stream=True, speculative={"mtp": "auto", "trace": True}, **changes)
    with server.client() as client:
        lines = client.post("/v1/chat/completions", json=body).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return [event["headlong"] for event in events if "headlong" in event]


class TestPlayground:
    def test_tokens_stream_in_and_are_tinted(self, page, server):
        set_sampling(page)
        ask(page)
        answer = finished(page)
        tokens = answer.locator(".tokens .tok").all_text_contents()
        with server.client() as client:
            plain = client.post("/v1/chat/completions", json=request_body(speculative={"mtp": "off"})).json()
        assert "".join(tokens) == plain["choices"][0]["message"]["content"]
        steps = trace_of(server)
        for kind, drafted in (("drafted", True), ("own", False)):
            shown = answer.locator(f".tok.{kind}").all_text_contents()
            sent = [
                token["text"] for step in steps for token in step["tokens"] if token["drafted"] == drafted
            ]
            assert shown and shown == [text for text in sent if text]
        readout = answer.locator(".readout").inner_text()
        assert re.search(
            r"60 tokens · [\d,.]+ tokens/s · [\d.]+ tokens per step · \d+% of drafts accepted", readout
        )
        assert "K auto" in readout and "seed 7" in readout

    @pytest.mark.usefixtures("unhurried")
    def test_text_appears_before_the_answer_ends(self, page):
        set_sampling(page, temperature=0, max_tokens=1500)
        ask(page)
        expect(page.locator(".answer.streaming .tok.drafted").first).to_be_visible()
        first = page.locator(".answer .tok").count()
        until(lambda: page.locator(".answer.streaming .tok").count() > first + 20)
        page.locator("#stop").click()

    def test_colour_is_not_the_only_sign(self, page):
        set_sampling(page)
        ask(page)
        answer = finished(page)
        line = "e => getComputedStyle(e).textDecorationLine"
        assert answer.locator(".tok.drafted").first.evaluate(line) == "underline"
        assert answer.locator(".tok.own").first.evaluate(line) == "none"
        assert answer.locator("del.refused").first.evaluate(line) == "line-through"

    def test_refused_drafts_can_be_shown(self, page, server):
        set_sampling(page)
        ask(page)
        refused = finished(page).locator("del.refused")
        assert not refused.first.is_visible()
        page.locator("#show-refused").check()
        expect(refused.first).to_be_visible()
        sent = [text for step in trace_of(server) for text in step["rejected"]]
        assert refused.all_text_contents() == [text.replace("\n", "↵").replace("\t", "⇥") for text in sent]

    def test_a_token_is_explained_on_hover_and_focus(self, page):
        set_sampling(page)
        ask(page)
        answer = finished(page)
        tip = page.locator("#token-tip")
        answer.locator(".tok.drafted").first.hover()
        expect(tip).to_contain_text("Drafted by the head, and the target agreed.")
        answer.locator(".tokens").focus()
        page.keyboard.press("ArrowRight")
        expect(tip).to_contain_text("from the pass that read the prompt")
        page.keyboard.press("ArrowRight")
        expect(tip).to_contain_text("Step 1")
        assert page.evaluate("document.activeElement.getAttribute('aria-describedby')") == "token-tip"
        page.keyboard.press("Escape")
        expect(tip).to_be_hidden()

    def test_keyboard_alone_is_enough(self, page):
        set_sampling(page, max_tokens=12)
        page.locator("body").click(position={"x": 5, "y": 5})
        for _ in range(40):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.id") == "message":
                break
        page.keyboard.type("Name a colour.")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("And another.")
        page.keyboard.press("Enter")
        answer = finished(page)
        assert page.locator(".said").inner_text() == "Name a colour.\nAnd another."
        for _ in range(40):
            if page.evaluate("document.activeElement.classList.contains('step-through')"):
                break
            page.keyboard.press("Shift+Tab")
        page.keyboard.press("Enter")
        expect(page.locator("#replay-body")).to_be_visible()
        assert answer.locator(".tok").count() > 0

    def test_the_stream_is_announced_by_sentence(self, page):
        set_sampling(page)
        ask(page)
        answer = "".join(finished(page).locator(".tokens .tok").all_text_contents())
        spoken = page.locator("#announcer p").all_text_contents()
        assert page.locator("#announcer").get_attribute("aria-live") == "polite"
        assert re.sub(r"\s+", "", "".join(spoken)) == re.sub(r"\s+", "", answer)
        assert 1 < len(spoken) < 20

    def test_the_conversation_is_sent_along_and_can_be_cleared(self, page):
        sent = []
        page.on("request", lambda request: request.method == "POST" and sent.append(request.post_data_json))
        set_sampling(page, max_tokens=8)
        page.locator("#system").fill("Be brief.")
        page.locator("#k").select_option("2")
        ask(page, "One.")
        first = finished(page).locator(".tokens .tok").all_text_contents()
        ask(page, "Two.")
        finished(page)
        assert sent[1]["messages"] == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "One."},
            {"role": "assistant", "content": "".join(first)},
            {"role": "user", "content": "Two."},
        ]
        assert sent[1]["speculative"] == {"mtp": 2, "trace": True}
        page.locator("#clear").click()
        expect(page.locator(".turn")).to_have_count(0)
        ask(page, "Three.")
        finished(page)
        assert [message["content"] for message in sent[2]["messages"]] == ["Be brief.", "Three."]

    @pytest.mark.usefixtures("unhurried")
    def test_stop_frees_the_row(self, page, server):
        set_sampling(page, temperature=0, max_tokens=3500)
        ask(page)
        expect(page.locator(".answer .tok").nth(5)).to_be_visible()
        assert server.client().get("/v1/stats").json()["rows"]["running"] == 1
        page.locator("#stop").click()
        expect(finished(page).locator(".notice")).to_have_text("Stopped.")
        until(lambda: server.client().get("/v1/stats").json()["rows"]["running"] == 0)
        expect(page.locator("#now-rows")).to_have_text(re.compile("^0/"))
        set_sampling(page, max_tokens=5)
        ask(page, "Go on.")
        assert finished(page).locator(".tok").count() > 0

    def test_errors_are_shown_in_the_servers_words(self, visit, page, server):
        visit.expected = re.compile("status of 400")
        long = "word " * 6000
        ask(page, long)
        answer = finished(page)
        body = request_body(messages=[{"role": "user", "content": long}])
        refusal = server.client().post("/v1/chat/completions", json=body).json()
        expect(answer.locator(".notice")).to_have_text(refusal["error"]["message"])
        assert page.locator("#message").input_value() == long
        page.locator("#temperature").fill("7")
        page.locator("#send").click()
        expect(page.locator("#complaint")).to_have_text("Temperature must be a number from 0 to 2.")


class TestExplaining:
    def test_the_replay_shows_what_the_trace_says(self, page, server):
        set_sampling(page, max_tokens=30)
        ask(page)
        finished(page).locator(".step-through").click()
        steps = trace_of(server, max_tokens=30)
        expect(page.locator("#replay-summary")).to_contain_text(
            f"30 tokens from {len(steps)} passes of the target"
        )
        expect(page.locator(".column .guess .chip").first).to_be_visible()
        page.locator("#replay-first").click()
        seen = []
        for step in steps:
            accepted = [token["text"] for token in step["tokens"] if token["drafted"]]
            if step["num_drafted"]:
                assert stage_texts(page, "guess") == [visible(text) for text in accepted + step["rejected"]]
                assert not page.locator(".column .kept .chip").first.is_visible()
                page.locator("#replay-next").click()
                marks = ["✓"] * len(accepted) + (["✗"] + ["·"] * len(step["rejected"]))[
                    : len(step["rejected"])
                ]
                assert page.locator(".column:not(.extra) .mark").all_text_contents() == marks
                page.locator("#replay-next").click()
            seen += [token["text"] for token in step["tokens"]]
            assert stage_texts(page, "kept") == [visible(token["text"]) for token in step["tokens"]]
            assert "".join(page.locator("#replay-text .tok").all_text_contents()) == "".join(seen)
            if page.locator("#replay-next").is_enabled():
                page.locator("#replay-next").click()
        assert not page.locator("#replay-next").is_enabled()

    def test_the_replay_plays_by_itself_and_obeys_the_keyboard(self, page):
        set_sampling(page)
        ask(page)
        finished(page).locator(".step-through").click()
        page.locator("#replay-speed").select_option("5")
        before = page.locator("#replay-step").inner_text()
        page.locator("#replay-play").click()
        expect(page.locator("#replay-step")).not_to_have_text(before)
        page.locator("#replay-play").click()
        page.locator("#replay-slider").fill("0")
        expect(page.locator("#replay-story")).to_contain_text("reads the whole prompt")
        page.locator("#replay-stage").focus()
        page.keyboard.press("ArrowRight")
        expect(page.locator("#replay-story")).to_contain_text("guesses the next")

    def test_race(self, page):
        set_sampling(page, max_tokens=80)
        page.goto(f"{page.url.split('#')[0]}#race")
        page.locator("#race-start").click()
        expect(page.locator("#race-same")).to_have_text("Same tokens: yes, all 80.", timeout=60_000)
        assert re.fullmatch(r"\d+\.\d\d×", page.locator("#race-ratio").inner_text())
        expect(page.locator(".lane.done")).to_have_count(2, timeout=60_000)
        plain, mtp = (page.locator(f"#lane-{name} .tok").all_text_contents() for name in ("plain", "mtp"))
        assert plain and "".join(plain) == "".join(mtp)
        assert page.locator("#lane-plain .tok.drafted").count() == 0
        assert page.locator("#lane-mtp .tok.drafted").count() > 0


class TestLive:
    def test_the_charts_move(self, page, server):
        page.goto(f"{server.url}/#live")
        points = lambda: int(page.locator("#chart-speed").get_attribute("data-points") or 0)  # noqa: E731
        before = points()
        until(lambda: points() >= before + 2)
        line = page.locator("#chart-speed path.line").get_attribute("d")
        tried = int(page.locator("#chart-positions").get_attribute("data-points") or 0)
        with server.client() as client:
            client.post("/v1/chat/completions", json=request_body(max_tokens=120))
        until(lambda: int(page.locator("#chart-positions").get_attribute("data-points") or 0) > tried)
        expect(page.locator("#chart-positions rect.bar.recent").first).to_be_visible()
        assert page.locator("#chart-speed path.line").get_attribute("d") != line
        until(lambda: page.locator("#chart-depth path.line.own").get_attribute("d") != "")
        expect(page.locator("#chart-speed .legend")).to_contain_text(
            "plain decoding, one row, measured at load"
        )
        snapshot = server.client().get("/v1/stats").json()
        newest = page.locator("#history tr").first
        expect(newest).to_contain_text(snapshot["requests"][0]["id"])
        expect(newest.locator("td").nth(4)).to_have_text("120")
        expect(page.locator("#meter-rows-text")).to_have_text(f"0 of {snapshot['rows']['max']}")
        expect(page.locator("#tile-total")).to_have_text(f"{snapshot['totals']['completion_tokens']:,}")

    @pytest.mark.parametrize("width", [320, 390])
    def test_nothing_overflows_a_narrow_screen(self, browser, server, width):
        with Visit(browser, viewport={"width": width, "height": 760}) as visit:
            self._look_at_all(visit.open(server.url), server, width)

    def _look_at_all(self, page, server, width):
        page.evaluate("document.getElementById('controls').open = true")
        set_sampling(page)
        ask(page)
        finished(page).locator(".step-through").click()
        for view in ("playground", "replay", "race", "live"):
            page.goto(f"{server.url}/#{view}")
            assert page.evaluate("document.documentElement.scrollWidth") <= width, view

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_contrast(self, browser, server, scheme):
        with Visit(browser, color_scheme=scheme) as visit:
            self._check_contrast(visit.open(server.url))

    def _check_contrast(self, page):
        read = "name => getComputedStyle(document.documentElement).getPropertyValue('--' + name).trim()"
        on = {
            "ink": ("bg", "surface", "sunken", "draft-bg", "own-bg"),
            "quiet": ("bg", "surface", "sunken"),
            "accent": ("bg", "surface"),
            "on-accent": ("accent",),
            "draft": ("bg", "surface", "sunken"),
            "own": ("bg", "surface", "sunken"),
            "refused": ("surface", "sunken", "refused-bg"),
            "warn": ("warn-bg",),
        }
        for text, grounds in on.items():
            for ground in grounds:
                assert contrast(page.evaluate(read, text), page.evaluate(read, ground)) >= 4.5, (text, ground)


def stage_texts(page: Page, row: str) -> list[str]:
    return page.locator(f".column .{row} .chip").all_text_contents()


def visible(text: str) -> str:
    """As the page shows a token that stands alone."""
    if not text:
        return "(end)"
    return re.sub(r"^ | $", "␣", text.replace("\n", "↵").replace("\t", "⇥"))


def contrast(one: str, other: str) -> float:
    """WCAG's ratio of two colours like #1a2b3c."""

    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        red, green, blue = (
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
