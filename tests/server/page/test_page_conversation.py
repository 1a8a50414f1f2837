"""What can be done with a conversation on the page, in a real headless Chromium: copied, repeated, edited, kept over a
reload, cleared, continued with tools and with another model."""

import json
import re

import pytest

from server.model_folders import place_model
from support.browser import STORY, Visit, answer_chat_with, ask, expect, finished, posted, set_sampling
from support.serving import RunningServer

WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city now.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = {"index": 0, "id": "call_1", "type": "function"}
CALL |= {"function": {"name": "get_weather", "arguments": '{"city": "Paris", "id": 12345678901234567890}'}}


@pytest.fixture
def sent(page):
    return posted(page)


def text_of(answer) -> str:
    return "".join(answer.locator("> .tokens .tok").all_text_contents())


def kept_of(page) -> str:
    return page.evaluate("localStorage.getItem('headlong-conversation') ?? ''")


class TestMessages:
    def test_copy(self, visit, page):
        visit.context.grant_permissions(["clipboard-read", "clipboard-write"])
        set_sampling(page, max_tokens=20)
        ask(page)
        answer = finished(page)
        read = "navigator.clipboard.readText()"
        answer.get_by_role("button", name="Copy the answer").click()
        expect(answer.locator(".copy").last).to_have_text("Copied")
        assert page.evaluate(read) == text_of(answer)
        page.get_by_role("button", name="Copy the message").click()
        expect(page.locator(".question .copy")).to_have_text("Copied")
        assert page.evaluate(read) == STORY

    def test_copy_where_the_clipboard_is_closed_to_pages(self, visit, page):
        """As it is on every address but this machine's, without TLS."""
        visit.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page.evaluate("window.real = navigator.clipboard")
        page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
        set_sampling(page, max_tokens=5)
        ask(page, "Name a\ncolour.")
        finished(page)
        page.get_by_role("button", name="Copy the message").click()
        expect(page.locator(".question .copy")).to_have_text("Copied")
        assert page.evaluate("window.real.readText()") == "Name a\ncolour."

    def test_retry_asks_the_same_again(self, page, sent):
        set_sampling(page, max_tokens=10)
        for text in ("One.", "Two.", "Three."):
            ask(page, text)
            finished(page)
        page.locator("#seed").fill("8")
        page.locator(".retry").nth(1).click()
        expect(page.locator(".turn")).to_have_count(4)
        expect(finished(page).locator(".readout")).to_contain_text("seed 8")
        assert sent[3]["messages"] == sent[1]["messages"] and sent[3]["seed"] == 8
        assert page.locator(".said").all_text_contents() == ["One.", "Two."]

    def test_edit_replaces_what_follows(self, page, sent):
        set_sampling(page, max_tokens=10)
        for text in ("One.", "Two.", "Three."):
            ask(page, text)
            finished(page)
        page.locator(".edit").nth(1).click()
        field = page.get_by_label("Edit the message")
        expect(field).to_be_focused()
        field.press("Escape")
        expect(page.locator(".edit").nth(1)).to_be_focused()
        page.keyboard.press("Enter")
        field.fill("Two and a half.")
        field.press("Enter")
        expect(page.locator(".said")).to_have_text(["One.", "Two and a half."])
        finished(page)
        assert [one["content"] for one in sent[3]["messages"] if one["role"] == "user"] == [
            "One.",
            "Two and a half.",
        ]
        assert sent[3]["messages"][:2] == sent[1]["messages"][:2]

    def test_what_is_left_empty_is_the_servers_to_choose(self, page, server, sent):
        defaults = server.client().get("/v1/stats").json()["sampling"]
        expect(page.locator("#temperature")).to_have_attribute("placeholder", str(defaults["temperature"]))
        page.locator("#max-tokens").fill("5")
        ask(page)
        finished(page)
        assert not {"temperature", "top_p", "tools"} & sent[0].keys() and sent[0]["seed"] >= 0


