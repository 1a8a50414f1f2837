"""Triton's interpreter with less to do between a kernel's lines, and with products as a GPU makes them.

Whenever one function of a kernel calls another it replaces the functions of Triton's language anew, though the launch
has replaced them already; and it builds a table of all dtypes whenever it looks one up. Together that is two fifths of
what a test in the interpreter takes.

Its products are BLAS's. Those of some CPUs (OpenBLAS on AVX2) have other bits at other places of the same tile, which
no GPU's have, and would fail every test that compares bits. Here a row's product has the same bits at every place.
"""

from functools import cache
from typing import Any

import numpy as np


def improve() -> None:
    """From now on, in this process."""
    from triton.runtime import interpreter

    _replace_once(interpreter)
    _keep_dtypes(interpreter)
    _multiply_evenly(interpreter)


def _replace_once(interpreter: Any) -> None:
    """The functions of the language are replaced once for every launch."""
    modules, launch, replace = (
        (interpreter.tl, interpreter.tl.core),
        interpreter.GridExecutor.__call__,
        interpreter._patch_lang,
    )
    replaced: set[int] = set()
    """Which modules of the language this launch has replaced the functions of."""

    @cache
    def known(function: Any) -> frozenset[int]:
        """The modules that a kernel or a function of it knows."""
        return frozenset(
            {id(value) for value in function.__globals__.values()} & {id(each) for each in modules}
        )

    def replace_once(function: Any) -> Any:
        """Returns what undoes it, as only the launch wants it, whose own call is the first."""
        if known(function) <= replaced:
            return None
        replaced.update(known(function))
        return replace(function)

    def launch_anew(executor: Any, *args: Any, **options: Any) -> Any:
        replaced.clear()
        try:
            return launch(executor, *args, **options)
        finally:
            replaced.clear()

    interpreter.GridExecutor.__call__, interpreter._patch_lang = launch_anew, replace_once


def _keep_dtypes(interpreter: Any) -> None:
    language, dtype_of = interpreter.tl, interpreter._get_np_dtype
    table: dict[str, Any] = {}

    def dtype_in_table(wanted: Any) -> Any:
        scalar = wanted.element_ty if isinstance(wanted, language.block_type) else wanted
        if isinstance(scalar, language.pointer_type):
            return dtype_of(scalar)
        if scalar.name not in table:
            table[scalar.name] = dtype_of(scalar)
        return table[scalar.name]

    interpreter._get_np_dtype = dtype_in_table


def _multiply_evenly(interpreter: Any) -> None:
    """Column by column, so that every element of a product is the same sum of products in the same order."""
    float16 = interpreter.tl.float16

    def numbers(operand: Any) -> Any:
        if operand.dtype.primitive_bitwidth != 8 or not operand.dtype.is_floating():
            return operand.data
        return interpreter._convert_float(operand.data, operand.dtype, float16, None).view(np.float16)

    def dot(_builder: Any, a: Any, b: Any, added: Any, *_precision: Any) -> Any:
        dtype = added.data.dtype
        left, right = numbers(a).astype(dtype), numbers(b).astype(dtype)
        total = np.zeros_like(added.data)
        for k in range(left.shape[-1]):
            total += left[..., :, k, None] * right[..., k, None, :]
        return interpreter.TensorHandle(total + added.data, added.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = dot


def round_bfloat16(monkeypatch: Any) -> None:
    """Triton's interpreter holds bfloat16 as whole numbers: it would multiply those, and cuts instead of rounding."""
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    dot, convert = interpreter.InterpreterBuilder.create_dot, interpreter._convert_float

    def rounding(x: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(x, source, target, mode)
        return torch.tensor(x).bfloat16().view(torch.uint16).numpy()

    def widened(x: Any) -> Any:
        return (
            x if x.dtype.scalar != tl.bfloat16 else interpreter.interpreter_builder.cast_impl(x, tl.float32)
        )

    monkeypatch.setattr(interpreter, "_convert_float", rounding)
    monkeypatch.setattr(
        interpreter.InterpreterBuilder,
        "create_dot",
        lambda self, a, b, *rest: dot(self, widened(a), widened(b), *rest),
    )
