"""Drafting among the first tokens of the vocabulary alone: other drafts, the same text."""

from dataclasses import replace

import pytest
import torch

from headlong import LLM, SamplingParams
from headlong.ops import native
from headlong.ops.linear.native import NativeLinear, Source
from headlong.ops.linear.reference import ReferenceLinear

COUNT = 1000
CHAT = [{"role": "user", "content": "Write a short story about a shy dragon who learns to share."}]
PARAMS = (
    SamplingParams(max_tokens=60, temperature=0.0, draft_tokens=3),
    SamplingParams(max_tokens=60, temperature=0.8, seed=3, top_p=0.9, draft_tokens=4),
    SamplingParams(max_tokens=60, temperature=0.8, seed=3, verify="ratio", draft_tokens=2),
)


@pytest.fixture(scope="module")
def narrow():
    return LLM(mtp="on", draft_vocab=COUNT, max_rows=4)


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
    for params in PARAMS[:2]:
        (plain,) = narrow.chat([CHAT], [replace(params, draft_tokens=0)])
        (found,) = narrow.chat([CHAT], [params])
        assert found.token_ids == plain.token_ids
    assert max(drafted) < COUNT and len(drafted) > 60
    assert any(token >= COUNT for token in plain.token_ids), "a text that needs more than the first tokens"


def test_ratio_rows_are_served(narrow, drafted):
    (found,) = narrow.chat([CHAT], [PARAMS[2]])
    assert len(found.token_ids) > 10 and found.finish_reason in ("stop", "length") and max(drafted) < COUNT


def test_a_vocabulary_that_is_no_smaller_changes_nothing():
    llm = LLM(mtp="on", draft_vocab=10_000_000, max_rows=1)
    assert llm.engine.proposer.logits == llm.engine.model.logits


@pytest.mark.skipif(native.library() is None, reason="native kernels are not built or turned off")
@pytest.mark.parametrize("count", [1, 63, 64, 65, 200, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_leading_outputs_are_the_wholes_own(count, dtype):
    torch.manual_seed(0)
    weight, x = torch.randn(300, 64).to(dtype), torch.randn(3, 64)
    source = Source.of(weight, rounding=True)
    assert source is not None
    whole = NativeLinear([source])
    part = whole.leading(count)
    assert part.out_features >= count
    assert torch.equal(part(x)[:, :count], whole(x)[:, :count])
    torch.testing.assert_close(part(x)[:, :count], ReferenceLinear(weight)(x)[:, :count], rtol=0.02, atol=0.1)
