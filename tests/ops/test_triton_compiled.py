"""What the compiler makes of a GEMM's loop, which no result tells: the first weights are asked for before the wait,
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
from headlong.ops.gated_attention import triton_kernels as gated_attention
from headlong.ops.gated_attention import triton_walk
from headlong.ops.latent_attention import triton_kernels as latent_attention
from headlong.ops.linear import triton_paired as paired
from headlong.ops.linear import triton_gemm as linear
from headlong.ops.linear.triton_gemm import CodeLayout
from headlong.ops.linear import triton_unpack
from headlong.ops.linear import triton_split_k as split_k
from headlong.ops.moe import triton_kernels as moe
from headlong.ops.penalise import triton as penalise
from headlong.ops.silu_mul.activation import Activation

STRIDES = ("stride_scales", "stride_expert_scales", "stride_out", "stride_codes", "stride_expert_codes")
EVEN = ("num_outs", "num_ins", *STRIDES)

def made(kernel, pointers, options={}, **constants):
    names = kernel.arg_names
    types = {n: pointers.get(n, "constexpr" if n in constants else "i32") for n in names}
    types |= {n: "fp32" for n in ("eps", "norm_eps", "scale") if n in types and n not in constants}
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

missing = {**dict.fromkeys(("offsets_ptr", "row_scales_ptr", "bias_ptr", "residual_ptr", "columns_ptr")), "GROUPS": 1}
cut = {"DTYPE": tl.bfloat16, "EVEN_K": True, "PARTS": 1, "BLOCK_N": 64, "squares_ptr": None, "BLOCK_SQUARES": 1}
layouts = {
    "bfloat16": (
        {"codes_ptr": "*bf16"},
        {"scales_ptr": None, "LAYOUT": CodeLayout(0, 0, 1, 0, 1, 1), "BLOCK_K": 128},
    ),
    "fp8": (
        {"codes_ptr": "*i16", "scales_ptr": "*fp32"},
        {"LAYOUT": CodeLayout(1, 0, 2, 128, 128, 64), "BLOCK_K": 64},
    ),
}
found = {}
for name, (weights, layout) in layouts.items():
    for width in (8, 16):
        found[f"linear {name} {width}"] = compiled(
            linear.gemm_kernel, {"x_ptr": "*bf16", "out_ptr": "*fp32", **weights}, **missing, **cut, **layout,
            SPLIT_K=True, INPUTS_READY=False, BLOCK_M=width,
        )
    found[f"linear {name} groups"] = compiled(
        linear.gemm_kernel, {"x_ptr": "*bf16", "out_ptr": "*fp32", **weights}, **missing | {"GROUPS": 8}, **cut,
        **layout, SPLIT_K=True, INPUTS_READY=False, BLOCK_M=8,
    )
    found[f"linear {name} ready"] = compiled(
        linear.gemm_kernel, {"x_ptr": "*bf16", "out_ptr": "*fp32", **weights}, **missing, **cut, **layout,
        SPLIT_K=True, INPUTS_READY=True, BLOCK_M=8,
    )
    for ready in (False, True):
        pointers = {"x_ptr": "*bf16", "blocks_ptr": "*i32", "sorted_pairs_ptr": "*i32", "out_ptr": "*fp32", **weights}
        args = {"offsets_ptr": None, "row_scales_ptr": None, "bias_ptr": None, "ACTIVATION": None, **cut, **layout}
        args |= {"PAIRS_PER_INPUT": 1, "ONE_INPUT": False, "BLOCK_M": 16, "BLOCKS_READY": ready}
        found[f"experts {name} {ready}"] = compiled(moe.grouped_gemm_kernel, pointers, **args)
        found[f"block {name} {ready}"] = machine_code(moe.grouped_gemm_kernel, pointers, **args)
found["experts clamped"] = compiled(
    moe.grouped_gemm_kernel, {
        "x_ptr": "*bf16", "blocks_ptr": "*i32", "sorted_pairs_ptr": "*i32", "out_ptr": "*bf16", "codes_ptr": "*u8",
        "scales_ptr": "*bf16", "bias_ptr": "*fp32",
    },
    **{**cut, "PARTS": 2}, offsets_ptr=None, row_scales_ptr=None, LAYOUT=CodeLayout(4, 0, 2, 32, 1, 64), BLOCK_K=64,
    PAIRS_PER_INPUT=4, ONE_INPUT=False, BLOCK_M=16, BLOCKS_READY=False, ACTIVATION=Activation(1.702, 7.0, 1.0),
)
found["experts gated"] = compiled(
    moe.grouped_gemm_kernel, {
        "x_ptr": "*bf16", "blocks_ptr": "*i32", "sorted_pairs_ptr": "*i32", "out_ptr": "*bf16", "codes_ptr": "*bf16",
    },
    **{**cut, "PARTS": 2}, offsets_ptr=None, row_scales_ptr=None, bias_ptr=None, **layouts["bfloat16"][1],
    PAIRS_PER_INPUT=4, ONE_INPUT=False, BLOCK_M=16, BLOCKS_READY=False, ACTIVATION=None,
)
tables = (("mxfp4", triton_unpack.E2M1, 32), ("nf4", triton_unpack.NF4, 64), ("fp4", triton_unpack.FP4, 64))
for name, encoding, group in tables:
    found[f"table {name}"] = compiled(
        linear.gemm_kernel, {"x_ptr": "*bf16", "out_ptr": "*fp32", "codes_ptr": "*u8", "scales_ptr": "*fp32"},
        {"num_stages": 2}, **missing, **cut, LAYOUT=CodeLayout(encoding, 0, 2, group, 1, 64), BLOCK_K=64,
        SPLIT_K=True, INPUTS_READY=False, BLOCK_M=8,
    )
weights, layout = layouts["fp8"]
pointers = {"x_ptr": "*bf16", "out_ptr": "*fp32", "floats_ptr": "*bf16", "float_out_ptr": "*fp32", **weights}
sizes = {n: v for n, v in {**cut, **layout}.items() if n in paired.paired_gemm_kernel.arg_names}
found["paired"] = compiled(
    paired.paired_gemm_kernel, pointers, offsets_ptr=None, row_scales_ptr=None, **sizes, BLOCK_M=8,
    FLOAT_LAYOUT=CodeLayout(0, 0, 1, 0, 1, 1), FLOAT_EVEN_K=True, FLOAT_BLOCK_N=64, FLOAT_BLOCK_K=64, FLOAT_BLOCK_M=16,
)
of_sums = {"partials_ptr": "*fp32", "squares_ptr": "*fp32", "out_ptr": "*fp32", "columns_ptr": "*i32"}
evenly = {"BLOCK_N": 64, "NUM_PARTIALS": 4, "EVEN_SPLITS": True, "BLOCK_SQUARES": 32}
no_norm = dict.fromkeys(("norm_weight_ptr", "normed_ptr", "normed_squares_ptr"))
found["epilogue of one"] = machine_code(
    split_k.epilogue_kernel, of_sums, bias_ptr=None, residual_ptr=None, **no_norm, **evenly, BLOCK=256
)
found["epilogue of two"] = machine_code(
    paired.paired_epilogue_kernel, {**of_sums, "float_partials_ptr": "*fp32", "float_columns_ptr": "*i32"},
    bias_ptr=None, **evenly, FLOAT_BLOCK_N=64, FLOAT_NUM_PARTIALS=8, FLOAT_EVEN_SPLITS=True, BLOCK=256,
)
sizes = {"KEY_HEADS": 4, "H": 8, "D": 128, "E": 128, "V": 132, "TAPS": 4, "WINDOW": 8, "MAX_DRAFTS": 4, "TILED": False}
given = ("projected", "windows", "keys", "values", "drafts", "norm_weight", "found", "gates", "out", "squares")
found["epilogue of gates"] = machine_code(
    delta_net.gated_norm_kernel, {**{n + "_ptr": "*fp32" for n in given}, "rows_ptr": "*i32"}, {"num_warps": 4},
    **evenly, **sizes, PARTS=4, HEADS=4, POW_E=128, POW_X=512, POW_W=8, BLOCK_C=64,
)
given = ("projected", "windows", "conv", "rate", "dt_bias", "keys", "values", "state", "drafts", "found")
for columns in (8, 16):
    found[f"delta rule {columns}"] = machine_code(
        delta_net.delta_rule_kernel, {**{n + "_ptr": "*fp32" for n in given}, "rows_ptr": "*i32"}, {"num_warps": 1},
        **sizes, FIND_INPUTS=False, QK_EPS=1e-6, POW_D=128, LANES=8, COLUMNS=columns, NEIGHBOURS=columns // 4,
        AT_ONCE=4,
    )
counted = {"counts": "*i32", "weights": "*i64", "numbers": "*i32", "orders": "*i64"}
cuts = {"filters": "*fp64", "keys": "*i64", "cuts": "*i64", "floors": "*fp64", "indices": "*i32"}
given = {"logits": "*fp32", "maxima": "*fp32", "leasts": "*fp32", **counted, **cuts}
sizes = {"BITS": 18, "SCALE": 2.0**44, "BLOCK": sampling.BLOCK, "PARTS": 128, "CLEARED": 32}
given = {n + "_ptr": t for n, t in given.items()}
for name in ("_maxima", "_count", "_list", "_cut", "_draw_of_part"):
    kernel = getattr(sampling, name + "_kernel")
    pointers = {n: t for n, t in given.items() if n in kernel.arg_names}
    if name == "_draw_of_part":
        pointers["maxima_ptr"] = "*fp64"
    found[f"sample {name}"] = compiled(
        kernel, pointers, **{n: size for n, size in sizes.items() if n in kernel.arg_names}
    )
given = {"logits": "*fp32", "changes": "*fp64", "biases": "*fp32", "drafts": "*i64", "out": "*fp32"}
given |= {"slots": "*i64", "last": "*i64", "chosen": "*i64", "counts": "*i32"}
given = {n + "_ptr": t for n, t in given.items()}
for name, block in (("_penalise", penalise.BLOCK), ("_count", 4)):
    kernel, sizes = getattr(penalise, name + "_kernel"), {"COUNTS": True, "BIASES": True, "BLOCK": block}
    found[f"penalise {name}"] = compiled(
        kernel, {n: t for n, t in given.items() if n in kernel.arg_names}, penalise.UNFUSED,
        **{n: size for n, size in sizes.items() if n in kernel.arg_names},
    )
sizes = {"HEADS": 20, "PLAIN": 192, "ROPE": 64, "RANK": 512, "WIDTH": 576, "PAGE_SIZE": 64}
sizes |= {"INTERLEAVED": True, "BLOCK_D": 512, "BLOCK_E": 64, "FIRST_SPLIT": 128, "SPLITS_PER_SIZE": 64}
sizes |= {"BLOCK_R": 128, "BLOCK_M": 32, "BLOCK_P": 32}
given = ("plain", "given", "cos", "sin", "norm", "eps", "maxima", "totals", "sums")
given = {**{n: "*fp32" for n in given}, "token_rows": "*i32", "positions": "*i32", "pages": "*i32", "rows": "*i32"}
given = {n + "_ptr": t for n, t in {**given, "latents": "*bf16"}.items()}
for name, kernel, warps, queries in (
    ("rotate", latent_attention.rotate_kernel, 1, "*bf16"),
    ("rotate, of floats", latent_attention.rotate_kernel, 1, "*fp32"),
    ("attend", latent_attention.attend_kernel, 8, "*bf16"),
):
    pointers = {n: t for n, t in {**given, "queries_ptr": queries}.items() if n in kernel.arg_names}
    constants = {n: size for n, size in sizes.items() if n in kernel.arg_names}
    found[f"latents {name}"] = compiled(kernel, pointers, {"num_warps": warps, "num_stages": 2}, **constants)
for name, x, strides in (("keys", "*fp32", (1, 512)), ("values", "*bf16", (512, 1))):
    found[f"latents {name}"] = compiled(
        latent_attention.heads_kernel, {"x_ptr": x, "weights_ptr": "*bf16", "out_ptr": "*bf16"}, {"num_warps": 4},
        HEADS=20, NUM_INS=512, NUM_OUTS=512, STRIDE_X=576, STRIDE_OUT=576, STRIDE_H=1 << 18, STRIDE_O=strides[0],
        STRIDE_I=strides[1], BLOCK_M=16, BLOCK_O=64, BLOCK_I=64,
    )
sizes = {"HEADS": 64, "KV_HEADS": 8, "HEAD_DIM": 64, "WIDTH": 64, "PAGE_SIZE": 64, "BLOCK_D": 64, "FIRST_SPLIT": 128}
sizes |= {"SPLITS_PER_SIZE": 64, "BLOCK_R": 128, "TILE_TOKENS": 4, "BLOCK_M": 32, "BLOCK_P": 32, "BLOCK_S": 32}
sizes |= {"WINDOW": 128, "gates_ptr": None, "squares_ptr": None, "norm_eps": None}
sizes |= {"BLOCK_N": 64, "NUM_PARTIALS": 1, "EVEN_SPLITS": True, "BLOCK_SQUARES": 1}
given = {n: "*fp32" for n in ("maxima", "totals", "sums", "sinks", "out")}
given |= {"queries": "*bf16", "keys": "*bf16", "values": "*bf16", "rows": "*i32", "pages": "*i32", "positions": "*i32"}
for name in ("attend", "combine"):
    kernel = getattr(gated_attention, name + "_kernel")
    found[f"window {name}"] = compiled(
        kernel, {n + "_ptr": t for n, t in given.items() if n + "_ptr" in kernel.arg_names},
        **{n: size for n, size in sizes.items() if n in kernel.arg_names},
    )
sizes |= {"HEADS": 24, "KV_HEADS": 4, "HEAD_DIM": 256, "WIDTH": 256, "BLOCK_D": 256, "WINDOW": None}
sizes |= {"TILE_TOKENS": 21, "BLOCK_M": 128, "BLOCK_P": 64, "BLOCK_E": 128, "sinks_ptr": None}
del sizes["gates_ptr"], given["sinks"]
given |= {"gates": "*fp32", "out": "*bf16"}
kernel = triton_walk.walk_kernel
given = {n + "_ptr": t for n, t in given.items() if n + "_ptr" in kernel.arg_names}
found["walk"] = compiled(
    kernel, given, {"num_warps": 8, "num_stages": 2},
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
from headlong.ops.linear.triton_block_m import BLOCK_MS, random_weight
from headlong.ops.linear.triton_weight import WeightLayout

MEMORY, calls = int(sys.argv[1]), []

class Recorder:
    def __getitem__(self, grid):
        return lambda *args, **given: calls.append((args, given))

triton_weight.gemm_kernel, triton_weight.shared_memory = Recorder(), lambda device: MEMORY
POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int16: "*i16", torch.uint8: "*u8"}
LAUNCH_OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion", "launch_pdl")

def memory(args, given):
    names = triton_gemm.gemm_kernel.arg_names
    passed = dict(zip(names, args)) | {n: v for n, v in given.items() if n not in LAUNCH_OPTIONS}
    constants = {n: v for n, v in passed.items() if v is None or n.isupper()}
    types = {n: POINTERS[v.dtype] if isinstance(v, torch.Tensor) else "i32" for n, v in passed.items()}
    types |= {"norm_eps": "fp32", **dict.fromkeys(constants, "constexpr")}
    whole = [n for n in names if types[n] == "i32" and passed[n] % 16 == 0]
    even = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in whole or types[n][0] == "*"}
    source = ASTSource(triton_gemm.gemm_kernel, {n: types[n] for n in names}, constants, even)
    options = {n: v for n, v in given.items() if n in LAUNCH_OPTIONS and n != "launch_pdl" and v is not None}
    return triton.compile(source, target=GPUTarget("cuda", 86, 32), options=options).metadata.shared

layouts = {
    "bfloat16": WeightLayout(triton_unpack.FLOAT, torch.bfloat16, 16),
    "fp8": WeightLayout(triton_unpack.E4M3, torch.int16, 8, 128, 128),
    "int4": WeightLayout(triton_unpack.NIBBLE, torch.uint8, 4, 128, zero_point=8),
}
found = {}
for name, layout in layouts.items():
    weight = random_weight(layout, torch.bfloat16, torch.Generator().manual_seed(0))
    for block_m in BLOCK_MS[:-1] if layout.bits < 16 else BLOCK_MS[1:]:
        weight.partial_sums(torch.zeros(block_m, weight.num_ins, dtype=torch.bfloat16), block_m)
        found[f"{name} {block_m}"] = memory(*calls.pop())
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


def loops_of(program: str) -> list[str]:
    """The instructions of innermost loops, a line each."""
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", program)
    lines, at = [text for _, text in found], {int(place, 16): line for line, (place, _) in enumerate(found)}
    jumps = [(line, re.search(r"BRA.* 0x([0-9a-f]+)", text)) for line, text in enumerate(lines)]
    spans = [(at[int(jump[1], 16)], line) for line, jump in jumps if jump and int(jump[1], 16) in at]
    spans = [(begin, end) for begin, end in spans if begin < end]
    inner = [
        one
        for one in spans
        if not any(other != one and one[0] <= other[0] < other[1] <= one[1] for other in spans)
    ]
    return ["\n".join(lines[begin : end + 1]) for begin, end in inner]


def order(program: str, *wanted: str) -> list[str]:
    """From the first instruction to the last."""
    found = re.findall("|".join(map(re.escape, WRITTEN)), program)
    return [WRITTEN[each] for each in found if WRITTEN[each] in wanted]


@pytest.mark.parametrize("kind", ["bfloat16", "fp8"])
@pytest.mark.parametrize("width", [8, 16, "groups"])
def test_the_first_weights_do_not_wait(programs, kind, width):
    assert order(programs[f"linear {kind} {width}"], WAIT, COPY)[:3] == [COPY, WAIT, COPY]


def test_the_first_weights_of_a_pair_do_not_wait(programs):
    """A program has a split of one or the other."""
    one, other = programs["paired"].split(" else {")
    assert order(one, WAIT, COPY)[:3] == order(other, WAIT, COPY)[:3] == [COPY, WAIT, COPY]


@pytest.mark.parametrize("kind", ["bfloat16", "fp8"])
def test_inputs_that_are_ready_are_not_waited_for(programs, kind):
    """Only one program waits, when it has done its work."""
    instructions = order(programs[f"linear {kind} ready"], WAIT, COPY)
    assert len(instructions) > 4 and instructions.index(WAIT) == len(instructions) - 1


@pytest.mark.parametrize("kind", ["bfloat16", "fp8"])
def test_blocks_that_are_ready_are_not_waited_for(programs, kind):
    """Only a program that has nothing to do waits at once."""
    assert order(programs[f"experts {kind} True"], WAIT, COPY)[:4] == [WAIT, COPY, WAIT, COPY]


@pytest.mark.parametrize("kind", ["gated", "clamped"])
def test_experts_compile_with_either_activation(programs, kind):
    """And with biases. What the compiler refuses may run in the interpreter."""
    assert order(programs[f"experts {kind}"], WAIT, COPY, LOAD)[0] == WAIT


@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize("kind", ["bfloat16", "fp8"])
def test_a_block_is_looked_at_once(programs, kind, ready):
    """Its expert, its pairs and their number: whoever asked for one after the other would wait twice for memory."""
    program = programs[f"block {kind} {ready}"]
    assert program[: re.search(r"@!?P\d BRA", program).start()].count("LDG") == 3


@pytest.mark.parametrize("what", ["one", "two", "gates"])
def test_epilogues_ask_for_all_before_they_wait_for_any(programs, what):
    """Squares are added behind a barrier, behind which nothing should have to be asked for."""
    _, *ways = programs[f"epilogue of {what}"].split("ACQBULK")
    assert len(ways) == (1 if what == "one" else 2)
    for way in ways:
        way = way[: way.index("EXIT")]  # behind that is what the other way does before it waits
        first = re.search("BAR.SYNC|STS", way)
        assert first is not None and "LDG" in way and "LDG" not in way[first.start() :]


@pytest.mark.parametrize("columns", [8, 16])
def test_the_delta_rule_waits_for_no_memory(programs, columns):
    """What tokens bring is copied ahead and read as lanes hold S; eight lanes add a column's sums in three turns."""
    loops = loops_of(programs[f"delta rule {columns}"])
    long = max(loops, key=lambda loop: loop.count("FFMA") if "LDGSTS" in loop else 0)
    tokens = 4
    assert "LDGSTS" in long and not re.search(r"\bLDG\b|STSM|\bSTL\b|\bLDL\b", long)
    assert long.count("SHFL.BFLY") == tokens * 2 * 3 * columns // 4
    assert len(long.splitlines()) < tokens * (64 + 24 * columns)  # 16 are the arithmetic of a column


