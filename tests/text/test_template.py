"""The chat template against transformers' rendering, and what it refuses."""

import importlib
import itertools
import os
import time

import pytest
from output_samples import template_text
from text_samples import MODEL

from headlong.errors import RequestError
from headlong.text import template as module
from headlong.text.template import ChatTemplate, read_variables

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "It's <b>warm</b> & 'dry' — où ?",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Nîmes"}}}
CHATS = [
    [{"role": "user", "content": "Hello <|im_end|> & <b>é</b>"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4", "reasoning": "two and two"},
        {"role": "user", "content": "  padded \n"},
    ],
    [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": '{"t": 31}'},
        {"role": "assistant", "content": "Hot.", "thinking": "31 is hot"},
    ],
]
TEMPLATES = {
    "whitespace": "{% for m in messages %}\n    {% if m.role == 'user' %}\n{{ m.content }}\n    {% endif %}\n"
    "  {#- note #}\n{% endfor %}\n",
    "specials": "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token is defined }}",
    "loopcontrols": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
    "{% if loop.index > 2 %}{% break %}{% endif %}{{ loop.index }}{{ m.role }};{% endfor %}",
    "tojson": "{% if tools %}{{ tools | tojson }}|{{ tools | tojson(indent=2) }}|"
    "{{ tools[0] | tojson(ensure_ascii=True, separators=(',', ':'), sort_keys=True) }}{% endif %}",
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}\n"
    "{% set x = 'inner' %}{{ m.content }}{{ x }}{% endgeneration %}{% endif %}{% endfor %}{{ x is defined }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}"
    "{% set ns.n = ns.n + m.content|length %}{% endfor %}{{ ns.n }}"
    "{{ messages[-1].content.strip()[::-1] }}{{ messages|map(attribute='role')|join(',') }}",
    "macro": "{% macro say(m, mark='') %}{{ mark ~ m.role }}{{ caller() if caller }}{% endmacro %}"
    "{% for m in messages %}{{ say(m, mark='>') }}{% call say(m) %}!{% endcall %}{% endfor %}",
    "variables": "{{ tools is none }}{{ documents is none }}"
    "{{ enable_thinking is defined and enable_thinking }}"
    "{{ add_generation_prompt }}{{ 2 ** 5 }}{{ '=' * 3 }}",
    "reasoning": "{% for m in messages %}"
    "{{ m.reasoning_content }}/{{ m.thinking }}/{{ m.reasoning }};{% endfor %}",
    "date": "{{ strftime_now('%Y') }}",
}


@pytest.fixture(scope="module")
def oracle():
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    transformers = importlib.import_module("transformers")
    return transformers.AutoTokenizer.from_pretrained(MODEL)


@pytest.mark.parametrize("name", [None, *TEMPLATES])
def test_agrees_with_transformers(tale, oracle, name):
    source = tale.chat_template if name is None else TEMPLATES[name]
    template = ChatTemplate(source, tale.special_tokens)
    options = itertools.product(CHATS, (True, False), (None, TOOLS), ({}, {"enable_thinking": False}))
    for chat, prompt, tools, extra in options:
        expected = oracle.apply_chat_template(
            chat, chat_template=source, tokenize=False, add_generation_prompt=prompt, tools=tools, **extra
        )
        assert template.render(chat, add_generation_prompt=prompt, tools=tools, **extra) == expected


def test_embedded_template(tale):
    text = ChatTemplate(tale.chat_template, tale.special_tokens).render([{"role": "user", "content": "Hi"}])
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_messages_are_not_changed():
    chat = [{"role": "assistant", "content": "a", "thinking": "t"}]
    assert ChatTemplate("{{ messages[0].reasoning_content }}").render(chat) == "t"
    assert chat == [{"role": "assistant", "content": "a", "thinking": "t"}]


USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages: "),
        ("hello", "messages: "),
        ([USER, "x"], "messages[1]: "),
        ([USER, USER, {"content": "x"}], "messages[2].role: "),
        ([{"role": 3, "content": "x"}], "messages[0].role: "),
        ([{"role": "", "content": "x"}], "messages[0].role: "),
        ([{"role": "user"}], "messages[0].content: "),
        ([USER, {"role": "user", "content": None}], "messages[1].content: "),
        ([{"role": "assistant", "content": None}], "messages[0].content: "),
        ([{"role": "user", "content": 5}], "messages[0].content: "),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}], "messages[0].content[1]: "),
    ],
)
def test_bad_messages_are_named(messages, field):
    with pytest.raises(RequestError) as caught:
        ChatTemplate("x").render(messages)
    assert str(caught.value).startswith(field)


def test_good_message_forms():
    template = ChatTemplate("{% for m in messages %}{{ m.content is none }}{% endfor %}")
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    silent = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert template.render([parts, silent]) == "FalseTrue"


@pytest.mark.parametrize(("tools", "field"), [("x", "tools: "), ([{}, 3], "tools[1]: ")])
def test_bad_tools_are_named(tools, field):
    with pytest.raises(RequestError) as caught:
        ChatTemplate("x").render([USER], tools=tools)
    assert str(caught.value).startswith(field)


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}",
        "{{ 1 | nosuchfilter }}",
        "{% break %}",
        "{{ " + "(" * 3000 + ")" * 3000 + " }}",
    ],
)
def test_templates_that_do_not_compile(source):
    with pytest.raises(RequestError, match=r"^chat_template: "):
        ChatTemplate(source)


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ nothing.there }}", "missing"),
        ("{{ 'a' + messages }}", "TypeError"),
        ("{{ nothing | tojson }}", "TypeError"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% include 'other' %}", "failed"),
        ("{{ range(10 ** 7) | list }}", "Range"),
        ("{{ 10 ** 10 ** 9 }}{{ 10 ** 100000 }}", "power"),
        ("{{ 'a' * 10 ** 10 }}", "too long"),
        ("{{ messages * 10 ** 10 }}", "too long"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", "characters"),
    ],
)
def test_templates_that_fail(source, word):
    with pytest.raises(RequestError, match=word):
        ChatTemplate(source).render([USER])