class TestKept:
    def test_a_reload_keeps_the_conversation(self, page, sent):
        set_sampling(page, max_tokens=30)
        page.locator("#system").fill("Be brief.")
        ask(page)
        before = finished(page)
        names = (".readout", ".notice", "> .tokens")
        shown = [before.locator(name).inner_html() for name in names]
        page.reload()
        after = finished(page)
        assert [after.locator(name).inner_html() for name in names] == shown
        assert after.locator(".tok.drafted").count() and page.locator(".said").inner_text() == STORY
        expect(page.locator("#welcome")).to_be_hidden()
        after.locator(".step-through").click()
        expect(page.locator("#replay-summary")).to_contain_text("30 tokens from")
        page.goto(page.url.replace("#replay", "#playground"))
        set_sampling(page, max_tokens=5)
        ask(page, "Go on.")
        finished(page)
        assert [one["role"] for one in sent[-1]["messages"]] == ["system", "user", "assistant", "user"]
        assert sent[-1]["messages"][2]["content"] == text_of(page.locator(".answer").first)

    def test_clear_removes_it(self, page):
        set_sampling(page, max_tokens=5)
        ask(page)
        finished(page)
        assert STORY in kept_of(page)
        page.locator("#clear").click()
        assert kept_of(page) == ""
        page.reload()
        expect(page.locator("#welcome")).to_be_visible()
        assert page.locator(".turn").count() == 0

    @pytest.mark.usefixtures("unhurried")
    def test_an_answer_cut_off_by_a_reload_is_kept_as_far_as_it_came(self, page):
        set_sampling(page, temperature=0, max_tokens=3500)
        ask(page)
        expect(page.locator(".answer .tok").nth(5)).to_be_visible()
        page.reload()
        answer = finished(page)
        expect(answer.locator(".notice")).to_have_text("Stopped by leaving the page.")
        assert answer.locator(".tok").count() > 5

    def test_of_a_long_conversation_the_end_is_kept(self, page):
        long = "word " * 120_000
        for number in range(4):
            chunk = {
                "choices": [{"index": 0, "delta": {"content": f"{number} {long}"}, "finish_reason": "stop"}]
            }
            answer_chat_with(page, [chunk])
            ask(page, f"Question {number}.")
            finished(page)
            page.unroute_all()
        assert 1_000_000 < len(kept_of(page)) <= 2_000_000
        page.reload()
        assert text_of(finished(page)).startswith("3 word")
        assert page.locator(".answer").count() == 3

    def test_what_cannot_be_read_is_left_aside(self, page):
        for kept in ("{", "7", '{"turns": [1]}', '{"turns": [{"answer": {"chunks": [[0]]}}]}'):
            page.evaluate("text => localStorage.setItem('headlong-conversation', text)", kept)
            page.reload()
            expect(page.locator("#welcome")).to_be_visible()
        set_sampling(page, max_tokens=5)
        ask(page)
        assert text_of(finished(page))


class TestTools:
    def test_a_call_is_shown_and_answered(self, visit, hermes_server):
        page = visit.open(hermes_server.url)
        sent = posted(page)
        page.locator("#tools").fill(json.dumps([WEATHER]))
        set_sampling(page, max_tokens=8)
        delta = {"tool_calls": [CALL]}
        answer_chat_with(page, [{"choices": [{"index": 0, "delta": delta, "finish_reason": "tool_calls"}]}])
        ask(page, "How is the weather in Paris?")
        answer = finished(page)
        assert sent[0]["tools"] == [{"type": "function", "function": WEATHER}]
        expect(answer.locator(".tool figcaption")).to_have_text("Tool call: get_weather")
        # Indented only where no digit is lost.
        expect(answer.locator(".tool pre")).to_have_text(CALL["function"]["arguments"])
        page.unroute_all()
        page.reload()
        page.locator("#max-tokens").fill("8")
        page.get_by_label("Result of get_weather").fill("21 degrees")
        page.get_by_role("button", name="Send results").click()
        expect(page.locator(".answer")).to_have_count(2)
        assert finished(page).get_attribute("class") == "turn answer", "the server took the results"
        call = {key: CALL[key] for key in ("id", "type", "function")}
        assert sent[1]["messages"][1:] == [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "21 degrees"},
        ]
        assert sent[1]["tools"] == sent[0]["tools"]
        expect(page.locator(".results")).to_be_hidden()

    @pytest.mark.slow
    def test_the_model_itself_calls(self, visit, hermes_server):
        """Made to by a template and a tool of whose arguments the grammar leaves nothing open."""
        page = visit.open(hermes_server.url)
        page.locator("#tools-example").click()
        set_sampling(page, max_tokens=80)
        page.route("**/v1/chat/completions", insist)
        ask(page, "How is the weather?")
        expect(finished(page).locator(".tool figcaption")).to_have_text("Tool call: get_weather")

    def test_tools_that_are_no_list_are_refused(self, page):
        for text, why in (("{", "at position 1"), ('{"name": "f"}', "a list is needed")):
            page.locator("#tools").fill(text)
            ask(page)
            expect(page.locator("#complaint")).to_contain_text("Tools must be JSON: ")
            expect(page.locator("#complaint")).to_contain_text(why)
        assert page.locator(".turn").count() == 0


def insist(route) -> None:
    route.continue_(post_data=route.request.post_data_json | {"tool_choice": "required"})


class TestModels:
    def test_another_model_is_loaded_and_answers(self, browser, tmp_path):
        place_model(tmp_path / "owner" / "two")
        options = {"model_dir": str(tmp_path), "max_models": 2, "max_rows": 4}
        with RunningServer(**options) as two, Visit(browser) as visit:
            page = visit.open(two.url)
            sent = posted(page)
            choice = page.get_by_label("Model", exact=True)
            expect(choice).to_have_value("tale-20m")
            choice.select_option("owner/two")
            expect(page.locator("#load-text")).to_contain_text("owner/two is not loaded.")
            page.locator("#load-model").click()
            expect(page.locator("#load-note")).to_be_hidden()
            expect(choice).to_have_value("owner/two")
            set_sampling(page, max_tokens=5)
            ask(page)
            expect(finished(page).locator("h3")).to_have_text("owner/two")
            assert sent[-1]["model"] == "owner/two"
            two.client().post("/v1/model/unload", json={"model": "owner/two"})
            two.client().post("/v1/model/unload", json={"model": "tale-20m"})
            expect(page.locator("#no-model")).to_be_visible()
            expect(choice).to_have_value("")
            visit.expected = re.compile("status of 503")
            ask(page)
            expect(finished(page).locator(".notice")).to_contain_text("no model is loaded")
