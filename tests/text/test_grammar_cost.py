"""Grammars that are short and cost gigabytes or hours: refused by a process that can be ended, before ours tries."""

import json
import threading
import time

import pytest

from headlong.errors import BusyError, RequestError
from headlong.params import Grammar
from headlong.text import grammar as grammar_module
from headlong.text import grammar_cost
from headlong.text.grammar import CompileElsewhere, GrammarCompiler, Recent, not_compiling
from headlong.text.grammar_cost import MAX_BYTES, MAX_PROCESSES, TooCostly, is_plain, measure
from headlong.text.grammar_source import translate
from headlong.text.vocabulary import Vocabulary


def powers(*counts: int, letters: str = "ab", joint: str = " & ") -> str:
    return joint.join(f"/([{letters}]{{{count}}})*/" for count in counts)


COSTLY = {
    "intersection": Grammar("lark", f"start: A\nA: {powers(101, 103, 107, 109)}"),
    "two large": Grammar("lark", f"start: A\nA: {powers(9973, 9967)}"),
    "three": Grammar("lark", f"start: A\nA: {powers(211, 223, 227)}"),
    "named parts": Grammar("lark", "start: A\nA: B & C & D\nB: /(.{101})*/\nC: /(.{103})*/\nD: /(.{107})*/"),
    "beside a special token": Grammar("lark", f"start: A | <|im_end|>\nA: {powers(101, 103, 107, 109)}"),
    "as an alternative": Grammar(
        "json_object", alternative=Grammar("lark", f"start: A\nA: {powers(101, 103, 107, 109)}")
    ),
}


@pytest.fixture(scope="module")
def compiler(tale) -> GrammarCompiler:
    return GrammarCompiler(tale, tale.vocab_size, (2, 0))


def rss_mb() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / (1 << 20)


@pytest.mark.parametrize("name", COSTLY)
def test_costly_grammars_are_refused_and_leave_nothing(compiler, name, monkeypatch):
    monkeypatch.setattr(grammar_cost, "MAX_CPU_SECONDS", 0.3)
    compiler.compile(Grammar("json_object"))
    before, threads = rss_mb(), threading.active_count()
    with pytest.raises(RequestError, match=r"grammar: .*takes (more|longer) than"):
        compiler.compile(COSTLY[name])
    assert rss_mb() - before < 30 and threading.active_count() == threads


def test_what_is_measured_is_what_is_compiled(tale):
    """Special tokens and ids of the model's vocabulary mean the same in the other process."""
    vocabulary = Vocabulary(tale, tale.vocab_size, frozenset({2}))
    specials = tuple(vocabulary.tokens[token] for token in vocabulary.special_token_ids)
    for source in ('start: "a" | <|im_end|>', 'start: <[300]> "a"', "start: <[1-20]>+"):
        assert measure(translate(Grammar("lark", source)), specials, tale.vocab_size).error == ""
    assert "nothing" in measure("start: <nothing>", specials, tale.vocab_size).error


def test_plain_grammars_are_not_measured(compiler, monkeypatch):
    monkeypatch.setattr(grammar_module, "measure", lambda *_: pytest.fail("measured"))
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "array", "items": {"enum": [1, 2]}}},
        "required": ["city"],
    }
    for grammar in (
        Grammar("json_object"),
        Grammar("json_schema", json.dumps(schema)),
        Grammar("choice", '["yes", "no"]'),
    ):
        assert compiler.compile(grammar)().masks([], 0, 1)[0] is not None
    for kind, source in (
        ("json_schema", '{"type":"string","pattern":"a"}'),
        ("json_schema", '{"all\\u004ff":[]}'),
        ("json_schema", '{"minItems":1000}'),
        ("regex", "a"),
        ("gbnf", 'root ::= "a"'),
        ("choice", json.dumps(["x" * 9000])),
    ):
        assert not is_plain(Grammar(kind, source))


def test_a_process_that_was_ended_is_replaced(monkeypatch):
    monkeypatch.setattr(grammar_cost, "MAX_CPU_SECONDS", 0.1)
    for _ in range(2):
        with pytest.raises(TooCostly):
            measure(f"start: A\nA: {powers(101, 103, 107, 109)}")
        assert measure('start: "a"').error == ""


def test_time_is_the_other_processes_own(monkeypatch):
    monkeypatch.setattr(grammar_cost, "MAX_CPU_SECONDS", 0.05)
    with pytest.raises(TooCostly, match=r"longer than 0\.05 seconds"):
        measure(f"start: A\nA: {powers(101, 103, 107, 109)}")


def test_who_waits_too_long_is_told_to_come_back(monkeypatch):
    monkeypatch.setattr(grammar_cost, "MAX_WAIT_SECONDS", 0.05)
    taken = [grammar_cost._places.acquire() for _ in range(MAX_PROCESSES)]
    try:
        with pytest.raises(BusyError, match=r"grammar: .*again later"):
            measure('start: "a"')
    finally:
        for _ in taken:
            grammar_cost._places.release()


def test_grammars_that_are_known_are_not_compiled_again(compiler):
    known, new = Grammar("regex", "a+b"), Grammar("regex", "a+c")
    compiler.compile(known)
    with not_compiling():
        assert compiler.compile(known)().masks([], 0, 1)[0] is not None
        with pytest.raises(CompileElsewhere):
            compiler.compile(new)
    assert compiler.compile(new)().masks([], 0, 1)[0] is not None


def test_the_cache_is_bounded_by_bytes():
    """By what its values are now, the ones asked for last staying."""
    sizes = dict.fromkeys("abcdef", grammar_module.MAX_CACHED_BYTES // 4)
    cache: Recent[str, str] = Recent(32, sizes.__getitem__)
    for name in "abcdef":
        assert cache.get(name, lambda name=name: name) == name
    assert list(cache._values) == ["c", "d", "e", "f"]
    sizes["f"] *= 2
    cache.get("d", lambda: pytest.fail("it is there"))
    assert list(cache._values) == ["e", "f", "d"]


def test_a_grammar_grows_with_the_masks_it_makes(compiler):
    grammar = Grammar("lark", "start: A\nA: ~/(.|\\n)*a(.|\\n){12}/")
    constraint = compiler.compile(grammar)()
    compiled = constraint._path._matcher._grammar
    before = compiled.num_bytes
    for _ in range(20):
        mask = constraint.masks([], 0, 1)[0]
        token = next(t for t in range(300, 4000) if mask[t >> 3] >> (t & 7) & 1)
        assert constraint.advance([token]) == 1
    assert before < compiled.num_bytes <= before + MAX_BYTES


def test_measuring_costs_little_once_it_was_done():
    measure('start: "a"')
    started = time.perf_counter()
    for number in range(10):
        measure(f'start: "{number}"')
    assert time.perf_counter() - started < 2
