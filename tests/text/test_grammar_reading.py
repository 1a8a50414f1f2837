"""What tokens cost to be read by a grammar: while one is, nothing else of this process runs."""

import json
import time

import pytest
from tokenizers import AddedToken

from headlong.errors import RequestError
from headlong.params import Grammar
from headlong.text import constraint
from headlong.text.constraint import GrammarPath
from headlong.text.grammar import GrammarCompiler, bounded
from headlong.text.grammar_source import translate
from headlong.text.tokenizer import Tokenizer
from support import pieces

SPACES = " " * 128
AMBIGUOUS = {
    "many readings": "start: s\ns: /[a-z ,.]/ | s s | s s s",
    "more readings": 'start: s\ns: " " | s s | s s s | s s s s | s s s s s',
    "many rules": "start: r0+\n"
    + "\n".join(f"r{n}: {' | '.join(f'r{(n * 7 + k) % 50}' for k in range(1, 11))} | X" for n in range(50))
    + '\nX: " "',
    "optional parts": "start: y\ny: " + " ".join(["x?"] * 100) + ' | y y\nx: " "',
    "deep": "start: a0\n"
    + "\n".join(f'a{n}: a{n + 1} | a{n + 1} a{n + 1} | " "' for n in range(60))
    + '\na60: " "',
}


CHAIN = {f"a{one}": [{"$ref": f"#/$defs/a{one + 1}"}] * 2 for one in range(40)}
LOOP = {
    "a": {"anyOf": [{"$ref": "#/$defs/b"}, {"$ref": "#/$defs/a"}]},
    "b": {"anyOf": [{"$ref": "#/$defs/a"}]},
}
BOUNDED = {
    "intersections in a rule": Grammar(
        "lark", "start: A B\nA: /(a{17})*/ & /(a{19})*/\nB: /(b{13})*/ & /(b{11})*/"
    ),
    "a complement of intersections": Grammar(
        "lark", "start: A\nA: ~(/(.|\\n)*a(.|\\n){40}/ & ~/(.|\\n)*b(.|\\n){39}/)"
    ),
    "repetitions of a rule": Grammar("lark", 'start: a~1..100000\na: "x"~1..1000'),
    "repetitions inside of repetitions": Grammar("lark", 'start: (((("x"~1..50)~1..50)~1..50)~1..50)~1..50'),
    "rules that say nothing": Grammar("lark", "start: a*\na: b*\nb: c*\nc: start?"),
    "rules that begin with themselves": Grammar("lark", 'start: start start | start start start | "a" |'),
    "alternatives that are alike": Grammar("regex", "(a|a)*(a|b|ab)*(ab|a|b){500}"),
    "optional letters": Grammar("regex", "((((((a?){50}){50}){50}){50}){50})"),
    "letters far apart": Grammar("regex", ".*a.{60}"),
    "references to each other": Grammar("json_schema", json.dumps({"$ref": "#/$defs/a", "$defs": LOOP})),
    "references that only refer": Grammar(
        "json_schema", json.dumps({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}})
    ),
    "two of two of two": Grammar(
        "json_schema",
        json.dumps(
            {
                "$ref": "#/$defs/a0",
                "$defs": {name: {"anyOf": parts} for name, parts in CHAIN.items()}
                | {"a40": {"type": "null"}},
            }
        ),
    ),
    "all of all of all": Grammar(
        "json_schema",
        json.dumps(
            {
                "$ref": "#/$defs/a0",
                "$defs": {name: {"allOf": parts} for name, parts in CHAIN.items()}
                | {"a40": {"type": "null"}},
            }
        ),
    ),
    "a quarter of a megabyte of values": Grammar(
        "json_schema", json.dumps({"enum": ["x" * 100 + str(number) for number in range(2400)]})
    ),
    "names of many patterns": Grammar(
        "json_schema",
        json.dumps(
            {
                "type": "object",
                "patternProperties": {f"^[a-z]*{one}[a-z]*$": {"type": "string"} for one in range(80)},
            }
        ),
    ),
    "prefixes of each other": Grammar("choice", json.dumps(["a" * count for count in range(1, 400)])),
    "brackets": Grammar("gbnf", "root ::= " + "(" * 400 + '"a"' + ")*" * 400),
}
"""Forms that say little and mean much, or nothing."""


