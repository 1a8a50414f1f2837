"""Masks against the grammar library's own word token by token, against languages small enough to write down, and
against a plain search for the marker."""

import itertools
import json
import random
import re
import threading
import time
from dataclasses import dataclass

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from headlong.params import Grammar
from headlong.text.constraint import MAX_GAP_TOKENS
from headlong.text.grammar import GrammarCompiler
from headlong.text.grammar_source import JSON_BLANKS

PADDING = 37
"""Rows of the model's embedding beyond the tokenizer."""
EOS = (2, 0)
MARKUP = (3, 4, 5, 6)
"""<think> and the like: tokens of their own that are text, not special."""

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "kind": {"enum": ["cat", "dog", "big dog"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "weight": {"type": "number"},
        "toys": {"type": "array", "items": {"$ref": "#/$defs/toy"}, "maxItems": 3},
    },
    "required": ["name", "kind", "age", "toys"],
    "additionalProperties": False,
    "$defs": {
        "toy": {
            "type": "object",
            "properties": {"red": {"type": "boolean"}},
            "required": ["red"],
            "additionalProperties": False,
        }
    },
}
PATTERN = r"(The|A) [a-z]{2,9}( [a-z]{1,4})? (ran|sat)[.!]"
LARK = 'start: sum\nsum: NUM | sum "+" NUM | "(" sum ")"\nNUM: /[0-9]{1,3}/\n%ignore " "'
GBNF = 'root ::= pair ("," pair)*\npair ::= name "=" [0-9]+\nname ::= [a-z] [a-z_]?'
CHOICES = ["yes", "yes, but", "no", "maybe später 😀", 'a "quoted"\nline\x7f\t\\']


@dataclass
class Case:
    grammar: Grammar
    library: str
    """The same in the library's own form, made without our translation."""


CASES = {
    "json_schema": Case(
        Grammar("json_schema", json.dumps(SCHEMA)),
        LLMatcher.grammar_from_json_schema({**SCHEMA, "x-guidance": JSON_BLANKS}),
    ),
    "json_object": Case(
        Grammar("json_object"),
        LLMatcher.grammar_from_json_schema({"type": "object", "x-guidance": JSON_BLANKS}),
    ),
    "regex": Case(Grammar("regex", PATTERN), LLMatcher.grammar_from_regex(PATTERN)),
    "lark": Case(Grammar("lark", LARK), LARK),
    "gbnf": Case(Grammar("gbnf", GBNF), gbnf_to_lark(GBNF)),
    "choice": Case(
        Grammar("choice", json.dumps(CHOICES)),
        LLMatcher.grammar_from_regex("|".join(re.escape(text) for text in CHOICES)),
    ),
}


@pytest.fixture(scope="module")
def compiler(tale) -> GrammarCompiler:
    return GrammarCompiler(tale, tale.vocab_size + PADDING, EOS)


@pytest.fixture(scope="module")
def library(tale) -> LLTokenizer:
    """The library's own reading of tokenizer.json."""
    return LLTokenizer(tale._backend.to_str(), eos_token=list(EOS))


def bits(mask: bytes | None, size: int) -> np.ndarray:
    assert mask is not None
    return np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little", count=size).astype(bool)


class Oracle:
    """The library's verdict on every token after a prefix, from a matcher that never went back."""

    def __init__(self, library: LLTokenizer, text: str) -> None:
        self.library, self.text = library, text
        self.known: dict[tuple[int, ...], np.ndarray] = {}
        tokens = [library.decode_bytes([token]) for token in range(library.vocab_size)]
        letters = {text: token for token, text in enumerate(tokens) if len(text) == 1}
        self.spelled = {
            t: [letters[bytes([b])] for b in tokens[t]] for t in range(len(tokens)) if t in MARKUP
        }
        """The library takes every added token of the form <...> for special; to us these are text."""

    def allowed(self, prefix: tuple[int, ...]) -> np.ndarray:
        if prefix not in self.known:
            matcher = LLMatcher(self.library, self.text, log_level=0)
            before = [letter for token in prefix for letter in self.spelled.get(token, [token])]
            assert matcher.try_consume_tokens(before) == len(before), matcher.get_error()
            verdict = np.zeros(self.library.vocab_size + PADDING, dtype=bool)
            for token in range(self.library.vocab_size):
                letters = self.spelled.get(token, [token])
                verdict[token] = token not in EOS and matcher.validate_tokens(letters) == len(letters)
            verdict[list(EOS)] = matcher.is_accepting()
            self.known[prefix] = verdict
        return self.known[prefix]


