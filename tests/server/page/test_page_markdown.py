"""Markdown on the page, in a real headless Chromium: what becomes an element, what stays text, and that no letter and
no tint is lost."""

import json
import re

import pytest

from support.browser import answer_chat_with, ask, expect, finished

TEXT = """Intro with **bold and *italic* text**, `co*d*e`, a [link](https://example.org/x) and ~~old~~.
Second line.

## A heading

1. First item
2. Second **item**
   - nested one
   - nested two

> A quote of two
> lines.

```python
def double(x):
    return 2 * x  # <b>
```

| Name | Count |
|:-----|------:|
| apples | 3 |
| a \\| b | 12 |

---
It was
1986. A year, \\*starred\\*, with a snake_case_name and 2*3*4.
"""
HOSTILE = """[a](javascript:alert(1)) [b](data:text/html,x) [c](//evil) ![d](//evil/e.png) <img src=http://evil/f.png>

<script>window.hacked=1</script>

| <b>x</b> | [y](vbscript:z) |
|---|---|

```html"><script>window.hacked=1</script>
<iframe src=http://evil>
```
"""
PATHOLOGICAL = {
    "emphasis": "*a " * 20_000,
    "nested emphasis": "**a *b _c ~~d " * 5_000,
    "ticks": "a``b```c````" * 6_000,
    "brackets": "[" * 40_000,
    "links": "[a](" * 20_000,
    "quotes": "> " * 20_000,
    "items": "- a\n" * 8_000,
    "nested items": "\n".join("  " * min(depth, 400) + "- x" for depth in range(1_000)),
    "fence": "```" + " " * 40_000 + "`",
    "rules": "- " * 20_000 + "x",
    "table": "a|b\n|-" + " " * 40_000 + "x",
    "rows": "a|b\n-|-\n" + "c|d\n" * 8_000,
}


def chunks_of(text: str) -> list[dict]:
    """A stream of the text in tokens of a word or a sign, two to five a step, some drafted."""
    tokens, chunks = re.findall(r" ?\w+| ?[^\w\s]{1,2}|\s+", text), []
    assert "".join(tokens) == text
    while tokens:
        step = [tokens.pop(0) for _ in range(min(len(tokens), 1 + len(chunks) % 5))]
        trace = [{"text": token, "drafted": at + 1 < len(step)} for at, token in enumerate(step)]
        refused = ["no\n\n"] if len(chunks) % 2 else []
        chunks.append(
            {
                "choices": [{"index": 0, "delta": {"content": "".join(step)}, "finish_reason": None}],
                "headlong": {"tokens": trace, "num_drafted": len(step), "num_accepted": len(step) - 1}
                | {"rejected": refused},
            }
        )
    return [*chunks, {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}]


def answered(page, text: str):
    answer_chat_with(page, chunks_of(text))
    ask(page)
    return finished(page)


@pytest.fixture
def draw(page):
    """Draws a text in pieces of some length, without a conversation around it; returns the markup of the result."""
    script = """async ([text, length]) => {
        const { AnswerText } = await import("/static/answer_text.js");
        const shown = new AnswerText(document.createElement("div"));
        for (let at = 0; at < text.length; at += length) {
            shown.add([{ kind: "content", text: text.slice(at, at + length), token: null }]);
            shown.draw();
        }
        const { container } = shown;
        container.querySelectorAll(".tok.markup, .markup").forEach((one) => one.remove());
        container.querySelectorAll(".tok").forEach((one) => one.replaceWith(...one.childNodes));
        container.normalize();
        return container.innerHTML;
    }"""
    return lambda text, length: page.evaluate(script, [text, length])


