"""Packs the embedded model with the tools that people use; compares what Headlong reads with what each tool means.

    python release/artifacts.py [--only TOOL …] [--python TOOL=PYTHON …] [--source FOLDER] [--keep FOLDER]
        [--reduce FOLDER]

Every tool gets a virtual environment of its own under `.artifacts`, with the versions pinned here, and needs no GPU;
one that cannot be installed or fails is told and the others go on. Its script (release/artifacts/with_TOOL.py) writes
a checkpoint and the weights that the tool itself unpacks. Then, for each: every matrix is compared, the next token
after 320 contexts is that of a model of the tool's own floats in at least 317, and drafting changes no token. With
`--reduce` one small matrix of each is kept as a test fixture. Ends with a table; the exit code is 1 if any failed.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headlong import LLM, SamplingParams
from headlong.checkpoint.checkpoint import Checkpoint
from headlong.checkpoint.load import WeightLoader
from headlong.checkpoint.source import EMBEDDED
from headlong.convert.graft import graft
from headlong.convert.strip import strip
from headlong.engine.build import Blueprint, survey

HERE = Path(__file__).parent
PROMPTS = (
    "Write a short story about a mouse who wants to see the sea.",
    "Explain why the sky is blue to a child.",
    "Give me three tips for learning a language.",
    "Write a short poem about a quiet river.",
)
TOKENS, LEAST_ALIKE = 80, 317
LEAST_ROWS = 32
"""Rows of a matrix that is kept as a fixture."""
CLOSE = 2**-7
"""How far a weight may be from the tool's, in parts of the matrix's largest: tools unpack to bfloat16."""
MOVES_SCALES = ("modelopt",)
"""Tools whose exports change norms, so that their own matrices do not belong beside the source's norms."""
FEW = 0.001
"""The part of a matrix's weights that may be further off: modelopt rounds once more as it writes."""


@dataclass(frozen=True)
class Tool:
    """What to install, and the ways in which the tool packs."""

    requirements: tuple[str, ...]
    kinds: tuple[str, ...]


