"""Every linear says how it may be split between devices, and what is split so fits together."""

import pytest
import torch

from headlong.engine.build import Built
from headlong.ops import program
from headlong.ops.linear.linear import Shard
from headlong.ops.program import GIVEN, STREAM, Buffer, Instruction
from support import tiny, tiny_llama
from support.steps import load

FAMILIES = {
    "dense": lambda folder: tiny.make(folder, "dense"),
    "moe": lambda folder: tiny.make(folder, "moe"),
    "next": lambda folder: tiny.make(folder, "next"),
    "qwen2": lambda folder: tiny.make(folder, "qwen2", head=False),
    "qwen3": lambda folder: tiny.make(folder, "qwen3", head=False),
    "llama": lambda folder: tiny_llama.make(folder, attention_bias=True, mlp_bias=True),
}


@pytest.fixture(scope="module", params=FAMILIES.values(), ids=FAMILIES)
def built(request, tmp_path_factory) -> Built:
    return load(request.param(tmp_path_factory.mktemp("tiny")).folder)


def follow(instructions: list[Instruction], split: set[Buffer]) -> None:
    """Which buffers hold a device's part alone, instruction after instruction; the others hold the same everywhere."""
    for instruction in instructions:
        match instruction:
            case program.Norm(_, source, to):
                assert source not in split, "a norm needs whole rows"
                split.discard(to)
            case program.Gemm(linear, source, to, add):
                assert (source in split) == (linear.shard is Shard.INPUT), (
                    "what feeds it is split as it expects"
                )
                assert not add or (to in split) == (linear.shard is Shard.OUTPUT)
                (split.add if linear.shard is Shard.OUTPUT else split.discard)(to)
            case (
                program.SiluMul(source, to)
                | program.DeltaNet(_, _, source, to)
                | program.Attention(_, _, source, to)
            ):
                assert source in split, "heads and gates are computed where they are projected"
                if to is not None:
                    split.add(to)
            case program.Experts(_, source, logits, to):
                assert not {source, logits, to} & split, "everybody routes alike"


def test_what_is_split_by_output_feeds_what_is_split_by_input(built):
    model, head = built.model, built.head
    blocks = [] if head is None else [each.layer for each in head.layers]
    assert not set(map(id, blocks)) & set(map(id, model.layers))
    for layer in (*model.layers, *blocks):
        split: set[Buffer] = set()
        follow(layer.instructions(), split)
        assert not {STREAM, GIVEN} & split, "layers leave what everybody has"


def linears(thing, seen):
    """All that an object of ours holds that says how it may be split."""
    if id(thing) in seen or isinstance(thing, torch.Tensor):
        return
    seen[id(thing)] = thing
    if isinstance(getattr(thing, "shard", None), Shard):
        yield thing
        return
    parts = thing.values() if isinstance(thing, dict) else thing if isinstance(thing, list | tuple) else ()
    if type(thing).__module__.startswith("headlong."):
        parts = vars(thing).values() if hasattr(thing, "__dict__") else ()
    for part in parts:
        yield from linears(part, seen)


def test_every_linear_declares_it(built):
    """On the linear itself, not by what its class says where nobody asked."""
    heads = [] if built.head is None else [part for each in built.head.layers for part in each.join.parts]
    found = list(linears([built.model.layers, built.model.lm_head, built.model.embedding, *heads], {}))
    assert all("shard" in vars(linear) for linear in found)
    assert {linear.shard for linear in found} >= {Shard.OUTPUT, Shard.INPUT}
    assert built.model.lm_head.shard is Shard.OUTPUT is built.model.embedding.shard
    assert all(linear.shard is Shard.NONE for linear in heads)
