"""Drafting among chosen tokens alone: other drafts, the same text."""

from dataclasses import replace

import pytest
import torch

from engine.engine_cases import quiet
from headlong import LLM, Grammar, SamplingParams
from headlong.ops import native
from headlong.ops.linear.invariance import RowLinear
from headlong.ops.linear.native import NativeLinear
from headlong.ops.linear.native_source import Source
from headlong.ops.linear.onednn import OneDnnLinear
from headlong.ops.linear.reference import ReferenceLinear
from headlong.ops.linear.stacked import StackedLinear
from headlong.ops.linear.unpacking import UnpackingLinear
from headlong.ops.registry import choose_backend
from headlong.quant import rtn
from headlong.speculate import frequencies
from headlong.speculate.vocabulary import IMPOSSIBLE
from speculate.drafting_cases import ROOMY, acceptance, assert_exact, mixed, plain_alone

COUNT = 1000
CHAT = [{"role": "user", "content": "Write a short story about a shy dragon who learns to share."}]
PARAMS = (
    SamplingParams(max_tokens=60, temperature=0.0, draft_tokens=3),
    SamplingParams(max_tokens=60, temperature=0.8, seed=3, top_p=0.9, draft_tokens=4),
    SamplingParams(max_tokens=60, temperature=0.8, seed=3, verify="ratio", draft_tokens=2),
)
NATIVE = pytest.mark.skipif(native.library() is None, reason="native kernels are not built or turned off")


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    """No counts but those of a test's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def narrow():
    return LLM(mtp="on", draft_vocab=COUNT, max_rows=4, progress=quiet)


@pytest.fixture
def drafted(narrow, monkeypatch):
    """Every token that was drafted."""
    proposer, found = narrow.engine.proposer, []
    honest = proposer.propose

    def propose(plan):
        draft = honest(plan)
        if draft is not None:
            counts = draft.counts or [row.num_drafts for row in plan.rows]
            found.extend(t for own, n in zip(draft.tokens_RK.tolist(), counts, strict=True) for t in own[:n])
        return draft

    monkeypatch.setattr(proposer, "propose", propose)
    return found


def test_the_text_is_that_of_plain_decoding(narrow, drafted):
    kept = set(narrow.engine.proposer.vocabulary.tokens_T.tolist())
    for params in PARAMS[:2]:
        (plain,) = narrow.chat([CHAT], [replace(params, draft_tokens=0)])
        (found,) = narrow.chat([CHAT], [params])
        assert found.token_ids == plain.token_ids
    assert set(drafted) <= kept and len(drafted) > 60
    assert not kept >= set(plain.token_ids), "a text that needs more than the chosen tokens"


def test_ratio_rows_are_served(narrow, drafted):
    (found,) = narrow.chat([CHAT], [PARAMS[2]])
    kept = set(narrow.engine.proposer.vocabulary.tokens_T.tolist())
    assert len(found.token_ids) > 10 and found.finish_reason in ("stop", "length") and set(drafted) <= kept


def test_a_vocabulary_that_is_no_smaller_changes_nothing():
    llm = LLM(mtp="on", draft_vocab=10_000_000, max_rows=1, progress=quiet)
    vocabulary = llm.engine.proposer.vocabulary
    assert vocabulary.tokens_T is None and vocabulary._lm_head is llm.engine.model.lm_head


def test_tokens_that_end_a_text_are_always_among_them(narrow):
    service, kept = narrow.service, narrow.engine.proposer.vocabulary.tokens_T
    assert len(kept) == COUNT
    for ids in (service.eos_ids, service.text.tokenizer.structural_ids):
        assert ids and ids <= set(kept.tolist())
    tiny = LLM(mtp="on", draft_vocab=1, max_rows=1, progress=quiet)
    assert (
        set(tiny.engine.proposer.vocabulary.tokens_T.tolist())
        == service.eos_ids | service.text.tokenizer.structural_ids
    )


def test_other_tokens_are_impossible_and_the_chosen_ones_as_they_are(narrow):
    vocabulary, model = narrow.engine.proposer.vocabulary, narrow.engine.model
    hidden = torch.randn(3, model.config.hidden_size)
    whole, own = vocabulary.whole(vocabulary.logits(hidden)), model.logits(hidden)
    chosen = torch.zeros(model.config.vocab_size, dtype=torch.bool).index_fill(0, vocabulary.tokens_T, True)
    torch.testing.assert_close(whole[:, chosen], own[:, chosen], rtol=0.0, atol=0.0)
    assert bool((whole[:, ~chosen] == IMPOSSIBLE).all())


@pytest.mark.parametrize("listed", [[96], [5], [0, 2, 3, 7, 31, 64, 65, 96], list(range(1, 97, 2))])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_any_subset_leaves_every_kind_of_request_as_it_is(models, tmp_path, listed, dtype):
    """Greedy, sampled, biased, banned: in float64 by the reference ops, in float32 by native ones."""
    file = tmp_path / "tokens.json"
    file.write_text(str(listed))
    llm = LLM(models["hybrid"], dtype=dtype, draft_vocab=str(file), progress=quiet, **ROOMY)
    assert set(llm.engine.proposer.vocabulary.tokens_T.tolist()) >= set(listed)
    requests = mixed(llm, seed=3, count=8)
    truth = plain_alone(llm, requests)
    trace = assert_exact(llm, truth, requests, [1, 3, 2, 4, 3, 2, 5, 1])
    assert acceptance(trace)[0] > 0


def test_a_grammar_that_allows_none_of_the_chosen(tmp_path):
    """Its answer has digits alone; only words may be drafted."""
    file = tmp_path / "tokens.txt"
    base = LLM(mtp="on", max_rows=2, progress=quiet)
    file.write_text(
        "\n".join(f"{token} 1" for token in base.service.text.tokenizer.encode(" the dog ran home"))
    )
    llm = LLM(mtp="on", max_rows=2, draft_vocab=file, progress=quiet)
    for sampling in ({"temperature": 0.0}, {"temperature": 0.9, "seed": 1, "top_p": 0.8}):
        params = SamplingParams(max_tokens=12, grammar=Grammar("regex", "[0-9]{12}"), **sampling)
        plain = base.generate("My number is ", replace(params, draft_tokens=0))
        found = llm.generate("My number is ", replace(params, draft_tokens=3))
        assert found.token_ids == plain.token_ids and plain.text.isdigit()


def test_counted_tokens_are_accepted_more_often_than_the_first_ones():
    """Counted in answers to other prompts than those that are drafted for."""
    whole = LLM(mtp="on", max_rows=8, progress=quiet)
    asked = [
        f"Write a short story about {what}." for what in ("a kite", "the sea", "two friends", "a red boat")
    ]
    chats = [[{"role": "user", "content": text}] for text in asked]
    counts = {}
    for completion in whole.chat(chats, SamplingParams(max_tokens=200)):
        for token in completion.token_ids:
            counts[token] = counts.get(token, 0) + 1
    other = [
        [{"role": "user", "content": f"Tell me a story about {what}."}] for what in ("a lost whale", "rain")
    ]
    params = SamplingParams(max_tokens=120, draft_tokens=3)
    first = LLM(mtp="on", max_rows=8, draft_vocab=400, progress=quiet)
    frequencies.save(whole.service.text.tokenizer.fingerprint, counts)
    counted = LLM(mtp="on", max_rows=8, draft_vocab=400, progress=quiet)
    frequencies.path_of(whole.service.text.tokenizer.fingerprint).unlink()
    assert len(first.engine.proposer.vocabulary) == len(counted.engine.proposer.vocabulary) == 400
    plain = [c.token_ids for c in whole.chat(other, replace(params, draft_tokens=0))]
    shares = []
    for llm in (first, counted):
        done = llm.chat(other, params)
        assert [c.token_ids for c in done] == plain
        shares.append(sum(c.stats.accepted for c in done) / sum(c.stats.drafted for c in done))
    assert shares[1] > shares[0] > 0.0


@pytest.mark.parametrize("outs", [[0], [299], [63, 64], [0, 5, 64, 65, 128, 299], list(range(1, 300, 3))])
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16", "int8", "int4"])
@NATIVE
def test_picked_outputs_are_the_wholes_own(outs, stored):
    torch.manual_seed(0)
    weight, x, at = torch.randn(300, 64), torch.randn(3, 64), torch.tensor(outs)
    if stored.startswith("int"):
        format, parts = rtn.quantize(weight, stored)
        source = Source.of(format.pack(parts, (300, 64)))
    else:
        source = Source.of(weight.to(getattr(torch, stored)), rounding=True)
    assert source is not None
    whole = NativeLinear([source], bias=torch.randn(300))
    part = whole.picked(at)
    assert part is not None and part.out_features == len(outs)
    assert torch.equal(part(x), whole(x)[:, at])


@pytest.mark.parametrize(
    "kind", ["reference", "onednn", "row by row", "unpack by tile", "nothing told apart"]
)
def test_rows_of_every_other_linear(kind):
    torch.manual_seed(0)
    weight, x, at = torch.randn(70, 30), torch.randn(3, 30), torch.tensor([0, 1, 33, 69])
    format, parts = rtn.quantize(weight, "int8")
    packed = format.pack(parts, (70, 30))
    linear = {
        "reference": lambda: ReferenceLinear(weight),
        "onednn": lambda: OneDnnLinear(weight),
        "row by row": lambda: RowLinear(weight),
        "unpack by tile": lambda: UnpackingLinear(packed, torch.float32),
        "nothing told apart": lambda: StackedLinear([ReferenceLinear(weight)]),
    }[kind]()
    part = choose_backend(torch.float32, torch.device("cpu")).pick(linear, at)
    torch.testing.assert_close(part(x), linear(x)[:, at], rtol=1e-5, atol=1e-5)
