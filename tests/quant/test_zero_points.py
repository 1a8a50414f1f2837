"""Which version GPTQ's zero points are: for every pair of readings, the evidence that decides, and refusals without."""

import numpy as np
import pytest
import torch
from torch import Tensor

from headlong.errors import CheckpointError
from headlong.quant.gptq import GptqFormat, GptqWeight
from support.packing import header
from support.packing_bits import rounded_ints, words_of

SHAPE, GROUP = (64, 256), 32


def stored(
    less: int, bits: int = 4, *, symmetric: bool = False, shape=SHAPE
) -> tuple[dict[str, Tensor], Tensor]:
    """A random matrix as GPTQ stores it, zero points less `less`; and what it means."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(bits))
    runs = torch.arange(shape[1]) // min(GROUP, shape[1])
    codes, scale, zero = rounded_ints(weight, bits, runs, not symmetric, torch.float16, first_zero=1)
    parts = {
        "qweight": words_of(codes.numpy(), bits).t().contiguous(),
        "qzeros": words_of((zero - less).t().numpy(), bits),
        "scales": scale.t().contiguous(),
    }
    return parts, (codes - zero[:, runs]) * scale.float()[:, runs]


def read(parts: dict[str, Tensor], hint: dict, shape=SHAPE) -> GptqWeight:
    found = GptqFormat.detect(header(parts), shape, hint)
    assert found is not None
    return found.pack(parts, shape)


SAYS = {1: {"checkpoint_format": "gptq"}, 0: {"checkpoint_format": "gptq_v2"}}
CUSTOM, NOTHING = {"method": "gptq"}, {}
DIVIDED = {"method": "gptq", "checkpoint_format": "gptq or gptq_v2"}


@pytest.mark.parametrize("less", [0, 1])
@pytest.mark.parametrize("hint", ["said", "custom", "nothing", "divided"])
@pytest.mark.parametrize(
    "how", [{}, {"bits": 2}, {"bits": 3}, {"symmetric": True}, {"bits": 8, "symmetric": True}]
)
def test_values_decide_whatever_the_config_leaves_open(less, hint, how):
    """Symmetric zero points lie in the middle in one version alone, others where the mean is near 0."""
    parts, wanted = stored(less, **how)
    weight = read(parts, {"said": SAYS[less], "custom": CUSTOM, "nothing": NOTHING, "divided": DIVIDED}[hint])
    assert torch.equal(weight.dequantize(0, SHAPE[0]), wanted)
    assert weight.format.label.startswith("gptq " if less else "gptq_v2 ")


@pytest.mark.parametrize("less", [0, 1])
@pytest.mark.parametrize("how", [{}, {"symmetric": True}])
def test_a_config_that_the_values_contradict(less, how):
    with pytest.raises(
        CheckpointError, match=r"checkpoint_format 'gptq.*', and the zero points have the values"
    ):
        read(stored(less, **how)[0], SAYS[1 - less])


@pytest.mark.parametrize("less", [0, 1])
def test_the_config_decides_where_values_cannot(less):
    """At 8 bits a mean of one step is nothing unusual."""
    parts, wanted = stored(less, 8)
    assert torch.equal(read(parts, SAYS[less]).dequantize(0, SHAPE[0]), wanted)
    for hint in (NOTHING, DIVIDED):
        with pytest.raises(
            CheckpointError, match="can be read in two ways, and neither a config nor the values"
        ):
            read(parts, hint)


def test_custom_decides_where_values_cannot():
    """A GPTQ config without a `checkpoint_format` was written when there was only the first version."""
    parts, wanted = stored(1, 8)
    assert torch.equal(read(parts, CUSTOM).dequantize(0, SHAPE[0]), wanted)


def test_layouts_with_the_same_shapes_are_refused_by_name():
    with pytest.raises(CheckpointError, match=r"checkpoint_format is 'gptq_p'"):
        read(stored(0, 3)[0], {"checkpoint_format": "gptq_p"})


def with_a_zero(less_by: str) -> tuple[dict[str, Tensor], Tensor]:
    """A matrix whose row 2 has a zero point of 0 in group 0, which is stored less one by words or by fields."""
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(5))
    weight[2, :GROUP] = weight[2, :GROUP].abs()
    runs = torch.arange(SHAPE[1]) // GROUP
    codes, scale, zero = rounded_ints(weight, 4, runs, True, torch.float16)
    assert zero[2, 0] == 0
    words = words_of(zero.t().numpy(), 4)
    if less_by == "words":
        qzeros = torch.from_numpy((words.numpy().view(np.uint32) - np.uint32(0x11111111)).view(np.int32))
    else:
        qzeros = words_of(((zero - 1) % 16).t().numpy(), 4)
    parts = {
        "qweight": words_of(codes.numpy(), 4).t().contiguous(),
        "qzeros": qzeros,
        "scales": scale.t().contiguous(),
    }
    return parts, (codes - zero[:, runs]) * scale.float()[:, runs]


def test_a_zero_point_of_zero_that_gptqmodel_stored():
    parts, wanted = with_a_zero("words")
    weight = read(parts, SAYS[1] | {"writer": "gptqmodel"})
    assert torch.equal(weight.dequantize(0, SHAPE[0]), wanted)


@pytest.mark.parametrize("how", ["words", "fields"])
def test_a_zero_point_of_zero_that_nobody_says_how_it_was_stored(how):
    with pytest.raises(CheckpointError, match=r"qzeros hold 15, which .* more than one way"):
        read(with_a_zero(how)[0], SAYS[1])
