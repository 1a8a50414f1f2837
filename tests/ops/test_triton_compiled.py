"""What the compiler makes of a product's loop, which no result tells: the first weights are asked for before the wait,
inputs after it; and of small kernels: all that they read is on its way before they wait for any of it. And that it
compiles what penalises and samples tokens, and the former just as it is written. For a GPU that need not be there, in a
process that does not interpret."""

import json
import os
import re
import subprocess
import sys

import pytest

COMPILE = """
import json, subprocess, sys, tempfile
from pathlib import Path
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from headlong.ops import triton_launch
triton_launch.HAS_PDL = tl.constexpr(True)
from headlong.ops.delta_net import triton_kernels as delta_net
from headlong.ops.draw import triton_sample as sampling
from headlong.ops.linear import triton_paired as beside
from headlong.ops.linear import triton_gemm as linear
from headlong.ops.linear import triton_split_k as pieces
from headlong.ops.moe import triton_kernels as moe
from headlong.ops.penalise import triton as penalise

EVEN = ("num_outs", "num_ins", "scale_stride", "expert_scales", "num_columns", "row_stride", "expert_stride")

def made(kernel, pointers, options={}, **constants):
    names = kernel.arg_names
    types = {n: pointers.get(n, "constexpr" if n in constants else "i32") for n in names}
    types |= {n: "fp32" for n in ("eps", "length_eps") if n in types and n not in constants}
    even = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in pointers or n in EVEN}
    source = ASTSource(kernel, signature=types, constexprs=constants, attrs=even)
    options = {"num_warps": 4, "num_stages": 3, **triton_launch.LAUNCH_OPTIONS, "launch_pdl": True, **options}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm

def machine_code(*args, **constants):
    "What the last of the compilers has made of it, which moves loads about as well."
    disassembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made(*args, **constants)["cubin"])
        file.flush()
        return subprocess.run([disassembler, "-sass", file.name], capture_output=True, text=True, check=True).stdout

def compiled(kernel, pointers, options={}, **constants):
    asm = made(kernel, pointers, options, **constants)
    return asm["ttgir"] + (asm["ptx"] if options else "")

missing = dict.fromkeys(("offsets", "row_scales", "bias", "residual", "columns"))
cut = {"DTYPE": tl.bfloat16, "ZERO": 0, "EVEN": True, "PARTS": 1, "B": 64, "squares": None, "LENGTH": 1}
kinds = {
    "bfloat16": (
        {"codes": "*bf16"},
        {"scales": None, "CODE": 0, "HALVES": 1, "TOGETHER": 1, "GROUP": 0, "ROWS": 1, "C": 128},
    ),
    "fp8": (
        {"codes": "*i16", "scales": "*fp32"},
        {"CODE": 1, "HALVES": 2, "TOGETHER": 64, "GROUP": 128, "ROWS": 128, "C": 64},
    ),
}
found = {}
for name, (weights, kind) in kinds.items():
    for width in (8, 16):
        found[f"linear {name} {width}"] = compiled(
            linear.multiply, {"x_ND": "*bf16", "out": "*fp32", **weights}, **missing, **cut, **kind,
            WHOLE=False, KNOWN=False, M=width,
        )
    found[f"linear {name} known"] = compiled(
        linear.multiply, {"x_ND": "*bf16", "out": "*fp32", **weights}, **missing, **cut, **kind,
        WHOLE=False, KNOWN=True, M=8,
    )
    for known in (False, True):
        pointers = {"x": "*bf16", "places": "*i32", "pairs": "*i32", "out": "*fp32", **weights}
        args = {"offsets": None, "row_scales": None, **cut, **kind, "SHARING": 1, "ONE": False, "M": 16}
        found[f"experts {name} {known}"] = compiled(moe.multiply, pointers, KNOWN=known, **args)
        found[f"place {name} {known}"] = machine_code(moe.multiply, pointers, KNOWN=known, **args)
weights, kind = kinds["fp8"]
pointers = {"x_ND": "*bf16", "out": "*fp32", "floats": "*bf16", "float_out": "*fp32", **weights}
sizes = {n: v for n, v in {**cut, **kind}.items() if n in beside._multiply.arg_names}
found["beside"] = compiled(
    beside._multiply, pointers, offsets=None, row_scales=None, **sizes, M=8,
    FLOAT_EVEN=True, FLOAT_B=64, FLOAT_C=64, FLOAT_M=16,
)
of_sums = {"pieces": "*fp32", "squares": "*fp32", "out": "*fp32", "columns": "*i32"}
evenly = {"B": 64, "PIECES": 4, "EVENLY": True, "LENGTH": 32}
found["sums of pieces"] = machine_code(
    pieces.add_pieces, of_sums, bias=None, residual=None, **dict.fromkeys(("norm_weight", "normed", "normed_squares")),
    **evenly, WIDTH=256,
)
found["sums of two"] = machine_code(
    beside._add_pieces, {**of_sums, "float_pieces": "*fp32", "float_columns": "*i32"}, bias=None, **evenly,
    FLOAT_B=64, FLOAT_PIECES=8, FLOAT_EVENLY=True, WIDTH=256,
)
given = ("projected", "windows", "inputs", "drafts", "norm", "found", "gates", "out", "squares")
found["sums of gates"] = machine_code(
    delta_net.finish, {**dict.fromkeys(given, "*fp32"), "table": "*i32"}, {"num_warps": 1}, **evenly,
    KEY_HEADS=4, H=8, D=128, E=128, TAPS=4, WINDOW=8, MAX_DRAFTS=4, PARTS=4, POW_E=128, POW_X=512, POW_W=8, BLOCK_C=64,
)
counted = {"counts": "*i32", "weights": "*i64", "numbers": "*i32", "orders": "*i64"}
cuts = {"filters": "*fp64", "keys": "*i64", "cuts": "*i64", "floors": "*fp64", "indices": "*i32"}
given = {"logits": "*fp32", "tops": "*fp32", "leasts": "*fp32", **counted, **cuts}
sizes = {"BITS": 18, "SCALE": 2.0**44, "BLOCK": sampling.BLOCK, "PARTS": 128, "CLEARED": 32}
for name in ("_begin", "_count", "_list", "_cut", "_draw_of_part"):
    kernel = getattr(sampling, name)
    pointers = {n: t for n, t in given.items() if n in kernel.arg_names}
    if name == "_draw_of_part":
        pointers["tops"] = "*fp64"
    found[f"sample {name}"] = compiled(
        kernel, pointers, **{n: size for n, size in sizes.items() if n in kernel.arg_names}
    )
given = {"logits": "*fp32", "changes": "*fp64", "biases": "*fp32", "drafts": "*i64", "out": "*fp32"}
given |= {"slots_R": "*i64", "settled_R": "*i64", "chosen_N": "*i64", "counts": "*i32"}
sizes = {"COUNTS": True, "BIASES": True, "BLOCK": penalise.BLOCK, "WIDTH": 4}
for name in ("_penalise", "_count"):
    kernel = getattr(penalise, name)
    found[f"penalise {name}"] = compiled(
        kernel, {n: t for n, t in given.items() if n in kernel.arg_names}, penalise.UNFUSED,
        **{n: size for n, size in sizes.items() if n in kernel.arg_names},
    )
json.dump(found, sys.stdout)
"""
SMALLER = """
import json, sys
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from headlong.ops import triton_launch
triton_launch.HAS_PDL = tl.constexpr(False)
from headlong.ops.linear import triton_gemm, triton_weight, triton_unpack
from headlong.ops.linear.triton_weight import Kind
from headlong.ops.linear.triton_block_m import WIDTHS, some_matrix

MEMORY, calls = int(sys.argv[1]), []

class Recorder:
    def __getitem__(self, grid):
        return lambda *args, **given: calls.append((args, given))

triton_weight.multiply, triton_weight.memory_of = Recorder(), lambda device: MEMORY
POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int16: "*i16", torch.uint8: "*u8"}
LAUNCH_OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion", "launch_pdl")

def memory(args, given):
    names = triton_gemm.multiply.arg_names
    passed = dict(zip(names, args)) | {n: v for n, v in given.items() if n not in LAUNCH_OPTIONS}
    constants = {n: v for n, v in passed.items() if v is None or n.isupper()}
    types = {n: POINTERS[v.dtype] if isinstance(v, torch.Tensor) else "i32" for n, v in passed.items()}
    types |= {"length_eps": "fp32", **dict.fromkeys(constants, "constexpr")}
    whole = [n for n in names if types[n] == "i32" and passed[n] % 16 == 0]
    even = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in whole or types[n][0] == "*"}
    source = ASTSource(triton_gemm.multiply, {n: types[n] for n in names}, constants, even)
    options = {n: v for n, v in given.items() if n in LAUNCH_OPTIONS and n != "launch_pdl" and v is not None}
    return triton.compile(source, target=GPUTarget("cuda", 86, 32), options=options).metadata.shared

kinds = {
    "bfloat16": Kind(triton_unpack.FLOAT, torch.bfloat16, 16),
    "fp8": Kind(triton_unpack.E4M3, torch.int16, 8, 128, 128),
    "int4": Kind(triton_unpack.NIBBLE, torch.uint8, 4, 128, zero=8),
}
found = {}
for name, kind in kinds.items():
    matrix = some_matrix(kind, torch.bfloat16, torch.Generator().manual_seed(0))
    for width in WIDTHS[:-1] if kind.bits < 16 else WIDTHS[1:]:
        matrix.multiply(torch.zeros(width, matrix.ins, dtype=torch.bfloat16), width)
        found[f"{name} {width}"] = memory(*calls.pop())
json.dump(found, sys.stdout)
"""
SMALL_MEMORY = 99 << 10
"""Of a program, on the GPUs that people have at home."""
WAIT, COPY, LOAD = "wait", "copy", "load"
WRITTEN = {
    "griddepcontrol.wait": WAIT,
    "grid_dependency_wait": WAIT,
    "async_copy_global_to_local": COPY,
    "tt.load": LOAD,
}
"""How Triton's versions write what is looked for."""
UNSAID = "TRITON_DEFAULT_FP_FUSION"
"""What a warning is about where it is not said whether products and sums may be one instruction."""


