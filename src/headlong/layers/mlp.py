"""The feed-forward half of a layer: dense, or experts with a shared one."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headlong.layers.weights import Scope
from headlong.ops import program
from headlong.ops.linear.linear import Shard
from headlong.ops.moe.routing import Routing
from headlong.ops.moe.weights import ExpertWeights, MoeWeights
from headlong.ops.norm.normed import Norm, Normed
from headlong.ops.program import FIRST, SECOND, STREAM, Instruction
from headlong.ops.silu_mul.activation import SILU, Activation
from headlong.ops.silu_mul.swiglu import SwiGlu


class Mlp:
    """down(silu(gate x) · up x)"""

    def __init__(self, swiglu: SwiGlu) -> None:
        self.swiglu = swiglu

    @classmethod
    def load(cls, hidden_size: int, intermediate_size: int, scope: Scope, *, bias: bool = False) -> "Mlp":
        parts = (("gate_proj", intermediate_size), ("up_proj", intermediate_size))
        gate_up = scope.stacked(*parts, in_features=hidden_size, bias=bias, shard=Shard.OUTPUT)
        down = scope.linear("down_proj", hidden_size, intermediate_size, bias=bias, shard=Shard.INPUT)
        return cls(scope.ops.swiglu(gate_up, down))

    def add_to(self, normed: Normed, to_ND: Tensor, then: Norm) -> tuple[Tensor, Normed]:
        """Added to `to_ND`, and what `then` makes of that."""
        return self.swiglu.add_to(normed, to_ND, then)

    def instructions(self) -> list[Instruction]:
        """This layer, from the buffer FIRST, added to the stream."""
        gate_up, down = self.swiglu.gate_up, self.swiglu.down
        return [
            program.Gemm(gate_up, FIRST, SECOND),
            program.SiluMul(SECOND, FIRST, down.in_features),
            program.Gemm(down, FIRST, STREAM, add=True),
        ]


@dataclass(frozen=True)
class MoeConfig:
    hidden_size: int
    routing: Routing
    intermediate_size: int
    shared_intermediate_size: int = 0
    """The size of what every token is routed to, as one expert; 0 where there is none."""
    shared_gate: bool = False
    """Whether the shared expert stands behind a gate of its own."""
    has_bias: bool = False
    """Whether a bias is added to scores before experts are chosen."""
    activation: Activation = SILU
    """What every expert computes of gates and ups, the shared one too."""
    biased: bool = False
    """Whether the router and the routed experts have biases."""

    @property
    def num_experts(self) -> int:
        return self.routing.num_experts

    @property
    def num_active(self) -> int:
        return self.routing.num_active


class MoeMlp:
    """The routed experts' sum, plus the shared expert."""

    def __init__(self, config: MoeConfig, scope: Scope, table_size: int | None = None) -> None:
        """With a `table_size`, each of so many tokens of the vocabulary has experts of its own, which a table lists."""
        self.config = c = config
        self.table_VA = None
        routing = c.routing
        if table_size is not None:
            self.table_VA = scope.indices("gate.tid2eid", table_size, c.num_active, below=c.num_experts)
            routing = replace(routing, given=True)
        gates = [("gate", c.num_experts), *([("shared_expert_gate", 1)] if c.shared_gate else [])]
        self.gates = scope.stacked(*gates, in_features=c.hidden_size, bias=c.biased, shard=Shard.NONE)
        size, shared = c.shared_intermediate_size, None
        if size:
            shared = _expert(c.hidden_size, size, scope("shared_expert"))
        weights = MoeWeights(
            routing=routing,
            load=(_biased_experts if c.biased else _experts)(c, scope("experts")),
            shared=shared,
            shared_gate=c.shared_gate,
            bias_E=self._bias(scope) if c.has_bias and not routing.given else None,
            shards=(Shard.OUTPUT, Shard.INPUT),
            activation=c.activation,
        )
        self.experts = scope.ops.experts(weights)
        self.shared = None
        if shared is not None and not self.experts.has_shared:
            self.shared = scope.ops.expert(shared, weights.shards, c.activation)

    def _bias(self, scope: Scope) -> Tensor:
        return scope.vector("gate.e_score_correction_bias", self.config.num_experts)

    def add_to(
        self, normed: Normed, to_ND: Tensor, then: Norm, tokens_N: Tensor | None = None
    ) -> tuple[Tensor, Normed]:
        """Added to `to_ND`, and what `then` makes of that. `tokens_N` are for the table, if there is one."""
        logits_NR = self.gates(normed)
        shared_ND = None if self.shared is None else self.shared(normed)
        chosen_NA = None
        if self.table_VA is not None:
            assert tokens_N is not None, "experts are looked up by the tokens"
            chosen_NA = self.table_VA[tokens_N]
        return self.experts(normed, logits_NR, shared_ND, to_ND, then, chosen_NA)

    def output(self, normed: Normed, like_ND: Tensor, tokens_N: Tensor | None) -> Tensor:
        """The layer's output by itself, in the dtype and the shape of a residual."""
        return self.add_to(normed, torch.zeros_like(like_ND), _as_it_is, tokens_N)[0]

    def instructions(self) -> list[Instruction]:
        """This layer, from the buffer FIRST, added to the stream."""
        return [
            program.Gemm(self.gates, FIRST, SECOND),
            program.Experts(self.experts, FIRST, SECOND, STREAM),
        ]


