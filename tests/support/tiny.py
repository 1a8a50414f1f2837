"""Random tiny checkpoints on disk, each with the transformers model that wrote it and a head like it.

Weights are far from their neutral values (norms away from zero, decays of every speed), so that a forgotten
`1 +`, a swapped half or a missing gate shows. Knows nothing of Headlong but the names on disk.
"""

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.models.llama import modeling_llama as llama
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config
from transformers.models.qwen3 import modeling_qwen3 as qwen3
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3_5 import modeling_qwen3_5 as dense
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config, Qwen3_5TextConfig
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as moe
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig

FULL, LINEAR = "full_attention", "linear_attention"
SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "layer_types": [LINEAR, FULL, LINEAR],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 512,
    "pad_token_id": None,
}
PLAIN_SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LEAST = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "layer_types": [LINEAR, FULL],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
}
"""One layer of each kind and as few heads as may share another's keys: for interpreted kernels, whose time is that of
their programs."""
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "num_position_embeddings": 16,
    "patch_size": 4,
}


@dataclass(frozen=True)
class _Family:
    config: Any
    model: Any
    layer: Any
    norm: Any
    sizes: dict[str, Any]
    plain_arch: str | None = None
    """Of models of plain layers, whose norms are not stored around zero: what GGUF files call them."""


FAMILIES = {
    "dense": _Family(
        Qwen3_5TextConfig, dense.Qwen3_5ForCausalLM, dense.Qwen3_5DecoderLayer, dense.Qwen3_5RMSNorm, SIZES
    ),
    "moe": _Family(
        Qwen3_5MoeTextConfig,
        moe.Qwen3_5MoeForCausalLM,
        moe.Qwen3_5MoeDecoderLayer,
        moe.Qwen3_5MoeRMSNorm,
        SIZES | EXPERTS,
    ),
    "next": _Family(
        Qwen3NextConfig,
        qwen3_next.Qwen3NextForCausalLM,
        qwen3_next.Qwen3NextDecoderLayer,
        qwen3_next.Qwen3NextRMSNorm,
        SIZES | EXPERTS,
    ),
    "llama": _Family(
        LlamaConfig, llama.LlamaForCausalLM, llama.LlamaDecoderLayer, llama.LlamaRMSNorm, PLAIN_SIZES, "llama"
    ),
    "qwen2": _Family(
        Qwen2Config, qwen2.Qwen2ForCausalLM, qwen2.Qwen2DecoderLayer, qwen2.Qwen2RMSNorm, PLAIN_SIZES, "qwen2"
    ),
    "qwen3": _Family(
        Qwen3Config,
        qwen3.Qwen3ForCausalLM,
        qwen3.Qwen3DecoderLayer,
        qwen3.Qwen3RMSNorm,
        PLAIN_SIZES | {"head_dim": 16},
        "qwen3",
    ),
}
PLAIN_FAMILIES = [name for name, family in FAMILIES.items() if family.plain_arch is not None]


class ReferenceHead(nn.Module):
    """The MTP head over a whole sequence of pairs, without a cache."""

    def __init__(self, family: _Family, config: Any, num_layers: int = 1) -> None:
        super().__init__()
        config = copy.deepcopy(config)
        config.layer_types = [FULL]
        config.mlp_only_layers, config.decoder_sparse_step = [], 1
        size, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding = family.norm(size, eps=eps)
        self.pre_fc_norm_hidden = family.norm(size, eps=eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([family.layer(config, 0) for _ in range(num_layers)])
        self.norm = family.norm(size, eps=eps)

    def forward(self, embedding: Tensor, hidden: Tensor, rotary: nn.Module, layer: int = 0) -> Tensor:
        """`embedding` and `hidden` are [pairs, hidden size]; pair i stands at position i. All are read by one layer."""
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)], -1))
        count = len(x)
        past = torch.ones(count, count, dtype=torch.bool).tril()
        mask = torch.zeros(count, count, dtype=x.dtype).masked_fill(~past, -torch.inf)
        positions = torch.arange(count)[None]
        x = self.layers[layer](
            x[None],
            position_embeddings=rotary(x[None], positions),
            attention_mask=mask[None, None],
            position_ids=positions,
        )
        return self.norm(x[0])