def pick(rng: random.Random, allowed: np.ndarray, tale) -> int:
    """A token of those allowed; short texts and the end now and then, so that walks get somewhere."""
    tokens = [int(t) for t in np.flatnonzero(allowed)]
    short = [t for t in tokens if len(tale.token_bytes(t)) <= 2]
    return rng.choice(short if short and rng.random() < 0.6 else tokens)


@pytest.mark.parametrize("name", CASES)
def test_masks_are_the_librarys_verdict(compiler, library, tale, name):
    """Along random walks, at every draft position, whatever was drafted and taken back before."""
    case, rng = CASES[name], random.Random(name)
    oracle = Oracle(library, case.library)
    start = compiler.compile(case.grammar)
    size, compared, ended = tale.vocab_size + PADDING, 0, 0
    for _ in range(3):
        constraint, settled = start(), ()
        while len(settled) < 24:
            drafts: list[int] = []
            for _ in range(rng.randrange(4)):
                drafts.append(pick(rng, oracle.allowed((*settled, *drafts)), tale))
                if drafts[-1] in EOS:
                    break
            inside = [d for d in drafts if d not in EOS]
            first = rng.randrange(len(inside) + 1)
            for ask in (first, 0):
                masks = constraint.masks(drafts, ask, len(drafts) + 1 - ask)
                for place, mask in enumerate(masks, ask):
                    if place > len(inside):
                        assert mask is None, "after the end"
                        continue
                    wanted = oracle.allowed((*settled, *drafts[:place]))
                    assert np.array_equal(bits(mask, size), wanted), (settled, drafts, place)
                    compared += 1
            kept = drafts[: rng.randrange(len(drafts) + 1)]
            if not kept or kept[-1] not in EOS:
                kept = [*kept, pick(rng, oracle.allowed((*settled, *kept)), tale)]
            assert constraint.advance(kept) == len(kept) and constraint.failure is None
            settled = (*settled, *kept)
            if kept[-1] in EOS:
                assert constraint.masks([], 0, 1) == [None]
                ended += 1
                break
    assert compared > 20
    assert ended or name.startswith("json")


def test_a_draft_that_is_refused_hides_what_follows_and_changes_nothing(compiler, tale):
    """Also where it comes after good ones, and where it is no token of the tokenizer."""
    size = tale.vocab_size + PADDING
    constraint = compiler.compile(Grammar("regex", "ab*c"))()
    a, b, c, x = (tale.encode(letter, add_special_tokens=False)[0] for letter in "abcx")
    before = constraint.masks([], 0, 1)
    for wrong in (x, size - 1, EOS[0]):
        masks = constraint.masks([a, wrong, b, c], 0, 5)
        assert masks[0] == before[0] and bits(masks[1], size)[b] and masks[2:] == [None] * 3
    assert constraint.masks([], 0, 1) == before
    assert constraint.advance([a, b, c, EOS[1]]) == 4 and constraint.failure is None


def test_a_token_that_was_not_allowed_ends_it(compiler, tale):
    constraint = compiler.compile(Grammar("regex", "ab"))()
    a, x = (tale.encode(letter, add_special_tokens=False)[0] for letter in "ax")
    assert constraint.advance([a, x, a]) == 1
    assert constraint.failure and constraint.advance([a]) == 0 and constraint.masks([a], 0, 2) == [None, None]


def spell(start, compiler_size: int, tale, most: int = 5000) -> set[bytes]:
    """Every text the masks allow, by all ways of cutting it into tokens."""
    texts, waiting = set(), [()]
    while waiting:
        tokens = waiting.pop()
        constraint = start()
        assert constraint.advance(tokens) == len(tokens)
        allowed = np.flatnonzero(bits(constraint.masks([], 0, 1)[0], compiler_size)).tolist()
        assert allowed, "a dead end"
        if set(allowed) & set(EOS):
            assert set(allowed) >= set(EOS), "all ends or none"
            texts.add(b"".join(map(tale.token_bytes, tokens)))
        waiting += [(*tokens, token) for token in allowed if token not in EOS]
        assert len(waiting) < most
    return texts


