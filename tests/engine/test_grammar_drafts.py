"""Grammars with drafts: the form holds, and the tokens are those of plain decoding, at any depth, in any company,
put back or not; also where the grammar begins, or breaks, inside a run of drafts."""

import asyncio
import json
import random
import re
from dataclasses import replace

import pytest
from engine_cases import (
    OPENINGS,
    STORY,
    assert_all_free,
    assert_same,
    drive,
    load,
    plain_alone,
    prompts,
    quiet,
    requests_of,
    with_depth,
)

from headlong import LLM, AsyncLLM, RequestError, SamplingParams
from headlong.checkpoint.source import EMBEDDED
from headlong.params import Grammar

PET = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "mood": {"enum": ["happy", "sad", "very sad"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "size": {"type": "number", "minimum": 0.5, "maximum": 2.5, "multipleOf": 0.5},
        "toys": {
            "type": "array",
            "minItems": 1,
            "maxItems": 2,
            "items": {
                "type": "object",
                "properties": {"red": {"type": "boolean"}},
                "required": ["red"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["name", "mood", "age", "size", "toys"],
    "additionalProperties": False,
}


def is_pet(text: str) -> bool:
    pet = json.loads(text)
    return (
        list(pet) == ["name", "mood", "age", "size", "toys"]
        and isinstance(pet["name"], str)
        and len(pet["name"]) <= 12
        and pet["mood"] in ("happy", "sad", "very sad")
        and isinstance(pet["age"], int)
        and 0 <= pet["age"] <= 99
        and pet["size"] in (0.5, 1, 1.5, 2, 2.5)
        and 1 <= len(pet["toys"]) <= 2
        and all(list(toy) == ["red"] and isinstance(toy["red"], bool) for toy in pet["toys"])
    )


def is_balanced(text: str) -> bool:
    inner = text.replace(" ", "")
    while inner.startswith("("):
        assert inner.endswith(")")
        inner = inner[1:-1]
    return re.fullmatch("[a-z]{1,5}", inner) is not None


FORMS = {
    "pet": (Grammar("json_schema", json.dumps(PET)), is_pet),
    "compact": (
        Grammar("json_schema", json.dumps(PET | {"x-guidance": {"whitespace_flexible": False}})),
        lambda text: is_pet(text) and text == json.dumps(json.loads(text), separators=(",", ":")),
    ),
    "regex": (
        Grammar("regex", r"[A-Z][a-z]{1,8}( and [A-Z][a-z]{1,8})? (ran|sat)\."),
        re.compile(r"[A-Z][a-z]{1,8}( and [A-Z][a-z]{1,8})? (ran|sat)\.").fullmatch,
    ),
    "choice": (Grammar("choice", '["yes", "yes please", "no"]'), {"yes", "yes please", "no"}.__contains__),
    "lark": (Grammar("lark", 'start: "(" start ")" | WORD\nWORD: /[a-z]{1,5}/\n%ignore " "'), is_balanced),
    "gbnf": (
        Grammar("gbnf", 'root ::= item ("," item)?\nitem ::= [a-z] [a-z]? [a-z]? "=" [0-9] [0-9]?'),
        re.compile(r"[a-z]{1,3}=[0-9]{1,2}(,[a-z]{1,3}=[0-9]{1,2})?").fullmatch,
    ),
}
SHORT = ("regex", "choice", "gbnf")


@pytest.fixture(scope="module")
def llm(llms) -> LLM:
    """The default one, for fixtures that live as long as this file."""
    if "auto" not in llms:
        llms["auto"] = load("auto", max_rows=16)
    return llms["auto"]


def params(form: str, **options) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 220, "grammar": FORMS[form][0]} | options))


def form_cases(llm: LLM, forms=tuple(FORMS)) -> list:
    """Each form greedily with log-probabilities, and sampled; and two rows that are free."""
    cases = []
    for number, form in enumerate(forms):
        opening = llm.service.text.encode(OPENINGS[number % len(OPENINGS)])
        cases.append((opening, params(form, max_tokens=24, logprobs=2)))
        cases.append((opening, params(form, max_tokens=24, temperature=1.0, seed=number, top_p=0.95)))
    cases.insert(
        3, (llm.service.text.encode(STORY)[:40], SamplingParams(max_tokens=24, ignore_eos=True, logprobs=1))
    )
    cases.append((llm.service.text.encode("The dog"), SamplingParams(max_tokens=24, temperature=0.9, seed=8)))
    return requests_of(llm, cases)


@pytest.fixture(scope="module")
def plain(llm) -> tuple[list, dict]:
    """The cases, and what each gives alone and without drafts."""
    requests = form_cases(llm)
    return requests, plain_alone(llm, requests)


@pytest.mark.parametrize("form", FORMS)
def test_the_form_holds(llm, form):
    """Greedily, and for several seeds; every output that was not cut off ended where the grammar could."""
    _, holds = FORMS[form]
    cases = [(llm.service.text.encode(OPENINGS[0]), params(form))]
    cases += [
        (llm.service.text.encode(OPENINGS[1]), params(form, temperature=1.0, seed=3, n=4, draft_tokens=5))
    ]
    results = drive(llm, requests_of(llm, cases)).results.values()
    assert all(holds(result.text) for result in results if result.finish_reason == "stop")
    ends = [result.finish_reason for result in results]
    # Brackets may open for ever.
    assert ends.count("stop") >= {"lark": 1, "pet": 3}.get(form, 5), ends
    for result in results:
        assert (result.stop_reason in llm.service.eos_ids) == (result.finish_reason == "stop")
    assert len({result.text for result in results}) > 1


def test_json_object(llm):
    ending = {llm.service.text.encode("}")[0]: 12.0}
    own = {"max_tokens": 80, "grammar": Grammar("json_object"), "temperature": 1.0, "logit_bias": ending}
    cases = [(llm.service.text.encode(OPENINGS[0]), SamplingParams(**own, seed=seed)) for seed in range(6)]
    results = list(drive(llm, requests_of(llm, cases)).results.values())
    assert all(result.text.startswith("{") for result in results)
    finished = [json.loads(result.text) for result in results if result.finish_reason == "stop"]
    assert finished and all(isinstance(value, dict) for value in finished)


BLANKS = (
    Grammar("json_object"),
    Grammar("json_schema", json.dumps({"type": "object", "required": ["a", "b"]})),
)


@pytest.mark.parametrize("grammar", BLANKS, ids=["json_object", "json_schema"])
def test_a_greedy_model_writes_no_blanks_between_tokens_of_json(llm, grammar):
    """It is pushed towards white space; all that is left to it is what `json.dumps` writes, at any depth."""
    text = llm.service.text
    pushed = {text.encode(blank)[-1]: 8.0 for blank in ("\n", "\n\n", " ", "  ", "    ", "\t")}
    pushed |= {text.encode(end)[0]: 4.0 for end in ("}", '"')}
    params = SamplingParams(max_tokens=96, grammar=grammar, logit_bias=pushed)
    (plain,) = [drive(llm, requests_of(llm, [(text.encode(STORY), replace(params, draft_tokens=0))]))]
    (wanted,) = plain.results.values()
    outside = re.sub(r'"(?:[^"\\]|\\.)*"?', '""', wanted.text)
    assert re.fullmatch(r'(?:[][{}"a-z0-9.+-]|[,:] ?)+', outside), wanted.text
    for drafts in (1, 3, 8):
        drafted = drive(llm, requests_of(llm, [(text.encode(STORY), replace(params, draft_tokens=drafts))]))
        (result,) = drafted.results.values()
        assert result.token_ids == wanted.token_ids


def test_the_same_tokens_alone_at_every_depth(llm, plain):
    requests, truth = plain
    accepted = 0
    for number, request in enumerate(requests):
        trace = drive(llm, [replace(request, draft_tokens=(1, 3, 8)[number % 3], adaptive=False)])
        assert_same(trace.results, truth, [request])
        accepted += sum(o.num_accepted for o in trace.outputs if request.params.grammar)
    assert accepted > 20


@pytest.mark.parametrize("turn", [0, 1, 2])
def test_the_same_tokens_in_company(llm, plain, turn):
    requests, truth = plain
    rng = random.Random(turn)
    depths = [(5 * place + 3 * turn) % 9 for place in range(len(requests))]
    trace = drive(llm, with_depth(requests, depths), [rng.randrange(6) for _ in requests])
    assert_same(trace.results, truth, requests)
    assert max(step.num_rows for step in trace.steps) > 8


def test_rows_put_back_start_their_grammar_again():
    """Seven pages for six rows that need two or three each."""
    pages = {"page_size": 16, "max_context": None}
    roomy = load("auto", **pages)
    cases = [
        (prompt[:12], params(form, max_tokens=28, temperature=0.7 * (number % 2), seed=number))
        for number, (prompt, form) in enumerate(
            zip(prompts(roomy, random.Random(1), 6), ("pet", "compact", "pet") * 2, strict=True)
        )
    ]
    cases[2] = (cases[2][0], replace(cases[2][1], grammar=Grammar("json_object", after=" the")))
    requests = requests_of(roomy, cases)
    truth = plain_alone(roomy, requests)
    cramped = load("auto", **pages, cache_tokens=112, max_rows=6)
    trace = drive(cramped, with_depth(requests, [3, 8, 0, 5]))
    back = {request.id for request in requests} & set(trace.preempted)
    assert len(back) > 1
    assert_same(trace.results, truth, requests)


@pytest.mark.parametrize("verify", ["ratio", "block"])
def test_other_rules_keep_the_form(llm, verify):
    """The same for a seed and a depth, alone or among others; drafts are accepted."""
    cases = [
        (
            llm.service.text.encode(OPENINGS[number % 7]),
            params(form, temperature=1.0, seed=number, verify=verify),
        )
        for number, form in enumerate([*SHORT, *SHORT, "compact"])
    ]
    requests = with_depth(requests_of(llm, cases), [3, 5])
    trace = drive(llm, requests)
    for request, form in zip(requests, [*SHORT, *SHORT, "compact"], strict=True):
        result = trace.results[request.id]
        assert result.finish_reason == "stop" and FORMS[form][1](result.text)
    assert sum(output.num_accepted for output in trace.outputs) > 10
    for request in requests[:3]:
        assert_same(drive(llm, [request]).results, trace.results, [request])


def natural_marker(llm: LLM, prompt: tuple[int, ...]) -> str:
    """A word that the model writes of its own accord, inside a run of accepted drafts."""
    free = requests_of(llm, [(prompt, SamplingParams(max_tokens=60, ignore_eos=True))])
    text, tokenizer = "", llm.service.text.tokenizer
    for output in drive(llm, with_depth(free, [8])).outputs:
        for place, token in enumerate(output.token_ids):
            word = tokenizer.token_text(token)
            if 0 < place < output.num_accepted - 3 and len(text) > 20 and word.strip() and word not in text:
                return word
            text += word
    raise AssertionError("the model accepts no run of drafts")


@pytest.fixture(scope="module")
def marker(llm) -> str:
    return natural_marker(llm, llm.service.text.encode(OPENINGS[0]))


@pytest.mark.parametrize("form", ["compact", "regex", "choice"])
def test_the_grammar_begins_inside_accepted_drafts(llm, marker, form):
    grammar, holds = FORMS[form]
    own = {"grammar": replace(grammar, after=marker), "max_tokens": 60}
    prompt = llm.service.text.encode(OPENINGS[0])
    requests = requests_of(llm, [(prompt, SamplingParams(**own, temperature=t, seed=5)) for t in (0.0, 0.4)])
    truth = plain_alone(llm, requests)
    for depth in (1, 3, 8):
        trace = drive(llm, with_depth(requests, [depth]))
        assert_same(trace.results, truth, requests)
    inside = 0
    for output in trace.outputs:
        texts = [llm.service.text.tokenizer.token_text(token) for token in output.token_ids]
        inside += marker in texts[: output.num_accepted]
    assert inside, "the marker was an accepted draft, and the same step chose what follows it"
    result = truth[requests[0].id]
    free, _, content = result.text.partition(marker)
    assert free and (
        holds(content.lstrip()) if form != "compact" else content.lstrip().startswith('{"name":"')
    )
    assert (result.finish_reason == "stop") == (form != "compact")


def test_without_the_marker_everything_is_free(llm):
    prompt = llm.service.text.encode(OPENINGS[0])
    never = Grammar("choice", '["x"]', after="</think>")
    plain, ruled = llm.generate(
        [prompt, prompt], [SamplingParams(max_tokens=40), SamplingParams(max_tokens=40, grammar=never)]
    )
    assert plain.token_ids == ruled.token_ids


def test_a_grammar_that_breaks_ends_its_row_alone(llm):
    """The library gives up on this one after a few digits: the same digits at every depth, then an error."""
    bounds = {"type": "integer", "multipleOf": 100_000, "minimum": 3, "maximum": 1_000_000_007}
    broken = Grammar("json_schema", json.dumps(bounds))
    prompt = llm.service.text.encode("There was a big")
    cases = [
        (prompt, SamplingParams(max_tokens=30, grammar=broken, temperature=1.0, seed=2, logprobs=1)),
        (prompt, params("compact", max_tokens=40)),
        (prompt, SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.8, seed=1)),
        (prompt, SamplingParams(max_tokens=30, grammar=broken)),
    ]
    requests = requests_of(llm, cases)
    truth = plain_alone(llm, requests)
    for number in (0, 3):
        result = truth[requests[number].id]
        assert result.finish_reason == "error" and "grammar" in str(result.stop_reason)
        assert result.text.isdigit() and len(result.logprobs) == (len(result.token_ids) if not number else 0)
    for depth in (1, 8):
        assert_same(drive(llm, with_depth(requests, [depth])).results, truth, requests)


