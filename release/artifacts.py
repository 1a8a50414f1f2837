"""Packs the embedded model with the tools that people use; compares what Headlong reads with what each tool means.

    python release/artifacts.py [--only TOOL …] [--python TOOL=PYTHON …] [--source FOLDER] [--keep FOLDER]
        [--again] [--all-prompts] [--reduce FOLDER]

Every tool gets a virtual environment of its own under `.artifacts`, of the versions in release/artifacts/TOOL.txt, and
needs no GPU; one that cannot be installed or fails is told and the others go on. Its script
(release/artifacts/with_TOOL.py) writes a checkpoint and the weights that the tool itself unpacks from it. Then, for
each: `inspect` believes its config, every matrix is compared, at least 317 of 320 next tokens are those of a model of
the tool's own floats, log-probabilities agree, drafting changes no token, and drafts are accepted almost as often as
the original's: the 95% interval of the difference is told too, and `--all-prompts` counts over five times as many
prompts and beside a model of the tool's own floats. With `--reduce` some rows of a matrix of each are kept as a test
fixture. Ends with a table; the exit code is 1 if any failed.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass
from pathlib import Path

from artifact_checks import (
    ALL_PROMPTS,
    MORE_PROMPTS,
    PROMPTS,
    TOKENS,
    Drafts,
    compare_tokens,
    compare_weights,
    count_drafts,
    inspected,
    reduce,
    with_head,
    write_floats,
)
from safetensors.torch import load_file

from headlong.checkpoint.checkpoint import Checkpoint
from headlong.checkpoint.source import EMBEDDED
from headlong.convert.strip import strip
from headlong.engine.build import survey

HERE = Path(__file__).parent
LEAST_ALIKE = 317
FEW = 0.001
"""The part of a matrix's weights that may be further off: modelopt rounds once more as it writes."""
OFF = 0.02
"""How far log-probabilities may be apart on average: tools unpack to bfloat16."""
LOSSES = ((6.0, 5.0), (4.0, 10.0))
"""The points of the acceptance rate that may be lost by formats of at least so many bits; by fewer, any."""
TOOLS: dict[str, tuple[str, ...]] = {
    "bitsandbytes": ("nf4", "nested", "fp4", "int8"),
    "mlx": ("affine4", "affine3", "mxfp4", "mxfp8", "nvfp4"),
    "llmcompressor": (
        *("W4A16", "W4A16_ASYM", "W8A8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16", "MXFP4A16", "MXFP8A16"),
        "W4A16:raw",
    ),
    "auto_round": (
        "auto_round:auto_gptq,4,asym",
        "auto_round:gptqmodel,4,asym",
        "auto_round,3,asym",
        "auto_round,2,asym",
        "auto_awq,4,asym",
    ),
    "modelopt": (
        *(
            "INT4_AWQ_CFG",
            "INT8_SMOOTHQUANT_CFG",
            "W4A16_NVFP4_CFG",
            "MXFP8_DEFAULT_CFG",
            "MXFP4_DEFAULT_CFG",
        ),
    ),
    "gptqmodel": (
        "gptq,gptq,4,sym",
        "gptq,gptq_v2,4,asym",
        "gptq,gptq,8,sym",
        "gptq,gptq,3,sym",
        "awq,gemv,4,asym",
    ),
    "torchao": ("int8", "intx4", "intx4_asym", "fp8"),
    "quark": ("uint4_wo_32", "int4_wo_32", "fp8", "mxfp4"),
}
"""The ways in which each packs; docs/log/formats.md has those that no CPU can write."""
QUANTISES_INPUTS: dict[str, tuple[str, ...]] = {
    "llmcompressor": ("W8A8", "FP8_DYNAMIC", "FP8_BLOCK"),
    "modelopt": ("INT8_SMOOTHQUANT_CFG", "MXFP8_DEFAULT_CFG", "MXFP4_DEFAULT_CFG"),
    "quark": ("fp8", "mxfp4"),
}
"""Those of the ways that round what matrices are multiplied with, too. Headlong does not, and says so."""