def told_by(code: str, *args: str) -> dict:
    run = subprocess.run(
        [sys.executable, "-W", f"error:{UNSAID}", "-c", code, *args],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout)


@pytest.fixture(scope="module")
def programs() -> dict[str, str]:
    return told_by(COMPILE)


def order(program: str, *wanted: str) -> list[str]:
    """From the first instruction to the last."""
    found = re.findall("|".join(map(re.escape, WRITTEN)), program)
    return [WRITTEN[each] for each in found if WRITTEN[each] in wanted]


@pytest.mark.parametrize("kind", ["bfloat16", "fp8"])
@pytest.mark.parametrize("width", [8, 16])
def test_the_first_weights_do_not_wait(programs, kind, width):
    assert order(programs[f"linear {kind} {width}"], WAIT, COPY)[:3] == [COPY, WAIT, COPY]


def test_the_first_weights_of_two_matrices_do_not_wait(programs):
    """A program has a share of one or the other."""
    one, other = programs["beside"].split(" else {")
    assert order(one, WAIT, COPY)[:3] == order(other, WAIT, COPY)[:3] == [COPY, WAIT, COPY]


@pytest.mark.parametrize("kind", ["bfloat16", "fp8"])
def test_known_inputs_are_not_waited_for(programs, kind):
    """Only one program waits, when it has done its work."""
    instructions = order(programs[f"linear {kind} known"], WAIT, COPY)
    assert len(instructions) > 4 and instructions.index(WAIT) == len(instructions) - 1


