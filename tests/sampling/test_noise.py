"""Counter-based noise: the paper's known answers, the right laws, and no two places alike."""

import numpy as np
import pytest
import torch
from scipy import stats

from headlong.sampling import noise

MIN_P = 1e-3
STREAMS = noise.STREAMS


def words(text: str) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([int(word, 16)]) for word in text.split())


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (
            "ffffffff ffffffff ffffffff ffffffff",
            "ffffffff ffffffff",
            "408f276d 41c83b0e a20bc7c6 6d5451fd",
        ),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            "a4093822 299f31d0",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_known_answers(counter, key, answer):
    out = noise.philox(words(counter), words(key))
    assert [int(word) for word in out] == [int(word, 16) for word in answer.split()]


def units(seed: int, *, choice: int = 0, stream: int = noise.TARGET, positions: int = 64, vocab: int = 257):
    """[positions, vocab] numbers of one sequence."""
    place = torch.arange(positions)
    seeds, choices, streams = (torch.full_like(place, value) for value in (seed, choice, stream))
    return noise.uniform_vocab(seeds, choices, place, streams, vocab)


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 + 5, 2**63 - 1])
@pytest.mark.parametrize("stream", STREAMS)
def test_uniform(seed, stream):
    unit = units(seed, stream=stream)
    assert unit.dtype == torch.float64
    assert unit.min() > 0.0 and unit.max() < 1.0
    assert stats.kstest(unit.flatten().numpy(), "uniform").pvalue > MIN_P
    along_positions = units(seed, stream=stream, positions=4096, vocab=1)
    assert stats.kstest(along_positions.flatten().numpy(), "uniform").pvalue > MIN_P


@pytest.mark.parametrize("vocab", [1, 2, 3, 4, 5, 1000, 8192])
def test_one_by_one_equals_the_whole_vocabulary(vocab):
    seed = torch.tensor([7, 2**63 - 1, 2**40 + 3])
    choice = torch.tensor([0, 255, 1])
    position = torch.tensor([0, 2**31, 262143])
    stream = torch.tensor([noise.TARGET, noise.DRAFT, noise.ACCEPT + 7 * len(STREAMS)])
    key = (seed, choice, position, stream)
    whole = noise.uniform_vocab(*key, vocab)
    single = noise.uniform(*(part[:, None] for part in key), torch.arange(vocab)[None])
    assert torch.equal(whole, single)
    # Picked in another order and shape, as a filtered distribution does.
    row, picked = torch.tensor([2, 0, 1, 2]), torch.tensor([vocab - 1, 0, vocab // 2, 0])
    some = noise.uniform(*(part[row] for part in key), picked)
    assert torch.equal(some, whole[row, picked])


def test_gumbel_bits_do_not_depend_on_the_shape():
    """A filtered row takes the noise of few tokens, an unfiltered one of all: the same numbers."""
    unit = units(3, positions=4, vocab=1001)
    whole = noise.gumbel(unit)
    for step in (1, 2, 3, 7, 8, 100):
        assert torch.equal(noise.gumbel(unit[:, ::step].contiguous()), whole[:, ::step])
        assert torch.equal(noise.gumbel(unit[:, step:]), whole[:, step:])
    assert torch.equal(torch.stack([noise.gumbel(value) for value in unit[0]]), whole[0])


def test_gumbel_max_samples_softmax():
    generator = torch.Generator().manual_seed(5)
    scores = torch.randn(11, generator=generator, dtype=torch.float64)
    scores[4] = -torch.inf
    draws = 50_000
    unit = units(11, positions=draws, vocab=11)
    tokens = (scores + noise.gumbel(unit)).argmax(-1)
    seen = np.bincount(tokens.numpy(), minlength=11)
    expected = torch.softmax(scores, 0).numpy() * draws
    assert seen[4] == 0
    kept = expected > 0
    assert stats.chisquare(seen[kept], expected[kept]).pvalue > MIN_P


def independent(a: torch.Tensor, b: torch.Tensor) -> bool:
    """A chi-square test over an 8 by 8 grid of the unit square."""
    table, *_ = np.histogram2d(a.flatten().numpy(), b.flatten().numpy(), bins=8, range=[[0, 1], [0, 1]])
    return stats.chi2_contingency(table).pvalue > MIN_P


def test_the_independence_test_sees_dependence():
    a = units(1)
    assert not independent(a, (a * 3) % 1.0)


def test_streams_are_independent():
    for first in STREAMS:
        for second in STREAMS:
            if first < second:
                assert independent(units(9, stream=first), units(9, stream=second))


def test_choices_seeds_positions_and_tokens_are_independent():
    unit = units(9)
    assert independent(unit, units(9, choice=1))
    assert independent(unit, units(10))
    assert independent(unit, units(9 + 2**32))
    assert independent(unit[:-1], unit[1:])
    assert independent(unit[:, :-1], unit[:, 1:])
    assert independent(units(9, choice=1)[:-1], units(9, choice=2)[1:])


def test_no_two_places_share_a_number():
    """Every part of the key counts, the high words of seeds too."""
    seen = torch.cat(
        [
            units(seed, choice=choice, stream=stream, positions=8, vocab=32).flatten()
            for seed in (0, 1, 2**32, 2**62)
            for choice in (0, 1, 255)
            for stream in STREAMS
        ]
    )
    # Words have 32 bits: among n of them about n² / 2³³ pairs are equal by chance.
    assert len(seen) - len(seen.unique()) <= 3
