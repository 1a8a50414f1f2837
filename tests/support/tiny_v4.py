"""Random tiny DeepSeek-V4 checkpoints under their names on disk: transformers' target, and a slow head from its
published definition, which reads every pair again for each draft.

Shape letters: N pairs, S streams, D hidden size, H heads, E experts.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4ForCausalLM

from support.tiny import write

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "num_attention_heads": 4,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 24,
    "o_groups": 2,
    "o_lora_rank": 12,
    "sliding_window": 10,
    "compress_ratios": [0, 4, 128],
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 4,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "num_hash_layers": 1,
    "max_position_embeddings": 1024,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "swiglu_limit": 0.6,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "num_nextn_predict_layers": 1,
}
"""Limits are so low that some gates and ups reach them."""
DISK = (
    (r"^model\.", ""),
    (r"^embed_tokens\.", "embed."),
    (r"^lm_head\.", "head."),
    (r"\bhc_head\.hc_", "hc_head_"),
    (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.compressor\.indexer\.scorer\.", ".indexer."),
    (r"\.compressor\.indexer\.q_b_proj\.", ".indexer.wq_b."),
    (r"\.compressor\.indexer\.", ".indexer.compressor."),
    (r"(compressor)\.kv_norm\.", r"\1.norm."),
    (r"\.position_bias$", ".ape"),
    (r"\.sinks$", ".attn_sink"),
    (r"\.q_a_norm\.", ".q_norm."),
    (r"\.q_a_proj\.", ".wq_a."),
    (r"\.q_b_proj\.", ".wq_b."),
    (r"\.kv_proj\.", ".wkv."),
    (r"(compressor)\.gate_proj\.", r"\1.wgate."),
    (r"\.o_([ab])_proj\.", r".wo_\1."),
    (r"\.self_attn\.", ".attn."),
    (r"\.mlp\.", ".ffn."),
    (r"\.e_score_correction_bias$", ".bias"),
    (r"\.gate_proj\.", ".w1."),
    (r"\.down_proj\.", ".w2."),
    (r"\.up_proj\.", ".w3."),
)
"""What transformers' names are on disk, in this order."""


