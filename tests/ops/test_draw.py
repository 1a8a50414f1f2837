"""The native draw against the noise it is made of, computed in torch."""

import pytest
import torch

from headlong.ops import native
from headlong.sampling import noise

pytestmark = pytest.mark.skipif(native.library() is None, reason="native kernels are not built or turned off")
ROWS = 48


def cases(size, heat, seed=0):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(ROWS, size, generator=generator, dtype=torch.float64) * heat
    scores[: ROWS // 2, size // 3 : size // 2] = -torch.inf
    limits = (2**62, 4, 1 << 33, 40)
    keys = torch.stack([torch.randint(0, most, (ROWS,), generator=generator) for most in limits], 1)
    return scores, keys


def draw(scores, keys):
    from headlong.ops.draw.native import draw

    return draw(scores, keys)


@pytest.mark.parametrize("heat", [0.01, 1.0, 5.0, 40.0])
@pytest.mark.parametrize("size", [1, 3, 64, 255, 256, 257, 1000, 8193])
def test_it_is_the_best_of_scores_and_noise(size, heat):
    scores, keys = cases(size, heat)
    unit = noise.uniform_vocab(*keys.T.contiguous(), size)
    wanted = (scores + noise.gumbel(unit)).argmax(-1)
    assert torch.equal(draw(scores, keys), wanted)


def test_rows_and_threads_do_not_matter():
    scores, keys = cases(1000, 3.0)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        together = draw(scores, keys)
        torch.set_num_threads(1)
        assert torch.equal(draw(scores, keys), together)
    finally:
        torch.set_num_threads(threads)
    alone = torch.cat([draw(scores[row : row + 1], keys[row : row + 1]) for row in range(ROWS)])
    assert torch.equal(alone, together)


def test_extremes():
    scores = torch.full((4, 300), -torch.inf, dtype=torch.float64)
    scores[0, 50], scores[1, 70], scores[2, 299] = torch.nan, torch.inf, -1e30
    scores[3, :2] = torch.tensor([1e300, -1e300])
    assert draw(scores, torch.zeros(4, 4, dtype=torch.long)).tolist() == [50, 70, 299, 0]


def test_it_samples_the_distribution():
    """Ten thousand positions: counts within five standard deviations of what softmax says."""
    count, chances = 10_000, torch.tensor([0.5, 0.25, 0.15, 0.1], dtype=torch.float64)
    keys = torch.zeros(count, 4, dtype=torch.long)
    keys[:, 2] = torch.arange(count)
    found = draw(chances.log().expand(count, 4), keys).bincount(minlength=4)
    spread = (count * chances * (1 - chances)).sqrt()
    assert ((found - count * chances).abs() < 5 * spread).all()
