"""How the page looks, in a real headless Chromium: its colours, what a phone shows of it, and nothing cut off."""

import re

import pytest

from headlong.server.keys import hash_key
from support.browser import Visit, answer_chat_with, answer_with, ask, expect, finished, set_sampling, until
from support.serving import RunningServer

PHONE = {"width": 320, "height": 700}
TRACED = {"choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": None}]}


def step(texts: str, *, drafted: int, refused: int = 0, own: bool = True) -> dict:
    """A chunk of tokens; the last one is the target's own."""
    words = [f" {word}" for word in texts.split()]
    tokens = [{"text": word, "drafted": not own or at + 1 < len(words)} for at, word in enumerate(words)]
    trace = {"tokens": tokens, "num_drafted": drafted, "num_accepted": drafted - refused}
    return TRACED | {"headlong": trace | {"rejected": [f" refused{at}" for at in range(refused)]}}


class TestTheme:
    def test_a_choice_holds_over_a_reload_and_the_system_can_choose_again(self, browser, server):
        with Visit(browser, color_scheme="light") as visit:
            page = visit.open(server.url)
            ground = "getComputedStyle(document.body).backgroundColor"
            light = page.evaluate(ground)
            page.get_by_label("Theme").select_option("dark")
            dark = page.evaluate(ground)
            assert dark != light and page.evaluate("getComputedStyle(document.body).colorScheme") == "dark"
            page.reload()
            expect(page.get_by_label("Theme")).to_have_value("dark")
            assert page.evaluate(ground) == dark
            page.get_by_label("Theme").select_option("system")
            assert page.evaluate(ground) == light
            page.emulate_media(color_scheme="dark")
            until(lambda: page.evaluate(ground) == dark)
            assert page.evaluate("localStorage.getItem('headlong-theme')") is None

    @pytest.mark.parametrize("theme", ["light", "dark"])
    def test_every_text_stands_out_from_its_ground(self, page, theme):
        page.get_by_label("Theme").select_option(theme)
        set_sampling(page, max_tokens=20)
        ask(page)
        finished(page)
        for summary in page.locator("aside details:not([open]) summary").all():
            summary.click()
        assert page.evaluate(FAINT) == []


class TestNothingIsCutOff:
    def test_the_longest_seed_can_be_read(self, page):
        seed = page.locator("#seed")
        seed.fill("9007199254740991")
        assert seed.evaluate("e => e.scrollWidth <= e.clientWidth")
        page.locator("#max-tokens").fill("3")
        ask(page)
        expect(finished(page).locator(".readout")).to_contain_text("seed 9007199254740991")

    def test_a_seed_no_request_can_carry_exactly_is_refused(self, page):
        page.locator("#seed").fill("9007199254740993")
        ask(page)
        expect(page.locator("#complaint")).to_contain_text("Seed must be a number from 0 to")

    def test_why_there_were_no_drafts(self, page, server):
        snapshot = server.client().get("/v1/stats").json()
        why = "a reason that takes more than a few words to tell, since reasons do"
        request = {"id": "a" * 24, "endpoint": "/v1/chat", "mtp": False, "mtp_reason": why}
        fields = ("finished_at", "prompt_tokens", "completion_tokens", "ttft_ms", "finish_reason")
        snapshot["requests"] = [dict.fromkeys(fields, 0) | request]
        answer_with(page, "**/v1/stats/stream", [snapshot])
        page.goto(f"{server.url}/#live")
        page.reload()
        cell = page.locator("#history td.long")
        expect(cell).to_have_text(f"off: {why}")
        assert cell.evaluate("e => e.scrollWidth <= e.clientWidth")

    def test_the_depth_of_auto_is_no_number(self, page):
        """It changes from step to step; each answer tells its mean."""
        assert page.locator("#k option").first.inner_text() == "auto"


