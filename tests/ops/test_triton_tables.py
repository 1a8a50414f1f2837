"""Triton's product with codes of a table (bitsandbytes nf4 and fp4) and with GGUF's small blocks, which are bytes here.

How codes are looked up on a GPU no interpreter runs: its instructions are carried out here, one by one.
"""

import re

import pytest
import torch
from torch import Tensor

from headlong.ops.linear.triton import TritonLinear
from headlong.ops.linear.triton_lookup import NUMBERS, lookup_asm
from headlong.quant.bitsandbytes import Bnb4Weight
from headlong.quant.detect import detect
from headlong.quant.gguf import BLOCK_SIZES, GgufBlocks
from support import packing

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OUTS = 70
SCALED, ROUNDED = 3e-7, 2.0**-7
"""As in test_triton_linear.py: sums of exact numbers that are scaled, and of numbers that were rounded."""


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def stored(how: str, size: int, **changed: Tensor) -> Bnb4Weight:
    parts = packing.pack(draw(OUTS, size, seed=1), how) | changed
    found = detect(packing.header(parts), (OUTS, size), {})
    weight = found.pack({name: part.to(DEVICE) for name, part in parts.items()}, (OUTS, size))
    assert isinstance(weight, Bnb4Weight)
    return weight


def distance(found: Tensor, x: Tensor, weight: Tensor) -> float:
    x, weight = x.double(), weight.double()
    return ((found - x @ weight.T).abs() / (x.abs().sum(1, keepdim=True) * weight.abs().max())).max().item()


@pytest.mark.parametrize(
    ("how", "error", "size"),
    [
        ("nf4", ROUNDED, 320),
        ("nf4", ROUNDED, 96),
        ("nf4_nested", ROUNDED, 64),
        ("fp4", SCALED, 320),
        ("fp4", ROUNDED, 96),
    ],
)
def test_the_product(how, error, size):
    """Where blocks go over the ends of rows, fewer columns have a largest magnitude together."""
    weight, x = stored(how, size), draw(5, size).bfloat16().float().to(DEVICE)
    assert TritonLinear.supports(weight) is None
    multiply, dense = TritonLinear([weight]), weight.dequantize(0, OUTS)
    assert distance(multiply(x), x, dense) < error
    assert torch.equal(torch.cat([multiply(token[None]) for token in x]), multiply(x))
    assert distance(TritonLinear([weight], dtype=torch.float32)(x), x, dense) < SCALED


@pytest.mark.parametrize("kind", ["IQ1_S", "IQ2_XXS", "IQ2_S", "IQ3_XXS", "IQ3_S"])
def test_small_blocks(kind):
    elements, nbytes = BLOCK_SIZES[kind]
    data = torch.randint(
        0, 256, (OUTS, 2, nbytes), generator=torch.Generator().manual_seed(3), dtype=torch.uint8
    )
    data[..., :2] = torch.tensor([0.01]).half().view(torch.uint8)
    size = 2 * elements
    weight = GgufBlocks(kind).pack({"weight": data.flatten(1).to(DEVICE)}, (OUTS, size))
    x = draw(3, size).bfloat16().float().to(DEVICE)
    assert TritonLinear.supports(weight) is None
    assert distance(TritonLinear([weight])(x), x, weight.dequantize(0, OUTS)) < ROUNDED


def test_what_it_cannot_multiply_it_says():
    other = stored("nf4", 64, **{"weight.quant_map": torch.linspace(-1, 1, 16)})
    assert "is not the usual one" in str(TritonLinear.supports(other))


def permuted_bytes(first: int, second: int, places: int) -> int:
    """What `prmt` picks: a byte of eight by number, or, with the highest bit of a number, its sign alone."""
    eight = (first | second << 32).to_bytes(8, "little")
    found = []
    for at in range(4):
        number = places >> 4 * at & 15
        byte = eight[number & 7]
        found.append((255 if byte > 127 else 0) if number > 7 else byte)
    return int.from_bytes(bytes(found), "little")


def carried_out(program: str, code: int) -> tuple[int, int]:
    """The results of a program of the few instructions that look codes up."""
    register = {"$2": code}

    def value(word: str) -> int:
        return register[word] if word in register else int(word, 0)

    for line in re.findall(r"^ +(.*);$", program, re.M):
        name, _, rest = line.partition(" ")
        if name == ".reg":
            continue
        target, *words = [word.strip() for word in rest.split(",")]
        given = [value(word) for word in words]
        done = {
            "mov": lambda a: a,
            "and": lambda a, b: a & b,
            "or": lambda a, b: a | b,
            "shl": lambda a, b: a << b & 0xFFFFFFFF,
            "shr": lambda a, b: a >> b,
            "prmt": permuted_bytes,
            "lop3": lambda a, b, c, how: sum(
                (how >> ((a >> bit & 1) << 2 | (b >> bit & 1) << 1 | c >> bit & 1) & 1) << bit
                for bit in range(32)
            ),
        }[name.partition(".")[0]]
        register[target] = done(*given)
    return register["$0"], register["$1"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NUMBERS)
def test_the_instructions_look_every_code_up(name, dtype):
    wanted = torch.tensor(NUMBERS[name]).to(dtype)
    for half in (0, 1):
        program = lookup_asm(NUMBERS[name], dtype, half)
        for first in range(0, 256, 4):
            codes = [first, (first + 77) & 255, (first + 130) & 255, 255 - first]
            words = carried_out(program, int.from_bytes(bytes(codes), "little"))
            found = torch.tensor([word >> 16 * at & 0xFFFF for word in words for at in (0, 1)]).to(
                torch.uint16
            )
            fields = torch.tensor([code >> 4 * half & 15 for code in codes])
            assert torch.equal(found.view(dtype), wanted[fields])