@pytest.mark.parametrize(
    "source",
    [
        "{% set l = range(99999) | list %}{% for a in l %}{% for b in l %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
)
def test_silent_endless_work_is_cut(source, monkeypatch):
    monkeypatch.setattr(module, "MAX_STEPS", 100_000)
    start = time.monotonic()
    with pytest.raises(RequestError, match="steps"):
        ChatTemplate(source).render([USER])
    assert time.monotonic() - start < 60


def test_variables():
    """What a template reads, also where it sets a default for it."""
    source = (
        "{% if not tools is defined %}{% set tools = [] %}{% endif %}{{ tools }}{% set own = 1 %}{{ own }}"
    )
    assert "tools" in ChatTemplate(source).variables
    assert ChatTemplate("{% for m in messages %}{{ m.tools }}{% endfor %}").variables == {"messages"}
    for name in ("Qwen3.5-4B", "Qwen3-Coder"):
        assert {"messages", "tools", "add_generation_prompt"} <= ChatTemplate(template_text(name)).variables
    assert read_variables("{% no template") == frozenset()


@pytest.mark.parametrize("name", ["Qwen3.5-4B", "Qwen3-Coder"])
def test_published_templates_agree_with_transformers(oracle, name):
    template = ChatTemplate(template_text(name))
    for chat, tools, extra in itertools.product(CHATS, (None, TOOLS), ({}, {"enable_thinking": False})):
        expected = oracle.apply_chat_template(
            chat,
            chat_template=template_text(name),
            tokenize=False,
            add_generation_prompt=True,
            tools=tools,
            **extra,
        )
        assert template.render(chat, tools=tools, **extra) == expected


ORDINARY = [
    "{{ 'ab'|center(7) }}|{{ 'a\nb'|indent(2, true) }}|{{ 'a b c'|wordwrap(3, wrapstring='/') }}|{{ '%05.1f' % 2.25 }}",
    "{{ '%s-%d'|format('x', 3) }}{{ '{:>5}{a!r}'.format(1, a='b') }}{{ '{x}'.format_map({'x': 2}) }}{{ '%%' % () }}",
    "{{ ', '.join(['a', 'b']) }}{{ [1, 2]|join('-') }}{{ messages|join(',', attribute='role') }}{{ 'ab'|join('.') }}",
    "{{ 'a-b-c'.split('-', 1) }}{{ 'a b'.split() }}{{ 'a b c'.rsplit(maxsplit=1) }}{{ 'a\nb'.splitlines() }}",
    "{{ 'x'.ljust(3) ~ 'y'.zfill(3) ~ 1 ~ [1] ~ none }}{{ 'aXa'.replace('a', 'bb', 1) }}{{ 'a'|replace('a', 'c') }}",
    "{{ range(5)|batch(2, 0)|list }}{{ range(5)|slice(2)|map('list')|list }}",
    "{{ range(3)|sum }}{{ [[1], [2]]|sum(start=[]) }}",
    "{{ [{'a': 2}, {'a': 1}]|sort(attribute='a') }}{{ [1, 1]|unique|list }}{{ {'b': 1, 'a': 2}|dictsort }}",
    "{{ [{'a': 1}, {'a': 2}]|sum(attribute='a') }}",
    "{{ 2.567|round(1) }}{{ 'ff'|int(base=16) }}{{ '<'|e }}{{ 'a b'|title }}",
    "{{ [1, 2][::-1] }}{{ 'abc'[1:] }}{{ (1, 2) == (1, 2) }}{{ [1] in [[1]] }}{{ {(1, 2): 3}[(1, 2)] }}{{ 3 is eq 3 }}",
    "{% for a in range(6) if a is odd %}{{ loop.index }}{{ a }}{% else %}none{% endfor %}",
    "{{ 'x' * 3 + 'y' }}{{ [0] * 2 }}",
    "{% macro f() %}{{ varargs }}{{ kwargs }}{% endmacro %}{{ f(*[1, 2], **{'a': 3}) }}",
    "{% set x %}a{{ 1 }}{% endset %}{{ x }}",
    "{{ {'a': {'b': [1, 'é']}}|tojson(indent=2) }}{{ [1, 2]|tojson(separators=(', ' * 40, ':')) }}",
    "{{ 7 // 2 }}{{ 2 ** 10 }}",
    "{% autoescape true %}{% set m = '<' %}{{ m ~ ('&'|safe) }}{% endautoescape %}",
    "{% filter upper %}a{{ 'b' }}{% endfilter %}",
    "{{ 'éa'.encode().decode() }}{{ 'a\tb'.expandtabs(4) }}{{ 'ab'.translate({97: 'xx'}) }}",
    "{{ (5).to_bytes(2, 'big') }}",
]


@pytest.mark.parametrize("source", ORDINARY)
def test_bounds_change_nothing_ordinary(oracle, source):
    chat = CHATS[1]
    expected = oracle.apply_chat_template(chat, chat_template=source, tokenize=False)
    assert ChatTemplate(source).render(chat, add_generation_prompt=False) == expected