class TestStepThroughOnAPhone:
    @pytest.fixture
    def phone(self, browser, server):
        with Visit(browser, viewport=PHONE) as visit:
            page = visit.open(server.url)
            chunks = [
                step("Once", drafted=0),
                step("upon a time there was some", drafted=5),
                step("extraordinarily no", drafted=4, refused=3),
                step("the end", drafted=5, own=False),
                TRACED | {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
            ]
            answer_chat_with(page, chunks)
            ask(page)
            finished(page).locator(".step-through").click()
            yield page

    def test_labels_and_all_guesses_are_in_sight(self, phone):
        labels = phone.locator(".labels .cell")
        expect(labels).to_have_text(["The head guesses", "The target checks, in one pass", "The text gets"])
        expect(phone.locator("#replay-story")).to_contain_text("guesses the next 5 tokens")
        for name in (".labels .cell", ".column .guess .chip"):
            boxes = [one.bounding_box() for one in phone.locator(name).all()]
            assert all(box and box["x"] >= 0 and box["x"] + box["width"] <= PHONE["width"] for box in boxes)
        assert phone.locator(".column .guess .chip:visible").count() == 5
        assert phone.locator("#replay-stage").evaluate("e => e.firstChild.scrollWidth <= e.clientWidth")

    def test_guesses_after_the_end_are_told_of(self, phone):
        phone.locator("#replay-last").click()
        guesses = phone.locator(".column .guess .chip")
        expect(guesses).to_have_text(["␣the", "␣end", "3 more"])
        expect(phone.locator(".column .verdict").last).to_have_text("·after the end")
        expect(phone.locator("#replay-story")).to_have_text(
            "The answer ends here: 2 tokens from one pass. 3 guesses lie after the end and count for nothing."
        )


class TestKey:
    def test_without_keys_none_is_offered(self, page):
        expect(page.locator("#open-key")).to_be_hidden()

    def test_where_only_admins_need_one_it_is_offered(self, browser):
        with RunningServer(admin_keys=(hash_key("sesame"),)) as guarded, Visit(browser) as visit:
            page = visit.open(guarded.url)
            expect(page.locator("#status")).to_have_text("live")
            page.get_by_role("button", name="API key").click()
            page.locator("#key").fill("sesame")
            page.keyboard.press("Enter")
            expect(page.locator("#key-dialog")).to_be_hidden()
            expect(page.locator("#status")).to_have_text("live")


def test_a_stream_that_errors_in_the_middle_keeps_what_came(page):
    part = {"choices": [{"index": 0, "delta": {"content": "Half a **sent"}, "finish_reason": None}]}
    answer_chat_with(page, [part, {"error": {"message": "the <b>engine</b> failed", "code": "engine_fault"}}])
    ask(page)
    answer = finished(page)
    expect(answer.locator(".notice")).to_have_text("Incomplete: the <b>engine</b> failed")
    expect(answer.locator("> .tokens")).to_have_text("Half a **sent")
    page.unroute_all()
    set_sampling(page, max_tokens=5)
    answer.locator(".retry").click()
    expect(page.locator(".answer")).to_have_count(1)
    expect(finished(page)).to_have_class(re.compile("^turn answer$"))


FAINT = """() => {
    const parse = (colour) => (colour.match(/[\\d.]+/g) ?? []).map(Number);
    const light = ([r, g, b]) => [r, g, b]
        .map((part) => part / 255)
        .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
        .reduce((sum, part, i) => sum + part * [0.2126, 0.7152, 0.0722][i], 0);
    const ground = (one) => {
        for (; one; one = one.parentElement) {
            const colour = parse(getComputedStyle(one).backgroundColor);
            if (colour.length === 3 || colour[3] > 0) return colour;
        }
        return [255, 255, 255];
    };
    const faint = new Set();
    const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) {
        const one = walk.currentNode.parentElement;
        if (!walk.currentNode.data.trim() || !one.checkVisibility() || one.closest(":disabled")) continue;
        const [high, low] = [light(parse(getComputedStyle(one).color)), light(ground(one))].sort((a, b) => b - a);
        if ((high + 0.05) / (low + 0.05) < 4.5) faint.add(`${one.tagName}.${one.className}: ${one.innerText}`);
    }
    return [...faint];
}"""
"""Names the elements whose text has a contrast below WCAG's 4.5 to what it stands on."""
