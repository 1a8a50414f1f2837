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
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.glm4_moe import modeling_glm4_moe as glm4_moe
from transformers.models.glm4_moe.configuration_glm4_moe import Glm4MoeConfig
from transformers.models.glm4_moe_lite import modeling_glm4_moe_lite as glm4_moe_lite
from transformers.models.glm4_moe_lite.configuration_glm4_moe_lite import Glm4MoeLiteConfig
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.llama import modeling_llama as llama
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.ministral import modeling_ministral as ministral
from transformers.models.ministral.configuration_ministral import MinistralConfig
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.mistral.configuration_mistral import MistralConfig
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config
from transformers.models.qwen3 import modeling_qwen3 as qwen3
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3_5 import modeling_qwen3_5 as dense
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config, Qwen3_5TextConfig
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as moe
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig

from support.tiny_heads import LayerHead, MimoHead, ReferenceHead

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
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
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
    is_plain: bool = False
    """Whether all layers are attention, with norms that are not stored around zero."""
    is_another: bool = False
    """Whether it is another family under another name, but for what its config may say."""
    arch: str | None = None
    """What GGUF files call plain models of this family."""
    model_type: str | None = None
    """What config.json calls it, where transformers has it under another name."""
    head: Any = None
    """Makes the head of a model, of its config and so many layers; None where it is that of Qwen3.5."""

    def make_head(self, model: Any, config: Any, num_layers: int) -> Any:
        if self.head is not None:
            return self.head(self, model, config, num_layers)
        return ReferenceHead(self.layer, self.norm, config, num_layers)


def _flash_head(model: Any, config: Any, count: int) -> LayerHead:
    """Its config does not say that it has a head."""
    config.num_mtp_layers, config.mtp_mlp_layer_types = count, ["sparse"] * count
    return LayerHead(model, count)


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
        LlamaConfig,
        llama.LlamaForCausalLM,
        llama.LlamaDecoderLayer,
        llama.LlamaRMSNorm,
        PLAIN_SIZES,
        is_plain=True,
        arch="llama",
    ),
    "mistral": _Family(
        MistralConfig,
        mistral.MistralForCausalLM,
        mistral.MistralDecoderLayer,
        mistral.MistralRMSNorm,
        PLAIN_SIZES | {"sliding_window": None},
        is_plain=True,
        arch="llama",
    ),
    "ministral": _Family(
        MinistralConfig,
        ministral.MinistralForCausalLM,
        ministral.MinistralDecoderLayer,
        ministral.MinistralRMSNorm,
        PLAIN_SIZES | {"head_dim": 12, "sliding_window": 9},
        is_plain=True,
        is_another=True,
    ),
    "qwen2": _Family(
        Qwen2Config,
        qwen2.Qwen2ForCausalLM,
        qwen2.Qwen2DecoderLayer,
        qwen2.Qwen2RMSNorm,
        PLAIN_SIZES,
        is_plain=True,
        arch="qwen2",
    ),
    "mimo": _Family(
        Qwen2Config,
        qwen2.Qwen2ForCausalLM,
        qwen2.Qwen2DecoderLayer,
        qwen2.Qwen2RMSNorm,
        PLAIN_SIZES | {"head_dim": 16},
        is_plain=True,
        model_type="mimo",
        head=lambda kind, _, config, count: MimoHead(kind.layer, kind.norm, config, count),
    ),
    "qwen3": _Family(
        Qwen3Config,
        qwen3.Qwen3ForCausalLM,
        qwen3.Qwen3DecoderLayer,
        qwen3.Qwen3RMSNorm,
        PLAIN_SIZES | {"head_dim": 16},
        is_plain=True,
        arch="qwen3",
    ),
    "qwen3_moe": _Family(
        Qwen3MoeConfig,
        qwen3_moe.Qwen3MoeForCausalLM,
        qwen3_moe.Qwen3MoeDecoderLayer,
        qwen3_moe.Qwen3MoeRMSNorm,
        PLAIN_SIZES
        | {
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        },
        is_plain=True,
        arch="qwen3moe",
    ),
    "glm4_moe": _Family(
        Glm4MoeConfig,
        glm4_moe.Glm4MoeForCausalLM,
        glm4_moe.Glm4MoeDecoderLayer,
        glm4_moe.Glm4MoeRMSNorm,
        PLAIN_SIZES
        | {
            "head_dim": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "routed_scaling_factor": 1.8,
            "attention_bias": True,
        },
        is_plain=True,
        arch="glm4moe",
        head=lambda _, model, __, count: LayerHead(model, count),
    ),
    "deepseek_v3": _Family(
        DeepseekV3Config,
        deepseek_v3.DeepseekV3ForCausalLM,
        deepseek_v3.DeepseekV3DecoderLayer,
        deepseek_v3.DeepseekV3RMSNorm,
        PLAIN_SIZES | LATENT | {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1},
        is_plain=True,
        arch="deepseek2",
        head=lambda _, model, __, count: LayerHead(model, count),
    ),
    "kimi_k2": _Family(
        DeepseekV3Config,
        deepseek_v3.DeepseekV3ForCausalLM,
        deepseek_v3.DeepseekV3DecoderLayer,
        deepseek_v3.DeepseekV3RMSNorm,
        PLAIN_SIZES | LATENT | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
        is_plain=True,
        arch="deepseek2",
        model_type="kimi_k2",
        head=lambda _, model, __, count: LayerHead(model, count),
    ),
    "glm4_moe_lite": _Family(
        Glm4MoeLiteConfig,
        glm4_moe_lite.Glm4MoeLiteForCausalLM,
        glm4_moe_lite.Glm4MoeLiteDecoderLayer,
        glm4_moe_lite.Glm4MoeLiteRMSNorm,
        PLAIN_SIZES | LATENT,
        is_plain=True,
        arch="deepseek2",
        head=lambda _, model, config, count: _flash_head(model, config, count),
    ),
    "gpt_oss": _Family(
        GptOssConfig,
        gpt_oss.GptOssForCausalLM,
        gpt_oss.GptOssDecoderLayer,
        gpt_oss.GptOssRMSNorm,
        PLAIN_SIZES
        | {
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "intermediate_size": 40,
            "sliding_window": 12,
        },
        is_plain=True,
        arch="gpt-oss",
    ),
}
PLAIN_FAMILIES = [name for name, family in FAMILIES.items() if family.is_plain and not family.is_another]
GGUF_FAMILIES = [name for name in PLAIN_FAMILIES if FAMILIES[name].arch is not None]


