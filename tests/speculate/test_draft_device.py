"""A head on another device than its target's: a copy of what it needs, state of its own, the same tokens.

On one device, "another" is the same one by way of all copies: what the head computes shares no memory with the target.
"""

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.engine_cases import quiet
from headlong import LLM, SamplingParams
from headlong.config import EngineConfig
from headlong.engine import build as building
from headlong.engine.assemble import assemble
from headlong.errors import ConfigError
from headlong.models.embeddings import Embeddings
from headlong.speculate.mtp import MtpProposer
from headlong.speculate.remote_head import RemoteHead
from headlong.state import conv_window, paged_kv, recurrent
from headlong.state.paged_kv import PagedKv
from speculate.drafting_cases import (
    CRAMPED,
    ROOMY,
    acceptance,
    assert_exact,
    load,
    mixed,
    plain_alone,
    told,
)
from support.steps import load as load_built

CHAT = [{"role": "user", "content": "Write a short story about a shy dragon who learns to share."}]


def elsewhere(llm) -> RemoteHead:
    assert isinstance(llm.engine.proposer, RemoteHead)
    return llm.engine.proposer


def tensors_in(thing, seen: set[int] | None = None) -> list[Tensor]:
    """Every tensor that hangs on an object of ours."""
    seen = set() if seen is None else seen
    if id(thing) in seen:
        return []
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        return [thing]
    if isinstance(thing, dict):
        parts = list(thing.values())
    elif isinstance(thing, list | tuple | set):
        parts = list(thing)
    elif type(thing).__module__.startswith("headlong"):
        parts = list(vars(thing).values()) if hasattr(thing, "__dict__") else []
    else:
        return []
    return [tensor for part in parts for tensor in tensors_in(part, seen)]


def storages(*things) -> set[int]:
    found = (tensor for thing in things for tensor in tensors_in(thing))
    return {tensor.data_ptr() for tensor in found if tensor.numel() and not tensor.is_mkldnn}


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("name", ["hybrid", "tied"])
def test_nothing_is_shared_with_the_target(models, name, dtype):
    folder = models["hybrid"] if name == "hybrid" else None  # the embedded model's lm_head is its embedding
    llm = LLM(folder, dtype=dtype, draft_device="cpu", progress=quiet, **ROOMY)
    inner, state = elsewhere(llm).inner, llm.engine.state
    ends, head = inner.model, inner.head
    assert type(ends) is Embeddings and ends.ops is not llm.engine.model.ops
    own = [state.layers[name] for name in head.state_specs]
    rest = [held for name, held in state.layers.items() if name not in head.state_specs]
    there = storages(ends, head, own, state.carry_SD)
    assert len(there) > 10 and not there & storages(llm.engine.model, rest, state.last_token_S)
    assert len(own) == 1 and isinstance(own[0], PagedKv)
    tokens = torch.arange(5)
    assert torch.equal(ends.embed(tokens), llm.engine.model.embed(tokens))


def test_only_the_chosen_rows_of_the_lm_head_are_multiplied():
    llm = LLM(dtype="float32", draft_device="cpu", draft_vocab=300, max_rows=2, progress=quiet)
    vocabulary = elsewhere(llm).inner.vocabulary
    assert len(vocabulary) == 300 and vocabulary._lm_head.out_features == 300
    plain = llm.chat(CHAT, SamplingParams(max_tokens=40, draft_tokens=0))
    assert llm.chat(CHAT, SamplingParams(max_tokens=40, draft_tokens=3)).token_ids == plain.token_ids


@pytest.mark.parametrize("name", ["hybrid", "forgetful"])
def test_every_kind_of_request_is_as_it_is_and_drafts_are_the_same(models, name):
    """In float64, where the copies compute what the originals do: not even the drafts differ."""
    here, there = load(models[name]), load(models[name], draft_device="cpu")
    assert isinstance(here.engine.proposer, MtpProposer)
    requests = mixed(there, seed=3, count=10)
    truth = plain_alone(here, requests)
    depths = [1, 3, 2, 4, 0, 2, 5, 1, 8, 3]
    found = [acceptance(assert_exact(llm, truth, requests, depths)) for llm in (here, there)]
    assert found[0] == found[1] and found[0][1] > 0


def test_ratio_and_block_rows(models):
    """Their tokens depend on q, which travels too."""
    given = []
    for options in ({}, {"draft_device": "cpu"}):
        llm = load(models["hybrid"], **options)
        params = [
            SamplingParams(
                max_tokens=30, temperature=1.0, seed=n, verify=rule, draft_tokens=3, ignore_eos=True
            )
            for n, rule in enumerate(("ratio", "block"))
        ]
        given.append([c.token_ids for c in llm.generate([[5, 6, 7], [8, 9]], params)])
    assert given[0] == given[1]


