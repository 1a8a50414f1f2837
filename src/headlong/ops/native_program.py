"""A layer stack as one native call: its instructions as csrc/program.c takes them, bound to the state they run with."""

import ctypes
from collections.abc import Callable, Iterable, Mapping
from typing import cast

from torch import Tensor

from headlong.ops import native, program
from headlong.ops.delta_net.native import NativeDeltaNet
from headlong.ops.gated_attention.native import NativeGatedAttention
from headlong.ops.interfaces import DeltaNetMemory, KvPages, LatentPages
from headlong.ops.latent_attention.native import NativeLatentAttention
from headlong.ops.linear.native import NativeLinear
from headlong.ops.moe.native import NativeExperts
from headlong.ops.native_step import NativeStep
from headlong.ops.norm.native import NativeRmsNorm
from headlong.ops.prepared import PreparedStep
from headlong.ops.program import FIRST, RESULT, SECOND, THIRD, Buffer, Instruction
from headlong.ops.rope.reference import Angles

NORM, MATMUL, SILU_MUL, DELTA_NET, ATTENTION, EXPERTS, LATENT_ATTENTION = range(7)
"""The numbers of the instructions, as in csrc/program.c."""
NOWHERE = -1


class _Instruction(ctypes.Structure):
    """Mirrors `Instruction` in csrc/program.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("kind", "input", "output", "second_input")),
        *((name, ctypes.c_int64) for name in ("size", "stride_out", "first_column", "add")),
        ("operand", ctypes.c_void_p),
        ("eps", ctypes.c_double),
    )


States = Mapping[str, object]
"""The states of the layers, by the layers' names; a layer's spec allocated what its ops take."""
Bind = Callable[[States, Angles], ctypes.Structure]


class NativeProgram:
    """A layer stack compiled by `of` and run by calling it. It is bound to the state that it is first run with."""

    def __init__(self) -> None:
        self._made: list[tuple[_Instruction, Bind | None]] = []
        self._widths = dict.fromkeys(Buffer, 0)
        """The width of a line in each buffer that is made here."""
        self._kept: list[object] = []
        """Weights and structures that instructions point at, kept alive."""
        self._structs: list[ctypes.Structure] = []
        self._bound: tuple[States, ctypes.Array[_Instruction]] | None = None
        self._kernel = native.kernel("headlong_run")

    @classmethod
    def of(cls, instructions: Iterable[Instruction]) -> "NativeProgram | str":
        """Compiles the instructions, or returns the reason why they must be run one by one."""
        made = cls()
        for instruction in instructions:
            reason = made._take(instruction)
            if reason is not None:
                return reason
        return made

    def _take(self, instruction: Instruction) -> str | None:
        """Appends an instruction. Returns the reason where it cannot be part of a native program, else None."""
        match instruction:
            case program.Norm(NativeRmsNorm() as norm):
                self._norm(norm, instruction)
            case program.Gemm(NativeLinear() as linear):
                self._gemm(linear, instruction)
            case program.SiluMul(source, to, size):
                self._add(SILU_MUL, source, to, size, size)
            case program.DeltaNet(NativeDeltaNet() as core, layer, source, to):
                self._delta_net(core, layer, source, to)
            case program.Attention(NativeGatedAttention() as core, layer, source, to):
                self._attention(core, layer, source, to)
            case program.LatentAttention(NativeLatentAttention() as core, layer):
                self._latent_attention(core, layer, instruction)
            case program.Experts(NativeExperts() as experts, source, logits, to):
                self._kept.append(experts)
                size = experts.hidden_size
                self._add(EXPERTS, source, to, size, size, beside=logits, what=experts.address)
            case _:
                return f"a {type(instruction).__name__} that is not native"
        return None

    def _norm(self, norm: NativeRmsNorm, how: program.Norm) -> None:
        self._kept.append(norm)
        size, weight = len(norm.weight), native.address(norm.weight)
        stride = how.stride or size
        self._add(NORM, how.source, how.to, size, stride, column=how.column, what=weight, eps=norm.eps)

    def _gemm(self, linear: NativeLinear, how: program.Gemm) -> None:
        self._kept.append(linear)
        for panels in linear.panels:
            for first, last in how.only or [(0, linear.out_features)]:
                struct, column = panels.part(first, last)
                if struct.num_outs:
                    self._kept.append(struct)
                    size, stride, what = struct.num_outs, linear.out_features, ctypes.addressof(struct)
                    self._add(MATMUL, how.source, how.to, size, stride, column=column, add=how.add, what=what)

    def _delta_net(self, core: NativeDeltaNet, layer: str, source: Buffer, to: Buffer) -> None:
        def bind(states: States, angles: Angles) -> ctypes.Structure:  # noqa: ARG001
            state = cast(DeltaNetMemory, states[layer])
            return core.bind(state.delta, state.windows)

        self._add(DELTA_NET, source, to, core.out_features, core.out_features, bind=bind)

    def _attention(self, core: NativeGatedAttention, layer: str, source: Buffer, to: Buffer | None) -> None:
        def bind(states: States, angles: Angles) -> ctypes.Structure:
            state = cast(KvPages, states[layer])
            return core.bind(state.keys, state.values, angles.rotary_dim)

        self._add(ATTENTION, source, to, core.out_features, core.out_features, bind=bind)

    def _latent_attention(
        self, core: NativeLatentAttention, layer: str, how: program.LatentAttention
    ) -> None:
        def bind(states: States, angles: Angles) -> ctypes.Structure:  # noqa: ARG001
            return core.bind(cast(LatentPages, states[layer]).latents)

        size, queries = core.out_features, NOWHERE if how.queries is None else how.queries
        self._add(LATENT_ATTENTION, how.given, how.to, size, size, beside=queries, bind=bind)

    def __call__(
        self,
        stream_ND: Tensor,
        step: PreparedStep,
        angles: Angles,
        states: States,
        given_ND: Tensor | None = None,
    ) -> Tensor:
        assert isinstance(step, NativeStep)
        if self._bound is None or self._bound[0] is not states:
            self._bound = (states, self._bind(states, angles))
        instructions, num_tokens = self._bound[1], stream_ND.shape[0]
        widths = [self._widths[buffer] for buffer in (FIRST, SECOND, THIRD)]
        scratch = stream_ND.new_empty(num_tokens * sum(widths))
        first, second, third = (
            scratch.data_ptr() + num_tokens * sum(widths[:before]) * scratch.element_size()
            for before in range(3)
        )
        result = stream_ND.new_empty(num_tokens, self._widths[RESULT])
        buffers = (ctypes.c_void_p * len(Buffer))(
            native.address(stream_ND),
            first,
            second,
            result.data_ptr(),
            None if given_ND is None else native.address(given_ND),
            third,
        )
        self._kernel(instructions, len(instructions), buffers, num_tokens, step.address(angles))
        return result

    def _add(
        self,
        kind: int,
        source: Buffer,
        to: Buffer | None,
        size: int,
        stride: int,
        *,
        beside: int = NOWHERE,
        column: int = 0,
        add: bool = False,
        what: int | None = None,
        eps: float = 0.0,
        bind: Bind | None = None,
    ) -> None:
        place = NOWHERE if to is None else to
        made = _Instruction(kind, source, place, beside, size, stride, column, add, what, eps)
        self._made.append((made, bind))
        if to is not None:
            self._widths[to] = max(self._widths[to], stride)

    def _bind(self, states: States, angles: Angles) -> "ctypes.Array[_Instruction]":
        bound = (_Instruction * len(self._made))()
        self._structs = []
        for number, (instruction, bind) in enumerate(self._made):
            bound[number] = instruction
            if bind is not None:
                struct = bind(states, angles)
                self._structs.append(struct)
                bound[number].operand = ctypes.addressof(struct)
        return bound