@dataclass(frozen=True)
class Tiny:
    """A checkpoint folder and what it holds, as transformers computes it."""

    folder: Path
    model: Any
    head: Any

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
        part = {} if kind.is_plain else {"partial_rotary_factor": rotary}
        rope = {"rope_type": "default", "rope_theta": 10000.0} | part
    config = kind.config(**fields, rope_parameters=rope)
    config._experts_implementation = "eager"  # the grouped one takes only sizes that fill 16 bytes
    model: Any
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
    reference_head = kind.make_head(model, text_config, int(head)) if head else None
    for module in (model, reference_head):
        if module is not None:
            randomise(module.eval(), generator)
            if kind.is_plain:
                _centre_norms_on_one(module, kind.norm)
            if kind.arch == "deepseek2":
                _one_eps(module, kind.norm, text_config.rms_norm_eps)
    tiny = Tiny(folder, model, reference_head)
    found = tensors(tiny, experts)
    if rope_factors is not None:
        model.model.rotary_emb.inv_freq.div_(rope_factors)
        found["rope_freqs.weight"] = rope_factors
    described = config.to_dict()
    write(folder, described | {"model_type": kind.model_type or described["model_type"]}, found)
    return tiny


@torch.no_grad()
def _centre_norms_on_one(module: nn.Module, norm: Any) -> None:
    for part in module.modules():
        if isinstance(part, norm):
            part.weight.add_(1.0)


def _one_eps(module: nn.Module, norm: Any, eps: float) -> None:
    """What transformers has inside latent attention is its class's default, whatever the config says."""
    for part in module.modules():
        if isinstance(part, norm):
            part.variance_epsilon = eps


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
    for name, buffer in module.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))


def tensors(tiny: Tiny, experts: str = "fused", *, head: bool = True) -> dict[str, Tensor]:
    """Everything of a checkpoint by its usual name on disk, the head's too if it is wanted."""
    found = dict(tiny.model.state_dict())
    if tiny.model.config.tie_word_embeddings:
        del found["lm_head.weight"]
    if tiny.head is not None and head:
        found |= tiny.head.tensors(tiny.text.config.num_hidden_layers)
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