@pytest.mark.parametrize("name", BOUNDED)
def test_forms_of_every_class_take_a_moment(compiler, tokenizer, name):
    with pieces.here() as longest:
        try:
            path = path_of(compiler, BOUNDED[name])
            for _ in range(3):
                (mask,) = path.masks([], 0, 1)
                bits = range(tokenizer.vocab_size) if mask is not None else ()
                token = next((one for one in bits if mask[one >> 3] >> (one & 7) & 1 and one != 2), None)
                if path.failure is not None or token is None:
                    break
                path.advance([token])
        except RequestError as error:
            assert 20 < len(str(error)) < 1000
    assert longest.seconds < 0.1, longest


@pytest.fixture(scope="module")
def tokenizer(tale) -> Tokenizer:
    """One with a token of very many spaces, as those of large vocabularies have them."""
    backend = type(tale._backend).from_str(tale._backend.to_str())
    backend.add_tokens([AddedToken(SPACES, normalized=False)])
    return Tokenizer(backend, {"eos_token": "<|im_end|>"})


@pytest.fixture(scope="module")
def compiler(tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, tokenizer.vocab_size, [2])


def path_of(compiler: GrammarCompiler, grammar: Grammar) -> GrammarPath:
    return compiler.compile(grammar)()._path  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_nobody_waits_for_a_long_token(compiler, tokenizer, name):
    """It is read in pieces, and the row ends once reading has taken long."""
    try:
        path = path_of(compiler, Grammar("lark", AMBIGUOUS[name]))
    except RequestError:
        assert name != "many readings"  # the others' first masks have too many readings of these spaces
        return
    token = tokenizer.token_id(SPACES)
    with pieces.here() as longest:
        for _ in range(4):
            if not path.advance([token]):
                break
    assert longest.seconds < 0.1, longest
    if name == "many readings":
        assert path.failure is not None and "processor time" in path.failure
        assert path.slow_reading < 2 * constraint.MAX_READING_SECONDS


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("regex", " {1,1000}[a-z ]*"),
        Grammar("lark", 'start: (A | B)+\nA: " "\nB: /[ ]{128}/ "x"'),
        Grammar("json_schema", json.dumps({"type": "string", "pattern": "^( |a)*$"})),
    ],
)
def test_bytes_lead_where_the_token_leads(compiler, tokenizer, grammar):
    """Drafts that are refused are forgotten byte by byte, too."""
    spaces, letter, quote = tokenizer.token_id(SPACES), *(tokenizer.encode(one)[0] for one in ("a", '"'))
    whole, cut = (path_of(compiler, grammar) for _ in range(2))
    whole._matcher._in_bytes = lambda token: (token,)
    start = [quote] if grammar.kind == "json_schema" else []
    for path in (whole, cut):
        assert path.advance(start) == len(start)
    for drafts in ([spaces], [spaces, letter], [letter, spaces], [quote, spaces], [spaces, spaces, quote]):
        found = [path.masks(drafts, 0, len(drafts) + 1) for path in (whole, cut)]
        assert found[0] == found[1], drafts
    assert whole.advance([spaces]) == cut.advance([spaces]) == 1
    assert whole.masks([], 0, 1) == cut.masks([], 0, 1)


def test_other_threads_run_while_a_grammar_is_compiled(compiler):
    """The library lets go of the interpreter's lock while it builds a matcher, which may take seconds."""
    count = 1000
    parts = {
        f"a{one}": {
            "type": "object",
            "properties": {key: {"$ref": f"#/$defs/a{other % count}"} for key, other in more},
        }
        for one in range(count)
        for more in [(("x", one + 1), ("y", 7 * one + 1))]
    }
    schema = {"$ref": "#/$defs/a0", "$defs": parts}
    grammar = Grammar("json_schema", json.dumps(schema))
    text = translate(grammar)
    started = time.thread_time()
    with pieces.turns() as turns:
        bounded(grammar, lambda: compiler._build(grammar, text))
    assert turns.count > 10, (turns, time.thread_time() - started)
