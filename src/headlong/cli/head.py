"""`headlong extract`, `strip` and `graft`: an MTP head taken out of a model, away from it, or put onto another.

Reads the words of the command line and prints what was written.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headlong.cli import options, written
from headlong.cli.convert import TYPES
from headlong.progress import default_progress

if TYPE_CHECKING:
    from headlong.checkpoint.checkpoint import Checkpoint

EXTRACT = """\
Tensors are copied as they are, packed or not. From GGUF to .safetensors they are unpacked into BF16, from safetensors
to .gguf they are converted. Beside a model the head is found as mtp*.safetensors or mtp-*.gguf.

examples:
  headlong extract Qwen/Qwen3.5-0.8B -o mtp.safetensors
  headlong extract model.gguf -o mtp-model.gguf
"""
STRIP = """\
A folder is written as a folder, a .gguf file as a .gguf file; all that is not the head stays byte for byte.

examples:
  headlong strip Qwen/Qwen3.5-0.8B -o ./without-head
  headlong strip model.gguf -o without-head.gguf
"""
GRAFT = """\
HEAD is a whole model or the file of a head alone. OUT is a folder, or a file that ends in .gguf. A safetensors model
gets the head as mtp.safetensors; a GGUF model gets it as one more block, or, in a folder, as a file beside it, which is
the way for architectures whose head llama.cpp does not know. The head must have been made for the same model: sizes,
vocabulary and architecture are compared.

examples:
  headlong graft ./my-int4 Qwen/Qwen3.5-0.8B -o ./my-int4-mtp
  headlong graft model-q4.gguf mtp.safetensors -o model-q4-mtp.gguf --head-type q8_0
  headlong graft smollm2.gguf mtp.safetensors -o ./smollm2-mtp
"""


def add_parser(commands: Any) -> None:
    extract = commands.add_parser(
        "extract",
        usage="headlong extract [MODEL] -o OUT [options]",
        help="write a model's MTP head to a file of its own",
        description="Writes the MTP head of a model to a file of its own.",
        epilog=EXTRACT,
    )
    options.add_model(extract)
    _add_out(extract, "the .safetensors or .gguf file to write")
    _add_head_type(extract)
    extract.set_defaults(execute=execute_extract)
    strip = commands.add_parser(
        "strip",
        usage="headlong strip [MODEL] -o OUT [options]",
        help="write a model without its MTP head",
        description="Writes a model without its MTP head.",
        epilog=STRIP,
    )
    options.add_model(strip)
    _add_out(strip, "the folder or the .gguf file to write")
    strip.set_defaults(execute=execute_strip)
    graft = commands.add_parser(
        "graft",
        usage="headlong graft BASE HEAD -o OUT [options]",
        help="put the MTP head of one checkpoint onto another",
        description="Puts the MTP head of one checkpoint onto another quantisation of the same model.",
        epilog=GRAFT,
    )
    graft.add_argument("base", metavar="BASE", help="a folder, a .gguf file or a Hugging Face repository id")
    graft.add_argument(
        "head", metavar="HEAD", help="the same, or the .safetensors or .gguf file of a head alone"
    )
    _add_out(
        graft,
        "the folder or the .gguf file to write",
        force="overwrite OUT, and replace a head that BASE has",
    )
    _add_head_type(graft)
    graft.set_defaults(execute=execute_graft)


def _add_out(parser: argparse.ArgumentParser, text: str, force: str = "overwrite OUT") -> None:
    parser.add_argument("-o", "--out", required=True, metavar="OUT", help=text)
    parser.add_argument("--force", action="store_true", help=force)


def _add_head_type(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--head-type",
        choices=TYPES,
        default="bf16",
        metavar="TYPE",
        help=f"what the head's matrices become where they enter a GGUF file: {', '.join(TYPES)} (default: bf16)",
    )


def execute_extract(args: argparse.Namespace) -> int:
    from headlong.convert.extract import extract

    progress = default_progress()
    done = extract(
        _open(args.model),
        written.out_path(args),
        head_type=args.head_type,
        force=args.force,
        progress=progress,
    )
    return written.report(done)


def execute_strip(args: argparse.Namespace) -> int:
    from headlong.convert.strip import strip

    return written.report(
        strip(_open(args.model), written.out_path(args), force=args.force, progress=default_progress())
    )


def execute_graft(args: argparse.Namespace) -> int:
    from headlong.convert.graft import graft

    base, head = (_find(word) for word in (args.base, args.head))
    progress = default_progress()
    return written.report(
        graft(
            base, head, written.out_path(args), head_type=args.head_type, force=args.force, progress=progress
        )
    )


def _open(model: str | None) -> "Checkpoint":
    from headlong.convert.head import open_artifact

    return open_artifact(_find(model))


def _find(model: str | None) -> Path:
    """A model's folder or file, or the file of a head alone."""
    from headlong.checkpoint.source import resolve

    if model is not None and model.endswith(".safetensors") and (path := Path(model).expanduser()).is_file():
        return path
    return resolve(model, progress=default_progress())