def test_bans_yield_and_stops_end(llm):
    """What the grammar allows stays possible though it is banned; stop tokens and strings end a row as ever."""
    prompt = llm.service.text.encode(OPENINGS[0])
    tokenizer = llm.service.text.tokenizer
    everything = tuple(range(3, 8192))
    banned = llm.generate(
        prompt, SamplingParams(max_tokens=40, grammar=FORMS["choice"][0], bad_token_ids=everything)
    )
    assert banned.text in ("yes", "yes please", "no") and banned.finish_reason == "stop"
    comma = tokenizer.encode(",")[0]
    listed = Grammar("regex", "([a-z]{2},){9}")
    by_token = llm.generate(prompt, SamplingParams(grammar=listed, stop_token_ids=(comma,)))
    by_text = llm.generate(prompt, SamplingParams(grammar=listed, stop=(",",)))
    assert by_token.stop_reason == comma and by_text.stop_reason == "," and by_token.text == by_text.text
    dot = tokenizer.encode(".")[0]
    never = llm.generate(prompt, SamplingParams(grammar=listed, stop_token_ids=(dot,)))
    assert re.fullmatch("([a-z]{2},){9}", never.text) and never.stop_reason in llm.service.eos_ids
    short = llm.generate(prompt, SamplingParams(grammar=listed, max_tokens=3))
    assert short.finish_reason == "length" and len(short.token_ids) == 3