@dataclass(frozen=True)
class Row:
    """What is said of one artifact."""

    tool: str
    kind: str
    said: str
    fine: bool
    drafts: str = ""
    tokens: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--kinds", nargs="+", default=None, help="of the tool's ways, these alone")
    parser.add_argument("--python", nargs="+", default=[], metavar="TOOL=PYTHON")
    parser.add_argument("--source", type=Path, default=EMBEDDED)
    parser.add_argument("--all-prompts", action="store_true", help="drafts over every prompt, of floats too")
    parser.add_argument("--keep", type=Path, default=None, help="keep the checkpoints here")
    parser.add_argument("--again", action="store_true", help="read what was kept, where there is something")
    parser.add_argument("--reduce", type=Path, default=None, help="write fixtures here, too")
    args = parser.parse_args()
    given = dict(each.split("=", 1) for each in args.python)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary:
        work = args.keep or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        source = work / "bare"
        strip(Checkpoint.open(args.source), source, force=True)
        whole = count_drafts(args.source, args.source, _prompts(args))
        print(f"drafts of the original accepted: {whole.rate:.1%}", flush=True)
        for name in args.only:
            python = given.get(name) or (sys.executable if args.again else _environment(name))
            for kind in TOOLS[name] if args.kinds is None else args.kinds:
                rows.append(_try(name, kind, python, source, whole, work, args))
                print(*rows[-1].__dict__.values(), sep=" | ", flush=True)
    print(_table(rows))
    return 0 if all(row.fine for row in rows) else 1


def _environment(name: str) -> str | None:
    """The tool's own Python, made anew where what it needs has changed; None if that cannot be."""
    folder, wanted = Path(".artifacts") / name, HERE / "artifacts" / f"{name}.txt"
    python, stamp = folder / "bin" / "python", folder / "installed.txt"
    if not stamp.exists() or stamp.read_text() != wanted.read_text():
        venv.create(folder, with_pip=True, clear=True)
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", wanted]
        if subprocess.run(install, check=False).returncode:
            return None
        stamp.write_text(wanted.read_text())
    return str(python.absolute())


def _try(
    name: str,
    kind: str,
    python: str | None,
    source: Path,
    whole: Drafts,
    work: Path,
    args: argparse.Namespace,
) -> Row:
    if python is None:
        return Row(name, kind, "could not be installed", False)
    out = work / f"{name}-{kind.translate(str.maketrans(':,', '__'))}"
    script = [python, str(HERE / "artifacts" / f"with_{name}.py"), str(source), str(out), kind]
    kept = work / f"{out.name}.meant"
    if not (args.again and kept.exists()):
        shutil.rmtree(out, ignore_errors=True)  # some tools write over nothing
        done = subprocess.run(script, capture_output=True, text=True, check=False)
        (work / f"{out.name}.log").write_text(done.stdout + done.stderr)
        if done.returncode:
            why = (done.stderr.strip().splitlines() or ["silently"])[-1][:160]
            return Row(name, kind, f"the tool failed: {why}", False)
        (out / "meant.dequantised").rename(kept)
    meant = load_file(kept)
    blueprint = survey(Checkpoint.open(out))
    matrices = compare_weights(blueprint, meant)
    said = f"{', '.join(matrices.labels)}; at most {matrices.worst:.2%} of a matrix's weights off"
    if wrong := inspected(out, meant, quantises_inputs=kind in QUANTISES_INPUTS.get(name, ())):
        return Row(name, kind, f"{said}; inspect: {wrong}", False)
    if args.reduce is not None:
        reduce(blueprint, meant, args.reduce / f"{out.name}.safetensors")
    write_floats(source, meant, work / "floats")
    tokens = compare_tokens(work / "floats", out)
    exact, lost, counted = _drafts(out, work / "floats", whole, args)
    assert tokens.count == len(PROMPTS) * TOKENS
    most = next((most for bits, most in LOSSES if matrices.bits >= bits), 100.0)
    fine = (
        matrices.worst <= FEW and tokens.alike >= LEAST_ALIKE and tokens.off <= OFF and exact and lost <= most
    )
    alike = f"{tokens.alike} of {tokens.count}, log-probabilities {tokens.off:.4f} off"
    return Row(name, kind, said, fine, counted, alike)


def _drafts(out: Path, floats: Path, whole: Drafts, args: argparse.Namespace) -> tuple[bool, float, str]:
    """Whether drafting changes no token, how many points of the original's rate are lost, and that in words."""
    drafts = count_drafts(with_head(out, args.source), args.source, _prompts(args))
    points, low, high = drafts.points_over(whole)
    said = f"{drafts.rate:.1%} ({points:+.1f}, {low:+.1f} to {high:+.1f})"
    if args.all_prompts:
        meant = count_drafts(with_head(floats, args.source), args.source, _prompts(args))
        said += ", over the tool's own floats {:+.1f} ({:+.1f} to {:+.1f})".format(*drafts.points_over(meant))
    return drafts.exact, -points, said + ("" if drafts.exact else ", OTHER TOKENS")


def _prompts(args: argparse.Namespace) -> tuple[str, ...]:
    return ALL_PROMPTS if args.all_prompts else (*PROMPTS, *MORE_PROMPTS)


def _table(rows: list[Row]) -> str:
    lines = [
        "| tool | packed as | matrices | tokens alike | drafts accepted | |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        verdict = "" if row.fine else "**fails**"
        lines.append(f"| {row.tool} | {row.kind} | {row.said} | {row.tokens} | {row.drafts} | {verdict} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
