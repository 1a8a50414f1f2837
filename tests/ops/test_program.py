"""A layer stack in one native call is its layers one by one, bit for bit, whatever is fed, drafted and accepted."""

import pytest
import torch

from headlong import LLM, SamplingParams
from headlong.ops import native
from support import tiny, tiny_llama
from support.gguf_models import GgufModel, experts_by_projection
from support.steps import Chunk, Decode, Driver, kept, load, poison
from support.tiny import FULL, LINEAR, random_tokens

pytestmark = pytest.mark.skipif(native.library() is None, reason="native kernels are not built or turned off")
ODD = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 20, "hidden_size": 36}
LARGE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "linear_num_value_heads": 2}
LARGE_EXPERTS = {
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 96,
    "linear_num_key_heads": 1,
}
MODELS = {
    "hybrid": lambda folder: tiny.make(folder, "dense"),
    "hybrid, odd": lambda folder: tiny.make(folder, "dense", layer_types=[FULL, FULL, LINEAR], **ODD),
    "hybrid, biased": lambda folder: tiny.make(folder, "dense", attention_bias=True),
    "hybrid, packed": lambda folder: packed(tiny.make(folder, "dense", **LARGE), "qwen35"),
    "llama": lambda folder: tiny_llama.make(folder),
    "llama, odd": lambda folder: tiny_llama.make(folder, num_key_value_heads=4, hidden_size=52, head_dim=14),
    "experts": lambda folder: tiny.make(folder, "moe"),
    "experts, odd": lambda folder: tiny.make(folder, "next", **ODD, num_experts=5, num_experts_per_tok=5),
    "experts, packed": lambda folder: packed(tiny.make(folder, "moe", **LARGE, **LARGE_EXPERTS), "qwen35moe"),
    "llama, biased": lambda folder: tiny_llama.make(folder, attention_bias=True, mlp_bias=True),
    "llama, packed": lambda folder: packed(tiny_llama.make(folder, hidden_size=256, head_dim=64), "llama"),
}
BLOCK_TYPES = ("Q4_0", "Q8_0", "F16", "Q5_1", "BF16", "Q4_1", "F32")
LENGTH = 60


def packed(made, arch):
    """The same model as a GGUF file, the matrices of each layer in several types."""
    model = GgufModel(tiny.read_config(made.folder), arch)
    weights = tiny.tensors(made)
    for number, (name, weight) in enumerate(experts_by_projection(weights).items()):
        fits = weight.shape[-1] % 32 == 0
        model.add(name, weight, BLOCK_TYPES[number % len(BLOCK_TYPES)] if fits else "F32")
    for file in made.folder.iterdir():
        file.unlink()
    model.write(made.folder / "model.gguf", head=True)
    return made


@pytest.fixture(scope="module", params=MODELS.values(), ids=MODELS)
def made(request, tmp_path_factory):
    return request.param(tmp_path_factory.mktemp("tiny"))


def drivers(folder, dtype):
    """One that runs programs, and one that goes from layer to layer."""
    whole, apart = load(folder, dtype), load(folder, dtype)
    (whole_head,), (apart_head,) = whole.head.layers, apart.head.layers
    for recorded in (whole.model.program, whole_head.forward_program, whole_head.remember_program):
        assert recorded is not None
    apart.model.program = apart_head.forward_program = apart_head.remember_program = None
    found = Driver(whole), Driver(apart)
    for driver in found:
        poison(driver)
    return found


def schedule(driver):
    """Prompts whole and in pieces, decoding, drafts that stand, fall or stand in part, in one another's company."""
    yield Chunk("a", 30), Chunk("b", 9, samples=False)
    yield Decode("a"), Chunk("b", 14)
    yield driver.draft("a", 3, 1, seed=1), Decode("b")
    yield driver.draft("a", 8, 8, seed=2), driver.draft("b", 5, 0, seed=3)
    yield Decode("a"), driver.draft("b", 2, 2, seed=4)
    yield (Decode("b"),)
    yield driver.draft("b", 1, 1, seed=5), Chunk("c", 40)
    yield Decode("a"), Decode("b"), Decode("c")


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_program_is_its_layers_one_by_one(made, dtype, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole, apart = drivers(made.folder, dtype)
        for number, row in enumerate("abc"):
            for driver in (whole, apart):
                driver.open(row, random_tokens(made.vocab_size, LENGTH, seed=number))
        for parts in schedule(whole):
            found, wanted = whole.step(*parts), apart.step(*parts)
            for row in (part.row for part in parts):
                assert found[row].hidden.isfinite().all()
                assert torch.equal(found[row].hidden, wanted[row].hidden)
                assert torch.equal(found[row].logits, wanted[row].logits)
                expected = kept(apart, row)
                for name, tensor in kept(whole, row).items():
                    assert torch.equal(tensor, expected[name]), f"{name} of row {row}"
            depths = {part.row: 1 + 3 * i for i, part in enumerate(parts) if getattr(part, "samples", True)}
            assert whole.propose_all(depths) == apart.propose_all(depths)
    finally:
        torch.set_num_threads(before)


def test_one_engine_after_another(made):
    """A program is bound to the state it runs with, not to the one it ran with first."""
    whole = load(made.folder)
    script = random_tokens(made.vocab_size, 20, seed=7)
    results = []
    for _ in range(2):
        driver = Driver(whole)
        driver.open("a", script)
        results.append((driver.feed("a", [5, 9]).logits, driver.propose("a", 4), kept(driver, "a")))
        poison(driver)
    assert torch.equal(results[0][0], results[1][0]) and results[0][1] == results[1][1]
    assert all(torch.equal(tensor, results[1][2][name]) for name, tensor in results[0][2].items())


@pytest.mark.parametrize("family", ["moe", "next"])
def test_models_with_experts_write_the_same_with_drafts(tmp_path, family):
    made = tiny.make(tmp_path, family)
    llm = LLM(made.folder, device="cpu", mtp="on", dtype="float32")
    prompts = [random_tokens(made.vocab_size, count, seed=count) for count in (3, 17)]
    tokens = [
        [
            completion.token_ids
            for completion in llm.generate(
                prompts, SamplingParams(max_tokens=12, ignore_eos=True, draft_tokens=drafts)
            )
        ]
        for drafts in (0, 3)
    ]
    assert tokens[0] == tokens[1] and all(len(found) == 12 for found in tokens[0])


def test_the_reference_has_none(tmp_path):
    built = load(tiny.make(tmp_path, "dense").folder, "float64")
    assert built.model.program is None and not built.head.is_one_call
    assert built.head.layers[0].remember_program is None
