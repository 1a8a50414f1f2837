"""A layer stack as one native call: layers write down once what they do, and a step runs all of it.

What flows from instruction to instruction lies in a few buffers of float32 [tokens, …]: the residual stream, two that
take turns, and what the caller brings and gets. Knows native ops and state; no names of models.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from headlong.ops import native
from headlong.ops.delta_net.native import NativeDeltaNet
from headlong.ops.gated_attention.native import NativeGatedAttention
from headlong.ops.linear.native import NativeLinear
from headlong.ops.moe.native import NativeExperts
from headlong.ops.native_step import NativeStep
from headlong.ops.norm.native import NativeRmsNorm
from headlong.ops.rope.reference import Angles

NORM, MATMUL, SILU_MUL, DELTA_NET, ATTENTION, EXPERTS = range(6)
"""In the order of csrc/program.c."""
STREAM, FIRST, SECOND, RESULT, GIVEN = range(5)
"""Buffers. The stream is what the caller brings, and is written over; what else it brings is only read."""
NOWHERE = -1


class _Instruction(ctypes.Structure):
    """Mirrors `Instruction` in csrc/program.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("kind", "source", "to", "beside")),
        *((name, ctypes.c_int64) for name in ("size", "stride", "column", "add")),
        ("what", ctypes.c_void_p),
        ("eps", ctypes.c_double),
    )


Bind = Callable[[Mapping[str, Any], Angles], ctypes.Structure]


class Program:
    """Recorded by the methods that name an op; run by calling it. Bound to the state it is first run with."""

    def __init__(self) -> None:
        self._made: list[tuple[_Instruction, Bind | None]] = []
        self._widths = {FIRST: 0, SECOND: 0}
        self._kept: list[object] = []
        """What instructions point at."""
        self._structs: list[ctypes.Structure] = []
        self._bound: tuple[Mapping[str, Any], ctypes.Array[_Instruction]] | None = None
        self._kernel = native.kernel("headlong_run")

    def norm(self, norm: NativeRmsNorm, source: int, to: int, *, column: int = 0, stride: int = 0) -> None:
        """Into lines of `stride` from `column` on; by default lines hold nothing else."""
        self._kept.append(norm)
        size = len(norm.weight)
        weight = native.address(norm.weight)
        self._add(NORM, source, to, size, stride or size, column=column, what=weight, eps=norm.eps)

    def matmul(
        self,
        linear: NativeLinear,
        source: int,
        to: int,
        *,
        add: bool = False,
        only: Sequence[tuple[int, int]] = (),
    ) -> None:
        """`add`: to what is in the buffer. `only`: the outputs [first, last) that are wanted."""
        self._kept.append(linear)
        for panels in linear.panels:
            for first, last in only or [(0, linear.out_features)]:
                struct, column = panels.part(first, last)
                if struct.outs:
                    self._kept.append(struct)
                    what = ctypes.addressof(struct)
                    size, stride = struct.outs, linear.out_features
                    self._add(MATMUL, source, to, size, stride, column=column, add=add, what=what)

    def silu_mul(self, source: int, to: int, size: int) -> None:
        self._add(SILU_MUL, source, to, size, size)

    def delta_net(self, mix: NativeDeltaNet, name: str, source: int, to: int) -> None:
        """`name`: of the layer, by which its state is found."""

        def bind(states: Mapping[str, Any], angles: Angles) -> ctypes.Structure:  # noqa: ARG001
            return mix.bind(states[name].delta, states[name].windows)

        self._add(DELTA_NET, source, to, mix.out_features, mix.out_features, bind=bind)

    def attention(self, attend: NativeGatedAttention, name: str, source: int, to: int) -> None:
        """`to` NOWHERE: only keys and values are wanted."""

        def bind(states: Mapping[str, Any], angles: Angles) -> ctypes.Structure:
            return attend.bind(states[name].keys, states[name].values, angles.rotary_dim)

        self._add(ATTENTION, source, to, attend.out_features, attend.out_features, bind=bind)

    def experts(self, experts: NativeExperts, source: int, logits: int, to: int) -> None:
        """Added to what is in the buffer `to`; `logits` is the buffer of their gates' outputs."""
        self._kept.append(experts)
        size = experts.hidden_size
        self._add(EXPERTS, source, to, size, size, beside=logits, what=experts.address)

    def __call__(
        self,
        stream_ND: Tensor,
        step: NativeStep,
        angles: Angles,
        states: Mapping[str, Any],
        given_ND: Tensor | None = None,
        result_size: int = 0,
    ) -> Tensor:
        """What was left in RESULT, [N, `result_size`]."""
        if self._bound is None or self._bound[0] is not states:
            self._bound = (states, self._bind(states, angles))
        program, num_tokens = self._bound[1], stream_ND.shape[0]
        first, second = self._widths[FIRST], self._widths[SECOND]
        room = stream_ND.new_empty(num_tokens * (first + second))
        result = stream_ND.new_empty(num_tokens, result_size)
        buffers = (ctypes.c_void_p * 5)(
            native.address(stream_ND),
            room.data_ptr(),
            room.data_ptr() + num_tokens * first * room.element_size(),
            result.data_ptr(),
            None if given_ND is None else native.address(given_ND),
        )
        self._kernel(program, len(program), buffers, num_tokens, step.address(angles))
        return result

    def _add(
        self,
        kind: int,
        source: int,
        to: int,
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
        made = _Instruction(kind, source, to, beside, size, stride, column, add, what, eps)
        self._made.append((made, bind))
        if to in self._widths:
            self._widths[to] = max(self._widths[to], stride)

    def _bind(self, states: Mapping[str, Any], angles: Angles) -> "ctypes.Array[_Instruction]":
        program = (_Instruction * len(self._made))()
        self._structs = []
        for number, (instruction, bind) in enumerate(self._made):
            program[number] = instruction
            if bind is not None:
                struct = bind(states, angles)
                self._structs.append(struct)
                program[number].what = ctypes.addressof(struct)
        return program
