"""`headlong convert`: a model from safetensors to GGUF or back. Chooses the direction and prints what was written."""

import argparse
from typing import Any

from headlong.cli import written
from headlong.progress import default_progress

TYPES = ("bf16", "f16", "f32", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1")
EPILOG = """\
OUT ends in .gguf: the model is written as one GGUF file, MTP head included, that llama.cpp reads too. Otherwise OUT
is a folder, MODEL must be GGUF, and everything is unpacked into safetensors. Matrices take --type; vectors,
convolutions and routers stay f32 in GGUF, and rows that blocks of 32 do not fill become f16. Below eight bits the
embedding and lm_head are q8_0. The output appears under its name only when it is whole.

examples:
  headlong convert tale-20m -o tale.gguf --type q8_0
  headlong convert Qwen/Qwen3.5-0.8B -o qwen.gguf --type q4_0 --head-type bf16
  headlong convert qwen.gguf -o ./qwen
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "convert",
        usage="headlong convert MODEL -o OUT [options]",
        help="write a model as GGUF, or a GGUF as safetensors",
        description="Writes a model, its MTP head and its tokenizer as GGUF, or a GGUF as a folder of safetensors.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "model", metavar="MODEL", help="a folder, a .gguf file or a Hugging Face repository id"
    )
    parser.add_argument(
        "-o", "--out", required=True, metavar="OUT", help="the .gguf file or the folder to write"
    )
    parser.add_argument(
        "--type", choices=TYPES, default="bf16", metavar="TYPE", help=f"{', '.join(TYPES)} (default: bf16)"
    )
    parser.add_argument(
        "--head-type", choices=TYPES, metavar="TYPE", help="of the MTP head's matrices (default: --type)"
    )
    parser.add_argument("--force", action="store_true", help="overwrite OUT")
    parser.set_defaults(execute=execute)


def execute(args: argparse.Namespace) -> int:

    from headlong.checkpoint.checkpoint import Checkpoint
    from headlong.checkpoint.source import resolve
    from headlong.convert.from_gguf import from_gguf
    from headlong.convert.to_gguf import to_gguf

    progress = default_progress()
    out = written.out_path(args)
    checkpoint = Checkpoint.open(resolve(args.model, progress=progress))
    write = to_gguf if out.suffix == ".gguf" else from_gguf
    done = write(
        checkpoint, out, type=args.type, head_type=args.head_type, force=args.force, progress=progress
    )
    return written.report(done)