@pytest.mark.parametrize("seed", range(2))
def test_rows_that_come_and_go_and_are_put_back(models, seed):
    requests, truth = told(models["hybrid"], seed)
    rng = random.Random(seed)
    llm = load(models["hybrid"], draft_device="cpu", check_every_step=True, **CRAMPED)
    arrivals = [rng.randrange(8) for _ in requests]
    depths = [rng.randrange(7) for _ in requests]
    leaving = {request.id: rng.randrange(4, 20) for request in rng.sample(requests, 2)}
    trace = assert_exact(llm, truth, requests, depths, arrivals=arrivals, cancel=leaving)
    assert trace.preempted


def test_adaptive_rows_that_pause(models):
    """Pairs that wait do so over there."""
    llm = load(models["hybrid"], draft_device="cpu")
    prompts = [list(range(n, 9 + 2 * n)) for n in range(4)]
    params = [
        SamplingParams(max_tokens=90, temperature=0.7 * (n % 2), seed=n, ignore_eos=True) for n in range(4)
    ]
    plain = llm.generate(prompts, [replace(one, draft_tokens=0) for one in params])
    llm.engine.adaptive, llm.engine.drafts = True, llm.engine.max_drafts
    found = llm.generate(prompts, params)
    assert [c.token_ids for c in found] == [c.token_ids for c in plain]
    llm.engine.check_integrity()


def test_chains(models):
    llm = load(models["forgetful"], draft_device="cpu", proposer="ngram+mtp")
    requests = mixed(llm, seed=4)
    trace = assert_exact(llm, plain_alone(llm, requests), requests, [4] * 8)
    assert acceptance(trace)[1] > 0


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        ("tpu", "must be 'cpu' or"),
        ("meta", "must be 'cpu' or"),
        ("cuda:x", "must be 'cpu' or"),
        ("", "must be 'cpu' or"),
        ("cuda:99", "torch sees"),
    ],
)
def test_devices_that_are_not_there(models, device, reason):
    with pytest.raises(ConfigError, match=rf"draft_device .*{reason}"):
        LLM(models["hybrid"], draft_device=device, progress=quiet)


def test_proposers_without_a_head(models):
    for options in ({"proposer": "ngram"}, {"drafter": str(models["llama"])}):
        with pytest.raises(ConfigError, match=r"draft_device .* leave draft_device out"):
            LLM(models["hybrid"], draft_device="cpu", progress=quiet, **options)
    # Where there is no head on disk, none is placed: as ever, "auto" serves without drafting.
    llm = LLM(models["recurrent"], draft_device="cpu", progress=quiet, **ROOMY)
    assert (
        llm.mtp_refusal is not None
        and len(llm.generate([1, 2, 3], SamplingParams(max_tokens=4)).token_ids) == 4
    )


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory. Tried to"), MemoryError(), OSError(12, "Cannot allocate")],
)
def test_a_device_without_memory_for_weights(models, monkeypatch, error):
    def full(*_):
        raise error

    monkeypatch.setattr(building, "Embeddings", full)
    with pytest.raises(ConfigError, match=r"draft_device 'cpu' has no memory left .* leave draft_device out"):
        LLM(models["hybrid"], draft_device="cpu", progress=quiet)


def test_a_device_without_memory_for_the_cache(models, monkeypatch):
    built = load_built(models["hybrid"], draft_device="cpu")
    honest, calls = paged_kv.zeros, []

    def zeros(shape, dtype, device):
        calls.append(shape)
        if len(calls) > 3 * 2 + 2:  # two recurrent layers and one of attention are the target's
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
        return honest(shape, dtype, device)

    for module in (conv_window, paged_kv, recurrent):
        monkeypatch.setattr(module, "zeros", zeros)
    with pytest.raises(ConfigError, match=r"draft_device 'cpu' has no memory left"):
        assemble(built, EngineConfig(draft_device="cpu", **ROOMY))
    assert len(calls) == 9
    with pytest.raises(ConfigError, match="of pages and"):  # of the target's own state it is not said
        assemble(built, EngineConfig(draft_device="cpu", **ROOMY))


def test_other_faults_keep_their_name(models, monkeypatch):
    def broken(*_):
        raise RuntimeError("something else")

    monkeypatch.setattr(building, "Embeddings", broken)
    with pytest.raises(RuntimeError, match="something else"):
        LLM(models["hybrid"], draft_device="cpu", progress=quiet)


def test_costs_are_those_of_the_place(models):
    places = {
        LLM(models["hybrid"], draft_device=d, progress=quiet).engine.conditions["drafter"]
        for d in (None, "cpu")
    }
    assert len(places) == 2
    assert EngineConfig().resolve_draft_device() is None