@pytest.mark.parametrize("kind", ["bfloat16", "fp8"])
def test_known_experts_do_not_wait(programs, kind):
    """Only a program that has nothing to do waits at once."""
    assert order(programs[f"experts {kind} True"], WAIT, COPY)[:4] == [WAIT, COPY, WAIT, COPY]


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("kind", ["bfloat16", "fp8"])
def test_a_place_is_looked_at_once(programs, kind, known):
    """Its expert, its pairs and their number: whoever asked for one after the other would wait twice for memory."""
    program = programs[f"place {kind} {known}"]
    assert program[: re.search(r"@!?P\d BRA", program).start()].count("LDG") == 3


@pytest.mark.parametrize("what", ["pieces", "two", "gates"])
def test_sums_ask_for_all_before_they_wait_for_any(programs, what):
    """Lengths are added behind a barrier, behind which nothing should have to be asked for."""
    _, *ways = programs[f"sums of {what}"].split("ACQBULK")
    assert len(ways) == (1 if what == "pieces" else 2)
    for way in ways:
        way = way[: way.index("EXIT")]  # behind that is what the other way does before it waits
        first = re.search("BAR.SYNC|STS", way)
        assert first is not None and "LDG" in way and "LDG" not in way[first.start() :]


@pytest.mark.parametrize("kernel", ["_begin", "_count", "_list", "_cut", "_draw_of_part"])
def test_sampling_waits_for_what_it_reads(programs, kernel):
    assert order(programs[f"sample {kernel}"], WAIT, COPY, LOAD)[0] == WAIT


@pytest.mark.parametrize("kernel", ["_penalise", "_count"])
def test_penalties_wait_for_what_they_read(programs, kernel):
    assert order(programs[f"penalise {kernel}"], WAIT, COPY, LOAD)[0] == WAIT


def test_penalties_are_not_fused(programs):
    """Torch's operations, which give the same rows their logits in steps by parts, are not either."""
    program = programs["penalise _penalise"]
    assert "div.rn.f32" in program and "fma" not in program and "div.full" not in program


@pytest.mark.parametrize("kind", ["bfloat16", "fp8"])
def test_unknown_experts_are_waited_for(programs, kind):
    assert order(programs[f"experts {kind} False"], WAIT, COPY, LOAD)[0] == WAIT


def test_products_fit_smaller_gpus():
    """At every width that may serve; a product that asks for more memory than there is would not start."""
    taken = told_by(SMALLER, str(SMALL_MEMORY))
    assert len(taken) == 4 + 4 + 4
    assert max(taken.values()) <= SMALL_MEMORY, taken
    generous = told_by(SMALLER, str(160 << 10))
    assert max(generous.values()) > SMALL_MEMORY, "a larger one has more steps under way"