@dataclass(frozen=True)
class Tiny:
    """A checkpoint folder and what it holds, as transformers computes it."""

    folder: Path
    model: Any
    head: ReferenceHead | None

    @property
    def text(self) -> Any:
        """The text model without its lm_head."""
        inner = self.model.model
        return inner.language_model if hasattr(inner, "language_model") else inner

    @property
    def vocab_size(self) -> int:
        return self.text.config.vocab_size

    @torch.no_grad()
    def forward(self, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """Hidden states after the final norm, and logits, of one sequence read at once."""
        hidden = self.text(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
        return hidden, self.model.lm_head(hidden)

    @torch.no_grad()
    def pairs(self, next_tokens: list[int], hidden: Tensor, layer: int = 0) -> Tensor:
        """What a layer of the head says of the pairs (hidden[i], next_tokens[i])."""
        assert self.head is not None
        embedding = self.text.embed_tokens(torch.tensor(next_tokens))
        return self.head(embedding, hidden, self.text.rotary_emb, layer)

    def double(self) -> "Tiny":
        """The same in float64."""
        head = copy.deepcopy(self.head).double() if self.head is not None else None
        return Tiny(self.folder, copy.deepcopy(self.model).double(), head)


def make(
    folder: Path,
    family: str = "dense",
    *,
    seed: int = 0,
    head: bool | int = True,
    wrapped: bool = False,
    experts: str = "fused",
    rotary: float = 0.5,
    rope: dict[str, Any] | None = None,
    rope_factors: Tensor | None = None,
    **sizes: Any,
) -> Tiny:
    """Builds a random model, writes it to `folder` and returns both. `wrapped` is the multimodal form;
    `experts` is "fused" or "apart", `head` how many layers it has. `rope_factors` are stored as a tensor,
    and divide the frequencies of the transformers model too."""
    generator = torch.Generator().manual_seed(seed)
    kind = FAMILIES[family]
    fields = kind.sizes | sizes
    if rope is None:
        part = {} if kind.plain_arch else {"partial_rotary_factor": rotary}
        rope = {"rope_type": "default", "rope_theta": 10000.0} | part
    config = kind.config(**fields, rope_parameters=rope)
    config._experts_implementation = "eager"  # the grouped one takes only sizes that fill 16 bytes
    if wrapped:
        assert family == "dense"
        config = Qwen3_5Config(
            text_config=config.to_dict(),
            vision_config=VISION | {"out_hidden_size": config.hidden_size},
            tie_word_embeddings=config.tie_word_embeddings,
        )
        model = dense.Qwen3_5ForConditionalGeneration(config)
    else:
        model = kind.model(config)
    text_config = config.text_config if wrapped else config
    reference_head = ReferenceHead(kind, text_config, int(head)) if head else None
    for module in (model, reference_head):
        if module is not None:
            randomise(module.eval(), generator)
            if kind.plain_arch:
                _centre_norms_on_one(module, kind.norm)
    tiny = Tiny(folder, model, reference_head)
    found = tensors(tiny, experts)
    if rope_factors is not None:
        model.model.rotary_emb.inv_freq.div_(rope_factors)
        found["rope_freqs.weight"] = rope_factors
    write(folder, config.to_dict(), found)
    return tiny


@torch.no_grad()
def _centre_norms_on_one(module: nn.Module, norm: Any) -> None:
    for part in module.modules():
        if isinstance(part, norm):
            part.weight.add_(1.0)


@torch.no_grad()
def randomise(module: nn.Module, generator: torch.Generator) -> None:
    for name, weight in module.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if name.endswith("A_log"):
            weight.copy_((torch.rand(weight.shape, generator=generator) * 3.0 + 0.02).log())
        elif name.endswith("linear_attn.norm.weight"):
            weight.copy_(1.0 + 0.3 * noise)
        elif weight.dim() == 1:  # norms (zero-centred), biases, dt_bias
            weight.copy_(0.3 * noise)
        elif "embed_tokens" in name:
            weight.copy_(0.5 * noise)
        else:
            weight.copy_(noise * (0.7 / weight.shape[-1] ** 0.5))


def tensors(tiny: Tiny, experts: str = "fused") -> dict[str, Tensor]:
    """Everything of a checkpoint by its usual name on disk."""
    found = dict(tiny.model.state_dict())
    if tiny.model.config.tie_word_embeddings:
        del found["lm_head.weight"]
    if tiny.head is not None:
        found |= {f"mtp.{name}": weight for name, weight in tiny.head.state_dict().items()}
    if experts == "apart":
        found = _experts_apart(found)
    return {name: weight.detach().clone().contiguous() for name, weight in found.items()}


def _experts_apart(found: dict[str, Tensor]) -> dict[str, Tensor]:
    apart = {}
    for name, weight in found.items():
        stem, _, kind = name.rpartition(".")
        if kind not in ("gate_up_proj", "down_proj"):
            apart[name] = weight
            continue
        for expert, matrix in enumerate(weight):
            parts = {"down_proj": matrix}
            if kind == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True))
            apart |= {f"{stem}.{expert}.{part}.weight": rows for part, rows in parts.items()}
    return apart


def write(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    """One model.safetensors and its config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")


def write_sharded(
    folder: Path, config: dict[str, Any], weights: dict[str, Tensor], num_shards: int = 3
) -> None:
    """Several shards, tensors dealt out in turn, and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    files = [f"model-{i + 1:05d}-of-{num_shards:05d}.safetensors" for i in range(num_shards)]
    names = sorted(weights)
    for i, file in enumerate(files):
        save_file({name: weights[name] for name in names[i::num_shards]}, folder / file)
    weight_map = {name: files[i % num_shards] for i, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def random_tokens(vocab_size: int, count: int, seed: int) -> list[int]:
    return torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
