"""A whole model on Triton's kernels, on the CPU through the interpreter: float32, with drafts accepted and refused.

The same tokens cut otherwise must leave the same bits, and what they leave must be what the reference ops leave.
"""

import pytest
import torch

from headlong.layers.mlp import MoeMlp
from headlong.ops.linear import triton_weight
from headlong.ops.linear.triton import TritonLinear
from headlong.ops.moe.triton import TritonExperts
from headlong.ops.norm.triton import TritonRmsNorm
from support import tiny
from support.steps import Driver, load
from support.tiny import random_tokens

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the driver works on the CPU")


FAMILIES = {
    "dense": ("dense", {}),
    "latent": ("deepseek_v3", {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}),
    "experts": ("moe", {"num_hidden_layers": 2, "layer_types": [tiny.LINEAR, tiny.FULL]}),
    "experts, the shared one among them": (
        "moe",
        {
            "num_hidden_layers": 1,
            "layer_types": [tiny.FULL],
            "shared_expert_intermediate_size": tiny.EXPERTS["moe_intermediate_size"],
            "experts": "apart",
        },
    ),
    "experts in groups, the first layer dense": (
        "glm4_moe",
        {
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "n_group": 4,
            "topk_group": 2,
            "use_qk_norm": True,
        },
    ),
    "windows, sinks and clamped experts with biases": (
        "gpt_oss",
        {
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "hidden_size": 32,
            "num_local_experts": 4,
            "sliding_window": 5,
            "swiglu_limit": 0.7,
        },
    ),
}
SLOW = (
    "dense",
    "experts in groups, the first layer dense",
    "windows, sinks and clamped experts with biases",
)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    family, sizes = FAMILIES[request.param]
    return tiny.make(tmp_path_factory.mktemp("tiny"), family, seed=5, **sizes).folder


def driven(folder, monkeypatch, triton: str) -> Driver:
    monkeypatch.setenv("HEADLONG_TRITON", triton)
    monkeypatch.setenv("HEADLONG_NATIVE", "0")
    built = load(folder)
    serves = triton == "interpret"
    assert isinstance(built.model.lm_head, TritonLinear) == serves
    assert built.head is not None
    mlps = [layer.mlp for layer in (*built.model.layers, *(each.layer for each in built.head.layers))]
    assert all(isinstance(mlp.experts, TritonExperts) == serves for mlp in mlps if isinstance(mlp, MoeMlp))
    # All of it, the head's experts among it, could be recorded.
    assert not serves or not built.ops.asks_host
    driver = Driver(built, max_rows=2)
    driver.open("a", random_tokens(built.model.config.vocab_size, 40, seed=1))
    return driver


def in_steps(driver: Driver) -> torch.Tensor:
    """A prompt in two chunks, then drafts: all refused, some accepted, all accepted."""
    found = [driver.feed("a", [7, 4]).logits]
    for depth, accept in ((2, 0), (3, 2), (2, 2), (1, 0)):
        found.append(driver.step(driver.draft("a", depth, accept, seed=depth))["a"].logits)
    return torch.cat(found)


def agree(folder, monkeypatch) -> Driver:
    """Cuts leave the same bits, and the reference's values."""
    drafted, plain = driven(folder, monkeypatch, "interpret"), driven(folder, monkeypatch, "interpret")
    reference = driven(folder, monkeypatch, "1")
    found = in_steps(drafted)
    single = torch.cat([plain.feed("a", [3, 8]).logits, plain.decode("a", len(found) - 11).logits])
    assert torch.equal(found, single)
    torch.testing.assert_close(found, in_steps(reference), rtol=1e-4, atol=1e-4)
    assert drafted.propose("a", 3) == plain.propose("a", 3) == reference.propose("a", 3)
    return drafted


@pytest.mark.parametrize(
    "folder",
    [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in FAMILIES],
    indirect=True,
)
def test_whole_sums(folder, monkeypatch):
    agree(folder, monkeypatch)


@pytest.mark.parametrize("folder", ["dense", pytest.param("experts", marks=pytest.mark.slow)], indirect=True)
def test_split_k(folder, monkeypatch):
    """As those of larger models are, which leave their norms to products in half: all of a layer's, but the first."""
    monkeypatch.setattr(triton_weight, "LEAST_STEPS", 1)
    monkeypatch.setattr(triton_weight, "WHOLE_STEPS", 0)
    whole, honest = [], TritonRmsNorm.__call__
    monkeypatch.setattr(TritonRmsNorm, "__call__", lambda self, x: whole.append(self) or honest(self, x))
    layers = agree(folder, monkeypatch).engine.runner.model.layers
    assert layers[0].mixer_norm in whole
    norms = [layer.mlp_norm for layer in layers] + [layer.mixer_norm for layer in layers[1:]]
    assert not any(norm in whole for norm in norms)
