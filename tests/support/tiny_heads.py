"""MTP heads over a whole sequence of pairs, without a cache: slow, and made of transformers' own layers."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel


class ReferenceHead(nn.Module):
    """The head of Qwen3.5: norms and a join that all layers share, the embedding first."""

    hidden_first = False

    def __init__(self, layer: Any, norm: Any, config: Any, num_layers: int) -> None:
        super().__init__()
        config = copy.deepcopy(config)
        config.layer_types = ["full_attention"]
        config.mlp_only_layers, config.decoder_sparse_step = [], 1
        size, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding = norm(size, eps=eps)
        self.pre_fc_norm_hidden = norm(size, eps=eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([layer(config, 0) for _ in range(num_layers)])
        self.norm = norm(size, eps=eps)

    def forward(self, embedding: Tensor, hidden: Tensor, rotary: nn.Module, layer: int = 0) -> Tensor:
        """`embedding` and `hidden` are [pairs, hidden size]; pair i stands at position i. All are read by one layer."""
        pair = [self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)]
        x = self.fc(torch.cat(pair[::-1] if self.hidden_first else pair, -1))
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

    def tensors(self, num_main_layers: int) -> dict[str, Tensor]:  # noqa: ARG002 - numbered by itself
        """Everything of the head by its name on disk."""
        return {f"mtp.{name}": weight for name, weight in self.state_dict().items()}


MIMO_NAMES = {
    "pre_fc_norm_embedding": "token_layernorm",
    "pre_fc_norm_hidden": "hidden_layernorm",
    "fc": "input_proj",
    "norm": "final_layernorm",
}


class MimoHead(ReferenceHead):
    """The head of MiMo-7B: the hidden state first, and names of its own."""

    hidden_first = True

    def tensors(self, num_main_layers: int) -> dict[str, Tensor]:  # noqa: ARG002 - numbered by itself
        found = {}
        for name, weight in self.state_dict().items():
            module, _, kind = name.partition(".")
            disk = f"0.{MIMO_NAMES[module]}.{kind}" if module in MIMO_NAMES else kind
            found[f"model.mtp_layers.{disk}"] = weight
        return found


class LayerHead(nn.Module):
    """The head of GLM and DeepSeek, a layer after the last, as transformers has it: with the embedding and lm_head of
    the model, of which checkpoints have copies."""

    def __init__(self, model: Any, num_layers: int) -> None:
        super().__init__()
        self.mtp = MtpModel(model, num_layers)

    def forward(self, embedding: Tensor, hidden: Tensor, rotary: nn.Module, layer: int = 0) -> Tensor:  # noqa: ARG002 - its own
        """Positions are one further on than pairs are counted, as transformers counts them: nothing can tell."""
        positions = torch.arange(1 + layer, 1 + layer + len(embedding))[None]
        out = self.mtp.forward_layer(
            layer, hidden[None], positions, MtpCache(config=self.mtp.config), inputs_embeds=embedding[None]
        )
        return out[0]

    def tensors(self, num_main_layers: int) -> dict[str, Tensor]:
        state, found = self.mtp.state_dict(), {}
        for layer in range(len(self.mtp.layers)):
            prefix = f"model.layers.{num_main_layers + layer}."
            found[f"{prefix}embed_tokens.weight"] = state["embed_tokens.weight"]
            found[f"{prefix}shared_head.head.weight"] = state["shared_head.weight"]
            for name, weight in state.items():
                if name.startswith(f"layers.{layer}."):
                    inner = name.removeprefix(f"layers.{layer}.").removeprefix("mtp_block.")
                    found[
                        prefix + inner.replace("post_norm.", "shared_head.norm.", inner.startswith("post_"))
                    ] = weight
        return found