def test_cancelled_in_the_middle(llm):
    requests = form_cases(llm, ("pet", "compact"))
    drive(llm, with_depth(requests, [3]), cancel={request.id: 3 for request in requests[:3]})
    assert not llm.engine.sampler.table.constraints
    assert_all_free(llm)


def test_refusals_name_the_field(llm, tmp_path):
    prompt = llm.service.text.encode("A")
    with pytest.raises(RequestError, match=r"grammar: .*JSON schema.*uniqueItems"):
        llm.generate(prompt, SamplingParams(grammar=Grammar("json_schema", '{"uniqueItems": true}')))
    request = requests_of(llm, [(prompt, params("choice"))])[0]
    with pytest.raises(RequestError, match="grammar was not compiled"):
        llm.engine.add(replace(request, constraint=None))
    for file in EMBEDDED.iterdir():
        if not file.name.startswith("tokenizer"):
            (tmp_path / file.name).symlink_to(file)
    mute = LLM(tmp_path, progress=quiet, cache_tokens=256, max_context=128, max_rows=1)
    with pytest.raises(RequestError, match=r"grammar .* has no tokenizer\.json"):
        mute.generate([5, 6], params("choice"))
    assert_all_free(llm)


def test_many_streams_of_one_grammar():
    """The engine in its own thread, requests made while it runs."""

    async def run() -> list[str]:
        llm = await AsyncLLM.load(cache_tokens=4096, max_context=256)
        try:
            asked = [params("choice", temperature=1.0, seed=n) for n in range(12)]
            done = await asyncio.gather(*(llm.generate(OPENINGS[0], one) for one in asked))
            return [completion.text for completion in done]
        finally:
            await llm.close()

    texts = asyncio.run(run())
    assert set(texts) <= {"yes", "yes please", "no"} and len(set(texts)) > 1