@pytest.mark.parametrize("kernel", ["_maxima", "_count", "_list", "_cut", "_draw_of_part"])
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
def test_blocks_that_are_not_ready_are_waited_for(programs, kind):
    assert order(programs[f"experts {kind} False"], WAIT, COPY, LOAD)[0] == WAIT


@pytest.mark.parametrize(("kind", "lookups"), [("mxfp4", False), ("nf4", True), ("fp4", True)])
def test_codes_of_a_table_compile(programs, kind, lookups):
    """Those that are looked up are so, four at a time, and none is picked from sixteen numbers one by one."""
    program = programs[f"table {kind}"]
    assert ("prmt.b32 low, begin, end, place;" in program) == lookups
    assert program.count("selp") < 20


@pytest.mark.parametrize("kernel", ["rotate", "rotate, of floats", "attend", "keys", "values"])
def test_latent_attention_compiles(programs, kernel):
    """The compiler refuses what the interpreter takes, such as a name that has another type on another path."""
    assert "griddepcontrol.wait" in programs[f"latents {kernel}"]


@pytest.mark.parametrize("kernel", ["attend", "combine"])
def test_attention_through_a_window_compiles(programs, kernel):
    assert WAIT in order(programs[f"window {kernel}"], WAIT)


def test_a_branch_waits_for_the_sums_that_it_uses(programs):
    """Products of a walk run on while the program does; those whose sums a branch adds must have ended before it."""
    program = programs["walk"]
    found = re.findall(r"warp_group_dot_wait|warp_group_dot|scf\.if", program)
    assert found.count("warp_group_dot") == 3 and found.count("scf.if") == 1
    assert found[found.index("scf.if") - 1] == "warp_group_dot_wait"
    assert "wgmma.mma_async" in program and "mma.sync" not in program


@pytest.mark.slow
def test_products_fit_smaller_gpus():
    """At every width that may serve; a product that asks for more memory than there is would not start."""
    taken = told_by(SMALLER, str(SMALL_MEMORY))
    assert len(taken) == 4 + 4 + 4
    assert max(taken.values()) <= SMALL_MEMORY, taken
    generous = told_by(SMALLER, str(160 << 10))
    assert max(generous.values()) > SMALL_MEMORY, "a larger one has more steps under way"