def test_elements(page):
    answer = answered(page, TEXT).locator("> .tokens")
    seen = {
        "strong": ["bold and italic text", "item"],
        "em": ["italic"],
        "p > code": ["co*d*e"],
        "s": ["old"],
        "h5": ["A heading"],
        "ol > li": ["First item", "Second item\nnested one\nnested two"],
        "ul > li": ["nested one", "nested two"],
        "blockquote p": ["A quote of two\nlines."],
        "th": ["Name", "Count"],
        "td": ["apples", "3", "a | b", "12"],
        "pre code": ["def double(x):\n    return 2 * x  # <b>"],
        "figcaption span": ["python"],
        "a": ["link"],
    }
    for name, texts in seen.items():
        assert [text.strip() for text in answer.locator(name).all_inner_texts()] == texts, name
    last = answer.locator("> p").last.inner_text()
    assert last == "It was\n1986. A year, *starred*, with a snake_case_name and 2*3*4."
    assert answer.locator("a").get_attribute("rel") == "noopener noreferrer"
    assert answer.locator("td").nth(1).get_attribute("class") == "right"


def test_no_letter_and_no_tint_is_lost(page):
    answer = answered(page, TEXT)
    assert "".join(answer.locator("> .tokens .tok").all_text_contents()) == TEXT
    steps = [chunk["headlong"] for chunk in chunks_of(TEXT) if "headlong" in chunk]
    for kind, drafted in (("drafted", True), ("own", False)):
        texts = [token["text"] for step in steps for token in step["tokens"] if token["drafted"] == drafted]
        assert "".join(answer.locator(f".tok.{kind}").all_text_contents()) == "".join(texts)
    refused = [text for step in steps for text in step["rejected"]]
    assert answer.locator("del.refused").count() == len(refused), "each once, however a token is split"


def test_a_refused_token_stays_on_one_line(page):
    page.locator("#show-refused").check()
    page.set_viewport_size({"width": 390, "height": 800})
    refused = answered(page, TEXT * 2).locator("del.refused")
    lines = refused.evaluate_all("all => all.map((one) => one.getClientRects().length)")
    assert set(lines) == {1}
    heights = refused.evaluate_all("all => all.map((one) => one.getBoundingClientRect().height)")
    assert max(heights) < 45, "a refused line break is a sign, not a break"


def test_growing_text_ends_as_the_whole_does(draw):
    whole = draw(TEXT, len(TEXT))
    for length in (1, 3, 17):
        assert draw(TEXT, length) == whole


def test_keys_walk_over_what_markup_hides(page):
    answer = answered(page, "An **odd** word.")
    answer.locator("> .tokens").focus()
    walked = []
    for _ in range(5):
        page.keyboard.press("ArrowRight")
        walked.append(page.evaluate("document.activeElement.innerText"))
    assert walked == ["An", " ", "odd", " word", "."], (
        "of a token that opens and one that closes, only the space is there"
    )


def test_nothing_a_model_writes_turns_into_more_than_text(page):
    answer = answered(page, HOSTILE)
    elements = answer.locator("a, img, script, iframe, b").evaluate_all(
        "all => all.map((one) => one.outerHTML)"
    )
    assert elements == []
    assert "".join(answer.locator("> .tokens .tok").all_text_contents()) == HOSTILE
    assert page.evaluate("window.hacked") is None


def test_code_is_copied_as_it_stands(visit, page):
    visit.context.grant_permissions(["clipboard-read", "clipboard-write"])
    answer = answered(page, TEXT)
    page.locator("#show-refused").check()
    answer.get_by_role("button", name="Copy the code").click()
    expect(answer.locator("figcaption .copy")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "def double(x):\n    return 2 * x  # <b>"


def test_no_text_takes_long_to_read(page):
    script = """async (texts) => {
        const { blocksOf } = await import("/static/markdown.js");
        const took = {};
        for (const [name, text] of Object.entries(texts)) {
            const began = performance.now();
            blocksOf(text);
            took[name] = performance.now() - began;
        }
        return took;
    }"""
    took = page.evaluate(script, PATHOLOGICAL)
    assert max(took.values()) < 1500, json.dumps(took)
