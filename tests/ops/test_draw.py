"""The native draw, and Triton's, against the noise they are made of, computed in torch."""

from importlib.util import find_spec

import pytest
import torch

from headlong.ops import native
from headlong.params import SamplingParams
from headlong.sampling import noise, trials
from headlong.sampling.processors import FilterSet, shape_all
from headlong.sampling.table import SamplingTable
from headlong.types import Request

needs_native = pytest.mark.skipif(
    native.library() is None, reason="native kernels are not built or turned off"
)
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
ROWS = 48


def cases(size, heat, rows=ROWS):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(rows, size, generator=generator, dtype=torch.float64) * heat
    scores[: rows // 2, size // 3 : size // 2] = -torch.inf
    limits = (2**62, 4, 1 << 33, 40)
    keys = torch.stack([torch.randint(0, most, (rows,), generator=generator) for most in limits], 1)
    return scores, keys


def draw(scores, keys, device="cpu"):
    """By the kernels of that device: Triton's are for GPUs, and run in the interpreter where there is none."""
    if device == "cpu":
        from headlong.ops.draw.native import draw
    else:
        from headlong.ops.draw.triton import draw

        device = "cuda" if torch.cuda.is_available() else "cpu"
    return draw(scores.to(device), keys.to(device)).cpu()


kernels = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=needs_native), pytest.param("cuda", marks=needs_triton)]
)


@pytest.mark.parametrize("heat", [0.01, 1.0, 5.0, 40.0])
@pytest.mark.parametrize("size", [1, 3, 64, 255, 256, 257, 1000, 8193])
@kernels
def test_it_is_the_best_of_scores_and_noise(size, heat, device):
    scores, keys = cases(size, heat, rows=ROWS if device == "cpu" else 6)
    seed, choice, position, stream = keys.unbind(1)
    wanted = noise.draw(scores, (seed, choice, position, stream))
    assert torch.equal(draw(scores, keys, device), wanted)


@needs_native
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


@kernels
def test_extremes(device):
    scores = torch.full((4, 300), -torch.inf, dtype=torch.float64)
    scores[0, 50], scores[1, 70], scores[2, 299] = torch.nan, torch.inf, -1e30
    scores[3, :2] = torch.tensor([1e300, -1e300])
    assert draw(scores, torch.zeros(4, 4, dtype=torch.long), device).tolist() == [50, 70, 299, 0]


@needs_native
def test_it_samples_the_distribution():
    """Ten thousand positions: counts within five standard deviations of what softmax says."""
    count, chances = 10_000, torch.tensor([0.5, 0.25, 0.15, 0.1], dtype=torch.float64)
    keys = torch.zeros(count, 4, dtype=torch.long)
    keys[:, 2] = torch.arange(count)
    found = draw(chances.log().expand(count, 4), keys).bincount(minlength=4)
    spread = (count * chances * (1 - chances)).sqrt()
    assert ((found - count * chances).abs() < 5 * spread).all()


@needs_native
def test_a_kernel_that_draws_others_is_found(monkeypatch, caplog):
    """As is asked of a GPU's before it serves."""
    monkeypatch.setattr(trials, "TOKENS", 300)
    cpu = torch.device("cpu")
    assert trials.draws_alike(lambda scores, keys: draw(scores, keys), cpu)
    for column in range(4):
        other = torch.eye(4, dtype=torch.long)[column]
        assert not trials.draws_alike(lambda scores, keys, other=other: draw(scores, keys + other), cpu)
    assert "tokens are drawn by torch on cpu" in caplog.text


FILTERS = {
    "temperature": (0.8, 0, 1.0, 0.0),
    "top-k": (0.8, 20, 1.0, 0.0),
    "one": (0.8, 1, 1.0, 0.0),
    "top-k above the vocabulary": (0.8, 10_000, 0.9, 0.0),
    "top-p": (0.8, 0, 0.95, 0.0),
    "little": (1.0, 0, 1e-9, 0.0),
    "much": (1.0, 0, 1 - 1e-9, 0.0),
    "top-k and top-p": (0.7, 20, 0.9, 0.0),
    "min-p": (1.3, 0, 1.0, 0.05),
    "all": (2.0, 50, 0.8, 0.02),
    "hot": (40.0, 0, 0.6, 0.0),
    "cold": (0.01, 5, 0.9, 0.1),
}


def row_logits(size: int) -> torch.Tensor:
    """Sharp rows, flat ones, rows full of equals, with tokens that cannot be, with a single one that can."""
    generator = torch.Generator().manual_seed(size)
    logits = 3.0 * torch.randn(60, size, generator=generator)
    logits[10:20] *= 0.05
    logits[20:40] = logits[20:40].round()
    logits[40:50, ::2] = -torch.inf
    logits[50:55] = 0.5
    logits[55:] = -torch.inf
    logits[55:, size // 2] = -3.0
    return logits


@needs_native
@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize("size", [1, 7, 256, 300, 8193])
def test_sampling_from_logits_is_filtering_then_drawing(size, filters):
    from headlong.ops.draw.native import sample

    logits = row_logits(size)
    table = SamplingTable(1, size, torch.device("cpu"))
    temperature, top_k, top_p, min_p = filters
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    table.set(1, Request("row", (0,), params, seed=3), [])
    slots = torch.ones(len(logits), dtype=torch.long)
    scores = shape_all(logits, slots, table, FilterSet.of(params))
    for position in range(4):
        keys = torch.tensor([[3, 0, 10 * row + position, 0] for row in range(len(logits))])
        assert torch.equal(sample(logits, table.filters(slots), keys), draw(scores, keys))


@needs_native
def test_sampling_from_logits_that_are_none():
    from headlong.ops.draw.native import sample

    logits = torch.zeros(4, 300)
    logits[0, 50], logits[1, 70], logits[3, 80:] = torch.nan, torch.inf, -torch.inf
    logits[2] = -torch.inf
    filters = torch.tensor([[1.0, 5, 0.9, 0.1]] * 4, dtype=torch.float64)
    found = sample(logits, filters, torch.zeros(4, 4, dtype=torch.long)).tolist()
    assert found[:3] == [50, 70, 0] and found[3] < 80


@needs_native
def test_sampling_alone_and_in_company():
    """Rows of other sizes, filters and threads leave nothing behind that the next one sees."""
    from headlong.ops.draw.native import sample

    filters = torch.tensor(list(FILTERS.values()), dtype=torch.float64).repeat(5, 1)
    keys = torch.tensor([[3, 0, row, 0] for row in range(60)])
    threads = torch.get_num_threads()
    try:
        for size in (8193, 300):
            logits = row_logits(size)
            torch.set_num_threads(3)
            together = sample(logits, filters, keys)
            torch.set_num_threads(1)
            alone = [sample(logits[[row]], filters[[row]], keys[[row]]) for row in reversed(range(60))]
            assert torch.equal(torch.cat(alone[::-1]), together)
    finally:
        torch.set_num_threads(threads)