@pytest.mark.parametrize(
    "choices", [["a", "ab", "abc"], ["no", "yes"], ["é", "日", "\x00\x1f\x7f\u2028"], ["/", "\\", '"', "\n"]]
)
def test_choices_are_all_and_only_the_choices(compiler, tale, choices):
    start = compiler.compile(Grammar("choice", json.dumps(choices)))
    assert spell(start, tale.vocab_size + PADDING, tale) == {choice.encode() for choice in choices}


@pytest.mark.parametrize("pattern", ["(a|ab)(c|bcd)?", "x{0,2}(y|/)", "^(ab?)$", r"[a-b]\.?"])
def test_patterns_are_whole_matches(compiler, tale, pattern):
    """Counted out over all short texts of the letters in question; Python's `re` is the oracle."""
    texts = {"".join(t) for n in range(6) for t in itertools.product("abcdxy/.", repeat=n)}
    wanted = {text.encode() for text in texts if re.fullmatch(pattern, text)}
    assert spell(compiler.compile(Grammar("regex", pattern)), tale.vocab_size + PADDING, tale) == wanted


def test_gbnf_escapes(compiler, tale):
    grammar = Grammar("gbnf", r'root ::= "\u0041" [\u00e9\x42] "\\u0043" | "\U0001F600"')
    wanted = {"Aé\\u0043".encode(), b"AB\\u0043", "😀".encode()}
    assert spell(compiler.compile(grammar), tale.vocab_size + PADDING, tale) == wanted


WRITTEN = json.loads('{"a": [1, -2.5, []], "b": {"c": null, "d": {}}, "e": "x,  y:\\n z"}')


@pytest.mark.parametrize("grammar", [Grammar("json_object"), Grammar("json_schema", '{"type": "object"}')])
@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        (json.dumps(WRITTEN), True),
        (json.dumps(WRITTEN, separators=(",", ":")), True),
        (json.dumps(WRITTEN, separators=(",  ", ": ")), False),
        (json.dumps(WRITTEN, separators=(", ", " : ")), False),
        (json.dumps(WRITTEN, indent=1), False),
        (json.dumps(WRITTEN, indent=0), False),
        ("{" + " " + json.dumps(WRITTEN)[1:], False),
        (json.dumps(WRITTEN)[:-1] + " }", False),
        (json.dumps(WRITTEN).replace(", ", ",\t"), False),
    ],
)
def test_white_space_in_json_is_that_of_json_dumps(compiler, tale, grammar, text, allowed):
    """One space after a comma or a colon, or none. What a weak model may write more of, it writes for ever."""
    tokens = tale.encode(text, add_special_tokens=False)
    constraint = compiler.compile(grammar)()
    taken = sum(constraint.advance([token]) for token in tokens)
    assert (taken == len(tokens)) == allowed
    if allowed:
        assert bits(constraint.masks([], 0, 1)[0], tale.vocab_size + PADDING)[list(EOS)].all()


