"""Activations: close to torch's own, and the same bits wherever an element lies in its tensor."""

import pytest
import torch
import torch.nn.functional as F

from headlong.ops.elementwise import sigmoid, silu, softplus

FUNCTIONS = {"sigmoid": (sigmoid, torch.sigmoid), "silu": (silu, F.silu), "softplus": (softplus, F.softplus)}
DTYPES = (torch.float32, torch.float64)


def values(count=509):
    generator = torch.Generator().manual_seed(0)
    edges = torch.tensor(
        [0.0, -0.0, 1e-30, -1e-30, 19.99, 20.0, 20.01, -88.0, 88.0, 1e4, -1e4, 700.0, -700.0]
    )
    return torch.cat([edges.double(), torch.randn(count, generator=generator, dtype=torch.float64) * 9])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_torch(name, dtype):
    ours, theirs = FUNCTIONS[name]
    x = values().to(dtype)
    expected = theirs(x.double()).to(dtype)
    torch.testing.assert_close(ours(x), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_argument_is_left_alone(name, dtype):
    x = values().to(dtype)
    before = x.clone()
    FUNCTIONS[name][0](x)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_bits_do_not_depend_on_the_place(name, dtype):
    function = FUNCTIONS[name][0]
    x = values().to(dtype)
    alone = torch.cat([function(x[i : i + 1].clone()) for i in range(len(x))])
    for count in (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 127, len(x)):
        assert torch.equal(function(x[:count].clone()), alone[:count])
    for shift in range(1, 34):
        moved = torch.cat([torch.full((shift,), 3.0, dtype=dtype), x])
        assert torch.equal(function(moved)[shift:], alone)
        assert torch.equal(function(moved[shift:]), alone), "a view that starts anywhere"
    wide = x[:510].view(30, 17)
    assert torch.equal(function(wide).flatten(), alone[:510])
    assert torch.equal(function(wide[:, 3:11]), alone[:510].view(30, 17)[:, 3:11]), "a part of each row"
    assert torch.equal(function(wide.T), alone[:510].view(30, 17).T)