class SlowHead:
    """One head by its tensors on disk, without the `mtp.0.`."""

    def __init__(self, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
        self.c, self.w = config, weights

    def __call__(self, embedding_ND: Tensor, streams_NX: Tensor) -> Tensor:
        """What it says of all pairs, as streams side by side: what the next draft recycles."""
        c, w = self.c, self.w
        h = streams_NX.unflatten(1, (c["hc_mult"], -1))
        token = F.linear(self._norm(embedding_ND, "enorm.weight"), w["e_proj.weight"])
        x = F.linear(self._norm(h, "hnorm.weight"), w["h_proj.weight"]) + token[:, None]
        x = self._around(x, "attn", self._attention)
        return self._around(x, "ffn", self._experts).flatten(1)

    def finish(self, streams_NX: Tensor) -> Tensor:
        """What the lm_head takes."""
        x = streams_NX.unflatten(1, (self.c["hc_mult"], -1))
        mixes = self._mixes(x, "hc_head_fn") * self.w["hc_head_scale"] + self.w["hc_head_base"]
        return self._norm(((mixes.sigmoid() + self.c["hc_eps"])[..., None] * x).sum(1), "norm.weight")

    def _norm(self, x: Tensor, name: str | None) -> Tensor:
        x = x * (x.square().mean(-1, keepdim=True) + self.c["rms_norm_eps"]).rsqrt()
        return x if name is None else x * self.w[name]

    def _mixes(self, x: Tensor, name: str) -> Tensor:
        return F.linear(self._norm(x.flatten(1), None), self.w[name])

    def _around(self, x: Tensor, which: str, block: Any) -> Tensor:
        c, w, count = self.c, self.w, self.c["hc_mult"]
        eps, scale, base = c["hc_eps"], w[f"hc_{which}_scale"], w[f"hc_{which}_base"]
        pre, post, comb = self._mixes(x, f"hc_{which}_fn").split((count, count, count**2), -1)
        pre = (pre * scale[0] + base[:count]).sigmoid() + eps
        post = 2 * (post * scale[1] + base[count : 2 * count]).sigmoid()
        comb = (comb * scale[2] + base[2 * count :]).unflatten(1, (count, count)).softmax(-1) + eps
        comb = comb / (comb.sum(1, keepdim=True) + eps)
        for _ in range(c["hc_sinkhorn_iters"] - 1):
            comb = comb / (comb.sum(2, keepdim=True) + eps)
            comb = comb / (comb.sum(1, keepdim=True) + eps)
        out = block(self._norm((pre[..., None] * x).sum(1), f"{which}_norm.weight"))
        return post[..., None] * out[:, None] + torch.einsum("nkj,nkd->njd", comb, x)

    def _attention(self, x_ND: Tensor) -> Tensor:
        c, w, count = self.c, self.w, len(x_ND)
        heads, dim, groups = c["num_attention_heads"], c["head_dim"], c["o_groups"]
        lowered = self._norm(F.linear(x_ND, w["attn.wq_a.weight"]), "attn.q_norm.weight")
        q = self._norm(F.linear(lowered, w["attn.wq_b.weight"]).view(count, heads, dim), None)
        k = self._norm(F.linear(x_ND, w["attn.wkv.weight"]), "attn.kv_norm.weight")[:, None]
        q, k = self._turned(q, 1.0), self._turned(k, 1.0)[:, 0]
        scores = torch.einsum("nhd,md->hnm", q, k) * dim**-0.5
        place = torch.arange(count)
        seen = (place <= place[:, None]) & (place > place[:, None] - c["sliding_window"])
        scores = scores.masked_fill(~seen, -torch.inf)
        sinks = w["attn.attn_sink"].view(-1, 1, 1).expand(-1, count, 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        out = self._turned(torch.einsum("hnm,md->nhd", weights, k), -1.0).reshape(count, groups, -1)
        inner = torch.einsum("ngi,goi->ngo", out, w["attn.wo_a.weight"].unflatten(0, (groups, -1)))
        return F.linear(inner.flatten(1), w["attn.wo_b.weight"])

    def _turned(self, x_NHD: Tensor, way: float) -> Tensor:
        """The last numbers of each head as complex ones, turned by the pair's position."""
        size = self.c["qk_rope_head_dim"]
        frequency = self.c["rope_theta"] ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
        angle = way * torch.arange(len(x_NHD), dtype=torch.float64)[:, None, None] * frequency
        plain, rotary = x_NHD.split((x_NHD.shape[-1] - size, size), -1)
        pairs = torch.view_as_complex(rotary.double().unflatten(-1, (-1, 2)).contiguous())
        turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)
        return torch.cat([plain, turned.to(x_NHD.dtype)], -1)

    def _experts(self, x_ND: Tensor) -> Tensor:
        c, w = self.c, self.w
        scores = F.softplus(F.linear(x_ND, w["ffn.gate.weight"])).sqrt()
        chosen = (scores + w["ffn.gate.bias"]).topk(c["num_experts_per_tok"]).indices
        weights = scores.gather(1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * c["routed_scaling_factor"]
        out = self._expert(x_ND, "shared_experts")
        for n in range(len(x_ND)):
            for expert, share in zip(chosen[n], weights[n], strict=True):
                out[n] += share * self._expert(x_ND[n], f"experts.{int(expert)}")
        return out

    def _expert(self, x: Tensor, name: str) -> Tensor:
        limit, w = self.c["swiglu_limit"], self.w
        gate = F.linear(x, w[f"ffn.{name}.w1.weight"]).clamp(max=limit)
        up = F.linear(x, w[f"ffn.{name}.w3.weight"]).clamp(-limit, limit)
        return F.linear(F.silu(gate) * up, w[f"ffn.{name}.w2.weight"])


@dataclass(frozen=True)
class TinyV4:
    """A checkpoint folder, and what it holds."""

    folder: Path
    model: Any
    heads: list[SlowHead]

    @property
    def vocab_size(self) -> int:
        return self.model.config.vocab_size

    @torch.no_grad()
    def forward(self, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """Hidden states after the final norm, and logits, of one sequence read at once."""
        hidden = self.model.model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
        return hidden, self.model.lm_head(hidden)

    @torch.no_grad()
    def streams(self, tokens: list[int]) -> Tensor:
        """The residual streams after the last layer, side by side."""
        found = {}
        hook = self.model.model.hc_head.register_forward_pre_hook(lambda _, x: found.update(x=x[0]))
        self.forward(tokens)
        hook.remove()
        return found["x"][0].flatten(1)

    @torch.no_grad()
    def pairs(self, next_tokens: list[int], streams_NX: Tensor, layer: int = 0) -> Tensor:
        """What a layer of the head says of the pairs (streams[i], next_tokens[i])."""
        embedding_ND = self.model.model.embed_tokens(torch.tensor(next_tokens))
        return self.heads[layer](embedding_ND, streams_NX)

    @torch.no_grad()
    def draft(self, out_X: Tensor, layer: int = 0) -> int:
        """The token that a pair's output foretells."""
        return int(self.model.lm_head(self.heads[layer].finish(out_X[None])).argmax())

    def double(self) -> "TinyV4":
        heads = [SlowHead(h.c, {name: weight.double() for name, weight in h.w.items()}) for h in self.heads]
        model = DeepseekV4ForCausalLM(self.model.config).eval().double()
        model.load_state_dict(self.model.state_dict())
        return TinyV4(self.folder, model, heads)


def make(folder: Path, *, seed: int = 0, head: bool | int = True, anew: bool = False, **sizes: Any) -> TinyV4:
    """Builds a random model, writes it and returns both. `anew` writes the target as transformers calls it."""
    torch.manual_seed(seed)
    described: dict[str, Any] = {**SIZES, **sizes}
    described["num_hidden_layers"] = len(described["compress_ratios"])
    config = DeepseekV4Config(**_for_transformers(described))
    config._experts_implementation = "eager"  # the grouped one takes only sizes that fill 16 bytes
    model = DeepseekV4ForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in (*model.named_parameters(), *model.named_buffers()):
            if "inv_freq" not in name:
                weight.copy_(_random(name, weight, config.num_local_experts))
    fields = config.to_dict() | described
    heads = [SlowHead(fields, _head(model, config, seed + n)) for n in range(int(head))]
    found = dict(model.state_dict()) if anew else _on_disk(model.state_dict())
    for n, one in enumerate(heads):
        found |= {f"mtp.{n}.{name}": weight for name, weight in one.w.items()}
        found[f"mtp.{n}.emb.tok_emb.weight"] = model.model.embed_tokens.weight
        found[f"mtp.{n}.head.weight"] = model.lm_head.weight
    ratios = list(described["compress_ratios"]) + [0] * int(head)
    written = (
        config.to_dict() if anew else described | {"compress_ratios": ratios, "model_type": "deepseek_v4"}
    )
    write(folder, written, {name: weight.detach().clone().contiguous() for name, weight in found.items()})
    return TinyV4(folder, model, heads)


def _for_transformers(described: dict[str, Any]) -> dict[str, Any]:
    """Its config wants to be told `rope_parameters`."""
    rope = dict(described["rope_scaling"])
    rope["rope_type"] = rope.pop("type")
    return {name: value for name, value in described.items() if name != "rope_scaling"} | {
        "rope_parameters": rope
    }


def _random(name: str, weight: Tensor, num_experts: int) -> Tensor:
    if name.endswith("tid2eid"):
        return torch.stack([torch.randperm(num_experts)[: weight.shape[1]] for _ in weight])
    noise = torch.randn(weight.shape)
    if name.endswith("norm.weight"):
        return 1.0 + 0.3 * noise
    if weight.dim() == 1 or name.endswith(("position_bias", "ape")):
        return 0.5 * noise
    return noise * (0.5 if "embed" in name else 0.9 / weight.shape[-1] ** 0.5)


def _on_disk(state: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for name, weight in state.items():
        stem, _, kind = name.rpartition(".")
        each = {name: weight}
        if kind in ("gate_up_proj", "down_proj"):
            each = {}
            for expert, matrix in enumerate(weight):
                parts = matrix.chunk(2) if kind == "gate_up_proj" else [matrix]
                names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
                each |= {f"{stem}.{expert}.{n}.weight": p for n, p in zip(names, parts, strict=True)}
        for one, tensor in each.items():
            for pattern, replacement in DISK:
                one = re.sub(pattern, replacement, one)
            found[one] = tensor
    return found


def _head(model: Any, config: Any, seed: int) -> dict[str, Tensor]:
    """Random tensors like those of a layer without entries, with what only a head has."""
    torch.manual_seed(1000 + seed)
    bias = torch.zeros(config.num_local_experts)
    like = _on_disk(model.state_dict()) | {"layers.0.ffn.gate.bias": bias}
    found = {
        name.removeprefix("layers.0."): weight
        for name, weight in like.items()
        if name.startswith("layers.0.") and not re.search("compressor|indexer|tid2eid", name)
    }
    size = config.hidden_size
    found |= {name: like[name] for name in ("hc_head_fn", "hc_head_base", "hc_head_scale")}
    found |= {f"{name}.weight": torch.empty(size) for name in ("enorm", "hnorm", "norm")}
    found |= {f"{name}.weight": torch.empty(size, size) for name in ("e_proj", "h_proj")}
    return {name: _random(name, weight, 0) for name, weight in found.items()}