class TestAfter:
    """The marker, the white space behind it, and the first byte of the grammar."""

    GRAMMAR = '{"type": "object", "properties": {}, "additionalProperties": false}'

    def start(self, compiler, marker: str):
        return compiler.compile(Grammar("json_schema", self.GRAMMAR, after=marker))

    @staticmethod
    def ids(tale, text: str) -> list[int]:
        return tale.encode(text, add_special_tokens=False)

    @pytest.mark.parametrize("marker", [". ", "and", "abab", '."', "</think>", "\n\n", " the"])
    def test_against_a_plain_search(self, compiler, tale, marker):
        """Random tokens that end or begin like the marker: the grammar rules from exactly where it is complete,
        and a token that says more in the same breath is never allowed."""
        rng, size, found, hidden = random.Random(marker), tale.vocab_size + PADDING, 0, 0
        special = [tale.is_special(token) for token in range(size)]
        vocabulary = [b"" if special[t] else tale.token_bytes(t) for t in range(size)]
        start, wanted = self.start(compiler, marker), marker.encode()
        starts = tuple(wanted[:n] for n in range(1, len(wanted) + 1))
        ends = tuple(wanted[n:] for n in range(len(wanted)))
        likely = [t for t, text in enumerate(vocabulary) if text.endswith(starts)]
        likely = rng.sample(likely, min(40, len(likely)))
        likely += [t for t, text in enumerate(vocabulary) if text.startswith(ends)][:40]

        def beyond(text: bytes, token: int) -> bytes | None:
            whole = text + vocabulary[token]
            return whole[whole.index(wanted) + len(wanted) :] if wanted in whole else None

        for _ in range(12):
            constraint, tokens, text = start(), [], b""
            while len(tokens) < 12:
                past = [token for token in range(size) if (beyond(text, token) or b"").strip()]
                mask = constraint.masks(tokens[-1:], 0, 1)[0]
                assert past == ([] if mask is None else np.flatnonzero(~bits(mask, size)).tolist())
                hidden += bool(past)
                rest = next(wanted[n:] for n in range(len(wanted), -1, -1) if text.endswith(wanted[:n]))
                fitting = [t for t in range(size) if vocabulary[t] and rest.startswith(vocabulary[t])]
                token = rng.choice(fitting if rng.random() < 0.7 else likely)
                if token in past:
                    continue
                assert constraint.advance([token]) == 1
                tokens.append(token)
                if beyond(text, token) is not None:
                    allowed = np.flatnonzero(bits(constraint.masks([], 0, 1)[0], size)).tolist()
                    texts = {vocabulary[t] for t in allowed}
                    assert all(not t.strip() or t.startswith(b"{") for t in texts) and b"{" in texts
                    assert not {b"", b" "} <= texts and b" " in texts
                    found += 1
                    break
                text += vocabulary[token]
        assert found > 3 and (hidden or marker in ("abab", "</think>", "\n\n"))

    @pytest.mark.parametrize(
        ("marker", "parts"),
        [
            ("</think>", ["</think>"]),
            ("</think>", ["</", "think", ">"]),
            ("</tool_response>", ["</tool_response>"]),
            ("</tool_response>", ["<", "/tool", "_response", ">"]),
        ],
    )
    def test_the_mask_begins_inside_a_run_of_drafts(self, compiler, tale, marker, parts):
        """The end of reasoning in the middle of what is verified: a token that is text, one that is special, and
        several."""
        size = tale.vocab_size + PADDING
        end = [token for part in parts for token in self.ids(tale, part)]
        assert len(self.ids(tale, marker)) == 1
        assert tale.is_special(self.ids(tale, marker)[0]) == (marker == "</tool_response>")
        drafts = [*self.ids(tale, "I think so"), *end, *self.ids(tale, "\n\n"), *self.ids(tale, "{}"), EOS[0]]
        constraint = self.start(compiler, marker)()
        masks = constraint.masks(drafts, 0, len(drafts) + 1)
        content = drafts.index(end[-1]) + 1
        for place, mask in enumerate(masks[:-1]):
            allowed = None if mask is None else bits(mask, size)
            assert allowed is None or allowed[drafts[place]]
            if place < content - 1:
                assert allowed is None or allowed[EOS[0]], "free"
            if place >= content:
                assert allowed is not None and allowed.sum() < 100
        assert masks[-1] is None
        assert constraint.masks(drafts[:3], 0, 4) == masks[:4]
        assert constraint.advance(drafts) == len(drafts)

    def test_white_space_before_the_text_has_an_end(self, compiler, tale):
        size, blank = tale.vocab_size + PADDING, self.ids(tale, "\n")[0]
        constraint = self.start(compiler, "</think>")()
        assert constraint.advance(self.ids(tale, "</think>")) == 1
        for _ in range(MAX_GAP_TOKENS):
            assert bits(constraint.masks([], 0, 1)[0], size)[blank]
            assert constraint.advance([blank]) == 1
        allowed = np.flatnonzero(bits(constraint.masks([], 0, 1)[0], size))
        assert all(tale.token_bytes(int(token)).startswith(b"{") for token in allowed)

    def test_a_grammar_that_begins_with_white_space_gets_its_own(self, compiler, tale):
        constraint = compiler.compile(Grammar("regex", r"\n\n[a-z]", after="</think>"))()
        tokens = [*self.ids(tale, "</think>"), *self.ids(tale, "\n"), *self.ids(tale, "\n")]
        assert constraint.advance(tokens) == 3
        allowed = np.flatnonzero(bits(constraint.masks([], 0, 1)[0], tale.vocab_size + PADDING))
        texts = {tale.token_bytes(int(token)) for token in allowed}
        assert texts == {bytes([letter]) for letter in range(ord("a"), ord("z") + 1)}

    def test_the_free_part_may_end_the_row(self, compiler, tale):
        constraint = self.start(compiler, "</think>")()
        assert constraint.masks([], 0, 1) == [None]
        assert constraint.advance([*self.ids(tale, "So"), EOS[1], 5]) == 3 and constraint.failure is None


