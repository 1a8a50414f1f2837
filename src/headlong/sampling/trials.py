"""Ops that choose tokens, tried before they serve: on logits at random, against torch's own way. Knows no request's."""

import logging
from functools import cache

import torch
from torch import Tensor

from headlong.ops.backend import Draw, Penalise, Sample
from headlong.params import SamplingParams
from headlong.sampling import noise
from headlong.sampling.changes import adjust
from headlong.sampling.entries import Entries, Entry
from headlong.sampling.processors import FilterSet, shape_all
from headlong.sampling.table import SamplingTable
from headlong.types import Request

ROWS, TOKENS = 64, 50_000
"""The size of a trial, in which a GPU goes all its ways. Divisible by 16, as most vocabularies are: otherwise Triton
would make other kernels than those that will serve."""
PENALISED_TOKENS = 5008
"""Divisible by 16, too. There is only one way here."""
HEAT = 3.0
"""Standard deviation of logits."""
TRIED = (
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=0.8, min_p=0.05),
    SamplingParams(temperature=0.8, top_k=20),
    SamplingParams(temperature=1.0, top_p=0.95),
    SamplingParams(temperature=30.0, top_p=0.6),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.9),
    SamplingParams(temperature=2.0, top_k=500, top_p=0.9),
    SamplingParams(temperature=1.5, top_k=50, top_p=0.8, min_p=0.02),
)
"""Few tokens are left and many, by one filter and several."""
CHANGED = (
    SamplingParams(presence_penalty=1.5),
    SamplingParams(frequency_penalty=0.37),
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(),
    SamplingParams(repetition_penalty=0.83, presence_penalty=-0.61, frequency_penalty=0.29),
    SamplingParams(logit_bias={7: 2.3, 11: -0.7}, bad_token_ids=(5, 4000)),
    SamplingParams(repetition_penalty=1.07, frequency_penalty=0.11, logit_bias={3: 0.3}),
)
"""Each penalty alone, all together, with a bias and without; and a row that has nothing."""
log = logging.getLogger(__name__)


@cache
def draws_alike(draw: Draw, device: torch.device) -> bool:
    """Whether it draws what the noise says."""
    logits_MV, key = _some(device)
    scores_MV = logits_MV.double()
    same = torch.equal(draw(scores_MV, torch.stack(key, dim=1)), noise.draw(scores_MV, key))
    if not same:
        log.warning("tokens are drawn by torch on %s: the kernel for it draws others there", device)
    return same


@cache
def samples_alike(sample: Sample, device: torch.device) -> bool:
    """Whether it draws what the filters and the noise say, of rows that each have their own filters."""
    logits_MV, key = _some(device)
    table = SamplingTable(len(TRIED), TOKENS, device)
    for slot, params in enumerate(TRIED):
        table.set(slot, Request("tried", (0,), params, seed=0), [])
    slots_M = torch.arange(ROWS, device=device) % len(TRIED)
    tokens_M = sample(logits_MV, table.filters(slots_M), torch.stack(key, dim=1))
    scores_MV = logits_MV.double()
    for slot, params in enumerate(TRIED):
        own = slots_M == slot
        scores_MV[own] = shape_all(logits_MV[own], slots_M[own], table, FilterSet.of(params))
    same = torch.equal(tokens_M, noise.draw(scores_MV, key))
    if not same:
        log.warning("tokens are filtered by torch on %s: the kernels for it choose others there", device)
    return same


@cache
def penalises_alike(penalise: Penalise, device: torch.device) -> bool:
    """Whether logits have the bits that steps by parts give them: rows that each have their own penalties, and drafts
    that repeat each other and what was seen."""
    rows = len(CHANGED)
    drafts_RK = torch.tensor([[slot, 4, 9, 4, 5, slot, 2500, 9] for slot in range(rows)], device=device)
    each = drafts_RK.shape[1] + 1
    table, entries = SamplingTable(rows, PENALISED_TOKENS, device), []
    for slot, params in enumerate(CHANGED, 1):
        output = [token * token % 977 for token in range(40 * slot)]
        table.set(slot, Request("tried", tuple(range(0, PENALISED_TOKENS, 3)), params, seed=0), output)
        entries.append(Entry(slot, len(output), 0, each))
    table.tally.update(range(1, rows + 1))
    logits_NV = _some(device)[0][: rows * each, :PENALISED_TOKENS].contiguous()
    slots_R = torch.arange(1, rows + 1, device=device)
    wanted_NV = adjust(logits_NV, Entries(entries, table, drafts_RK), table)
    found_NV = penalise(logits_NV, slots_R, table.changes_S5, table.tally.counts_SV, table.bias, drafts_RK)
    same = torch.equal(found_NV.view(torch.int32), wanted_NV.view(torch.int32))
    if not same:
        log.warning("rows with penalties go by parts on %s: the kernel gives other logits there", device)
    return same


def _some(device: torch.device) -> tuple[Tensor, noise.Key]:
    """Logits and keys at random. Some rows are so flat that tokens can hardly be told apart."""
    generator = torch.Generator(device).manual_seed(0)
    logits_MV = HEAT * torch.randn((ROWS, TOKENS), generator=generator, device=device)
    logits_MV[::7] *= 0.01
    limits = (1 << 62, 1 << 10, 1 << 31, 1 << 6)
    seed, choice, position, stream = (
        torch.randint(limit, (ROWS,), generator=generator, device=device) for limit in limits
    )
    return logits_MV, (seed, choice, position, stream)
