"""What a row has seen, counted as it grows; and penalties bit for bit those of the whole vocabulary's formula."""

import random
from collections import Counter

import pytest
import torch
from sampling_tables import entries_of, request, table_of

from headlong.params import SamplingParams
from headlong.sampling.changes import adjust
from headlong.sampling.entries import Entry
from headlong.sampling.penalties import Seen

VOCAB = 5000


def told(seen: Seen) -> dict[int, int]:
    assert len(seen.ids) == len(set(seen.ids)) == len(seen), "each once"
    return dict(zip(seen.ids, seen.counts, strict=True))


def test_it_counts_as_a_row_grows():
    rng = random.Random(0)
    prompt = [rng.randrange(40) for _ in range(30)]
    seen, counts = Seen(prompt, []), Counter(dict.fromkeys(prompt, 0))
    for _ in range(200):
        tokens = [rng.randrange(500) for _ in range(rng.randrange(5))]
        seen.count(tokens)
        counts.update(tokens)
        assert told(seen) == counts


def test_what_a_preempted_row_produced_counts():
    assert told(Seen((3, 3, 4), [4, 9, 9])) == {3: 0, 4: 1, 9: 2}
    assert told(Seen((), [])) == {}


@pytest.mark.parametrize(
    "penalties",
    [(1.0, 1.5, 0.0), (1.0, 0.0, 0.7), (1.3, 0.0, 0.0), (0.8, -0.5, 0.3), (1.1, 1.5, 0.2)],
    ids=str,
)
def test_bits_are_those_of_all_tokens(penalties):
    """Drafts that repeat each other, the output and the prompt; rows of several lengths in one step."""
    repetition, presence, frequency = penalties
    params = SamplingParams(
        repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency
    )
    rng = random.Random(1)
    prompts = [tuple(rng.randrange(VOCAB) for _ in range(length)) for length in (1, 300, 7)]
    outputs = [[rng.randrange(VOCAB) for _ in range(length)] for length in (0, 500, 90)]
    drafts = [[prompts[n][0], 17, 17, (outputs[n] or [17])[0], 17, rng.randrange(VOCAB)] for n in range(3)]
    table = table_of([request(n, params, prompt) for n, prompt in enumerate(prompts)], VOCAB, outputs)
    entries = entries_of(table, [Entry(n + 1, 900, 0, 7) for n in range(3)], drafts)
    logits_LV = torch.randn(21, VOCAB, generator=torch.Generator().manual_seed(0))
    wanted = [
        everywhere(logits_LV[7 * n + place], prompts[n], outputs[n] + drafts[n][:place], *penalties)
        for n in range(3)
        for place in range(7)
    ]
    assert torch.equal(adjust(logits_LV, entries, table), torch.stack(wanted))


def everywhere(logits_V, prompt, produced, repetition, presence, frequency):
    counts_V = torch.zeros(VOCAB, dtype=torch.int32)
    for token in produced:
        counts_V[token] += 1
    seen_V = counts_V > 0
    seen_V[list(prompt)] = True
    shrunk_V = torch.where(logits_V > 0, logits_V / repetition, logits_V * repetition)
    logits_V = torch.where(seen_V, shrunk_V, logits_V)
    return logits_V - (counts_V > 0) * presence - counts_V * frequency


def test_a_slot_that_is_left_keeps_nothing():
    params = SamplingParams(presence_penalty=1.0)
    table = table_of([request(0, params), request(1, params)], VOCAB, [[1, 2], [3]])
    table.clear(1)
    assert set(table.seen) == {2}
    table.count(2, (3, 8))
    assert told(table.seen[2]) == {3: 2, 8: 1}