def test_an_end_that_is_text_elsewhere_is_only_an_end(tale):
    """Inside a string it would end the row there."""
    dot, a = tale.encode(".")[0], tale.encode("a")[0]
    constraint = GrammarCompiler(tale, tale.vocab_size, (dot,)).compile(Grammar("regex", "a[a.]*b"))()
    assert constraint.advance([a]) == 1
    assert not bits(constraint.masks([], 0, 1)[0], tale.vocab_size)[dot]
    assert constraint.advance(tale.encode("b")) == 1
    assert np.flatnonzero(bits(constraint.masks([], 0, 1)[0], tale.vocab_size)).tolist() == [dot]


def test_a_limit_met_on_the_way_is_the_rows_own_failure(compiler, tale):
    """The library gives up on this schema after some digits; a row that goes another way is not touched."""
    bounds = {"type": "integer", "multipleOf": 100_000, "minimum": 3, "maximum": 1_000_000_007}
    start = compiler.compile(Grammar("json_schema", json.dumps({"anyOf": [bounds, {"const": "fine"}]})))
    size, one = tale.vocab_size + PADDING, tale.encode("1")[0]
    plain, drafted, other, late = (start() for _ in range(4))
    plain_tokens = 0
    while plain.failure is None and plain_tokens < 10:
        plain.masks([], 0, 1)
        plain_tokens += plain.advance([one])
    assert 1 <= plain_tokens < 10 and "followed" in (plain.failure or "")
    drafts = [one] * 10
    masks = drafted.masks(drafts, 0, 11)
    assert masks[plain_tokens:] == [None] * (11 - plain_tokens)
    assert drafted.failure is None, "drafts alone fail nobody"
    assert bits(drafted.masks([], 0, 1)[0], size)[one], "it still works"
    drafted.masks(drafts, 0, 11)
    assert drafted.advance(drafts) == plain_tokens and drafted.failure == plain.failure
    assert bits(late.masks([], 0, 1)[0], size)[one]
    fine = tale.encode('"fine"')
    assert other.advance(fine) == len(fine) and other.failure is None
    assert bits(other.masks([], 0, 1)[0], size)[EOS[0]]


def test_threads_compile_at_the_same_time(tale):
    """One vocabulary, many threads, the same and other grammars."""
    compiler, size = GrammarCompiler(tale, tale.vocab_size, EOS), tale.vocab_size
    grammars = [case.grammar for case in CASES.values()] * 3
    found: list[bytes | None] = [None] * len(grammars)

    def work(number: int) -> None:
        found[number] = compiler.compile(grammars[number])().masks([], 0, 1)[0]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(grammars))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, mask in enumerate(found):
        assert np.array_equal(bits(mask, size), bits(found[number % len(CASES)], size))


@pytest.mark.serial
def test_the_same_grammar_is_compiled_once(tale):
    compiler = GrammarCompiler(tale, tale.vocab_size, EOS)
    compiler.compile(Grammar("json_object"))
    grammar = Grammar("choice", json.dumps([f"option number {number}" for number in range(8000)]))
    seconds = []
    for _ in range(2):
        started = time.perf_counter()
        compiler.compile(grammar)
        seconds.append(time.perf_counter() - started)
    assert seconds[1] < seconds[0] / 5