TOOLS = {
    "bitsandbytes": Tool(
        ("bitsandbytes==0.50.2", "transformers==5.22.0", "accelerate", "torch"),
        ("nf4", "nested", "fp4", "int8"),
    ),
    "mlx": Tool(("mlx[cpu]==0.32.4", "mlx-lm==0.32.2"), ("affine4", "affine3", "mxfp4", "mxfp8", "nvfp4")),
    "llmcompressor": Tool(
        ("llmcompressor==0.14.0.1",),
        (
            "W4A16",
            "W4A16_ASYM",
            "W8A8",
            "FP8_DYNAMIC",
            "FP8_BLOCK",
            "NVFP4A16",
            "MXFP4A16",
            "MXFP8A16",
            "W4A16:raw",
        ),
    ),
    "auto_round": Tool(
        ("auto-round==0.16.1",), ("auto_round:auto_gptq,4,asym", "auto_round,3,asym", "auto_round,2,asym")
    ),
    "modelopt": Tool(
        ("nvidia-modelopt[hf]==0.47.0",),
        # Its other exports round anew, to other numbers than it computed with.
        ("INT4_AWQ_CFG", "INT8_SMOOTHQUANT_CFG"),
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--python", nargs="+", default=[], metavar="TOOL=PYTHON")
    parser.add_argument("--source", type=Path, default=EMBEDDED)
    parser.add_argument("--keep", type=Path, default=None, help="keep the checkpoints here")
    parser.add_argument(
        "--reduce", type=Path, default=None, help="write fixtures here instead of comparing tokens"
    )
    args = parser.parse_args()
    given = dict(each.split("=", 1) for each in args.python)
    failed = 0
    with tempfile.TemporaryDirectory() as temporary:
        work = args.keep or Path(temporary)
        strip(Checkpoint.open(args.source), work / "bare", force=True) if args.reduce is None else None
        source = args.source if args.reduce else work / "bare"
        for name in args.only:
            python = given.get(name) or _environment(name, TOOLS[name])
            for kind in TOOLS[name].kinds:
                said, fine = _try(name, kind, python, source, work, args)
                failed += not fine
                print(f"{name:14} {kind:30} {said}", flush=True)
    return 1 if failed else 0


def _environment(name: str, tool: Tool) -> str | None:
    folder = Path(".artifacts") / name
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        done = subprocess.run([python, "-m", "pip", "install", "--quiet", *tool.requirements], check=False)
        if done.returncode:
            python.unlink()
            return None
    return str(python)


def _try(
    name: str, kind: str, python: str | None, source: Path, work: Path, args: argparse.Namespace
) -> tuple[str, bool]:
    if python is None:
        return "could not be installed", False
    out = work / f"{name}-{kind.translate(str.maketrans(':,', '__'))}"
    script = [python, str(HERE / "artifacts" / f"with_{name}.py"), str(source), str(out), kind]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"the tool failed: {(done.stderr.strip().splitlines() or ['silently'])[-1][:160]}", False
    meant = load_file(out / "meant.dequantised")
    blueprint = survey(Checkpoint.open(out))
    labels, worst = _compare(blueprint, meant)
    said = f"{', '.join(labels)}; at most {worst:.2%} of a matrix's weights off"
    if told := blueprint.detector.disagreements:
        return f"{said}; false: {next(iter(told.values()))}", False
    if args.reduce is not None:
        _reduce(blueprint, meant, args.reduce / f"{out.name}.safetensors")
        return f"{said}; reduced", worst <= FEW
    alike, exact = _run(args.source, source, out, blueprint, meant, work)
    drafting = "changes nothing" if exact else "CHANGES TOKENS"
    said += f"; {alike} of {len(PROMPTS) * TOKENS} tokens alike; drafting {drafting}"
    if name in MOVES_SCALES:
        return f"{said} (not judged by tokens: the export moves scales into norms)", worst <= FEW and exact
    return said, worst <= FEW and alike >= LEAST_ALIKE and exact


def _pairs(blueprint: Blueprint, meant: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Matrices by canonical name with what the tool says that they mean."""
    for name in blueprint.formats:
        for wrapper in ("", "model.", "model.language_model.", "language_model.model.", "language_model."):
            if (found := meant.get(wrapper + name)) is not None:
                yield name, found.float()
                break


def _compare(blueprint: Blueprint, meant: dict[str, Tensor]) -> tuple[list[str], float]:
    loader = WeightLoader(blueprint.names, blueprint.detector, torch.float32, "cpu", keep_stored=True)
    worst, count, labels = 0.0, 0, set()
    for name, wanted in _pairs(blueprint, meant):
        weight = loader.matrix(name, *wanted.shape)
        found = weight.float() if isinstance(weight, Tensor) else weight.dequantize(0, weight.out_features)
        far = (found - wanted).abs() > CLOSE * wanted.abs().max()
        worst = max(worst, float(far.float().mean()))
        labels.add(blueprint.formats[name].label)
        count += 1
    if count == 0:
        return ["nothing to compare"], float("inf")
    return sorted(labels), worst


def _reduce(blueprint: Blueprint, meant: dict[str, Tensor], path: Path) -> None:
    """Keeps a small packed matrix: its parts as they are stored, what it means, and the config."""
    checkpoint = blueprint.checkpoint
    packed = [(wanted.numel(), name, wanted) for name, wanted in _pairs(blueprint, meant)]
    packed = [
        each for each in packed if len(each[2]) >= LEAST_ROWS and len(blueprint.names.parts(each[1])) > 1
    ]
    _, name, wanted = min(packed, key=lambda each: each[:2])
    parts = {part: checkpoint.read(info.name) for part, info in blueprint.names.parts(name).items()}
    said = checkpoint.config.get("quantization_config") or checkpoint.config.get("quantization") or {}
    first = next(iter(blueprint.names.parts(name).items()))
    metadata = {
        "module": first[1].name.removesuffix(f".{first[0]}"),
        "config": json.dumps({"quantization_config": said}),
        "beside": json.dumps(dict(checkpoint.quant_config)),
        "label": blueprint.formats[name].label,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(
        parts | {"meant": wanted.bfloat16() if torch.equal(wanted.bfloat16().float(), wanted) else wanted},
        path,
        metadata,
    )


def _run(
    whole: Path, bare: Path, packed: Path, blueprint: Blueprint, meant: dict[str, Tensor], work: Path
) -> tuple[int, bool]:
    """How many next tokens are those of the tool's own floats, and whether drafting changes none."""
    floats = work / "floats"
    (packed / "meant.dequantised").unlink()
    checkpoint = Checkpoint.open(bare)
    named = dict(_pairs(blueprint, meant))
    tensors = {}
    for name, info in survey(checkpoint).names.sources.items():
        tensors[info.name] = named.get(name, checkpoint.read(info.name).float()).contiguous()
    floats.mkdir(exist_ok=True)
    for file in bare.iterdir():
        if file.suffix != ".safetensors" and "index" not in file.name:
            (floats / file.name).write_bytes(file.read_bytes())
    save_file(tensors, floats / "model.safetensors")
    plain = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0.0, draft_tokens=0)
    single = SamplingParams(max_tokens=1, ignore_eos=True, temperature=0.0, draft_tokens=0)
    truth = LLM(floats, device="cpu", dtype="float32")
    tokenizer = truth.text.tokenizer
    assert tokenizer is not None
    contexts: list[tuple[int, ...]] = []
    wanted: list[int] = []
    starts = [tuple(tokenizer.encode(prompt)) for prompt in PROMPTS]
    for tokens in starts:
        for token in truth.generate([tokens], plain)[0].token_ids:
            contexts.append(tokens)
            wanted.append(token)
            tokens = (*tokens, token)
    found = LLM(packed, device="cpu", dtype="float32").generate(contexts, single)
    alike = sum(each.token_ids[0] == token for each, token in zip(found, wanted, strict=True))
    headed = packed.with_name(f"{packed.name}-mtp")
    graft(packed, whole, headed, force=True)
    llm = LLM(headed, device="cpu", mtp="on")
    drafting = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0.0, draft_tokens=3)
    texts = [[each.token_ids for each in llm.generate(starts, how)] for how in (plain, drafting)]
    return alike, texts[0] == texts[1]


if __name__ == "__main__":
    sys.exit(main())