def _as_it_is(x_ND: Tensor) -> Tensor:
    """The norm of what nothing follows."""
    return x_ND


def _experts(c: MoeConfig, scope: Scope) -> Callable[[int], ExpertWeights]:
    """Stored one by one, or all in one tensor: gate and up in one, or apart."""
    hidden, size = c.hidden_size, c.intermediate_size
    if any(scope.has(f"{expert}.gate_proj.weight") for expert in range(c.num_experts)):
        return lambda expert: _expert(hidden, size, scope(str(expert)))
    if scope.has("gate_proj.weight"):
        gate = scope.experts("gate_proj.weight", c.num_experts, size, hidden)
        up = scope.experts("up_proj.weight", c.num_experts, size, hidden)
        gate_up = [list(pair) for pair in zip(gate, up, strict=True)]
        down = scope.experts("down_proj.weight", c.num_experts, hidden, size)
    else:
        gate_up = [[weight] for weight in scope.experts("gate_up_proj", c.num_experts, 2 * size, hidden)]
        down = scope.experts("down_proj", c.num_experts, hidden, size)
    return lambda expert: ExpertWeights(gate_up[expert], down[expert])


def _biased_experts(c: MoeConfig, scope: Scope) -> Callable[[int], ExpertWeights]:
    """Biases are stored beside the weights of all experts, or of each."""
    load, count, size, biases = _experts(c, scope), c.num_experts, c.intermediate_size, []
    for projection, outs in (("gate_proj", size), ("up_proj", size), ("down_proj", c.hidden_size)):
        if scope.has(f"0.{projection}.bias"):
            each = [scope.vector(f"{expert}.{projection}.bias", outs) for expert in range(count)]
            biases.append(torch.stack(each))
        elif scope.has(f"{projection}.bias"):
            biases.append(scope.vector(f"{projection}.bias", count, outs))
    if len(biases) == 3:
        gate_up, down = torch.cat(biases[:2], 1), biases[2]
    else:
        gate_up = scope.vector("gate_up_proj_bias", count, 2 * size)
        down = scope.vector("down_proj_bias", count, c.hidden_size)
    return lambda expert: load(expert)._replace(gate_up_bias=gate_up[expert], down_bias=down[expert])


def _expert(hidden: int, size: int, scope: Scope) -> ExpertWeights:
    gate_up = scope.weights(("gate_proj", size), ("up_proj", size), in_features=hidden)
    return ExpertWeights(gate_up, scope.matrix("down_proj", hidden, size))
