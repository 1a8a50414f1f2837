"""`headlong quantize`: a model rounded to fewer bits. Reads the command line and prints what was written."""

import argparse
from typing import Any

from headlong.cli import options
from headlong.cli.written import out_path, report
from headlong.progress import default_progress

FORMATS = ("fp8", "fp8_block", "int8", "int4", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1")
EPILOG = """\
Rounds to nearest, without calibration. fp8, int8 and int4 are written as a folder that transformers with
compressed-tensors reads: one scale per row, or for int4 per group. fp8_block has scales for blocks of 128 by 128. The
others are block types of GGUF; OUT must end in .gguf. The layers' matrices are packed; embedding, lm_head, norms,
routers and small gates stay as they are, and so does the MTP head unless --head says otherwise.

examples:
  headlong quantize Qwen/Qwen3.5-0.8B -o ./qwen-int4 --format int4
  headlong quantize Qwen/Qwen3.5-0.8B -o ./qwen-fp8 --format fp8 --head fp8
  headlong quantize Qwen/Qwen3.5-0.8B -o qwen-q4_0.gguf --format q4_0 --head q8_0
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "quantize",
        usage="headlong quantize [MODEL] -o OUT --format FORMAT [options]",
        help="write a model in FP8, INT8, INT4 or as packed GGUF",
        description="Rounds a model to fewer bits; its MTP head is kept, or packed in a format of its own.",
        epilog=EPILOG,
    )
    options.add_model(parser)
    parser.add_argument(
        "-o", "--out", required=True, metavar="OUT", help="the folder or the .gguf file to write"
    )
    parser.add_argument("--format", required=True, choices=FORMATS, metavar="FORMAT", help=", ".join(FORMATS))
    parser.add_argument(
        "--group-size",
        type=options.whole,
        default=128,
        metavar="N",
        help="of int4: weights that share a scale (default: 128)",
    )
    parser.add_argument(
        "--head",
        default="keep",
        metavar="FORMAT",
        help="keep the MTP head as it is, or its own format (default: keep)",
    )
    parser.add_argument(
        "--force", action="store_true", help="overwrite OUT, and take a model that is quantised already"
    )
    parser.set_defaults(execute=execute)


def execute(args: argparse.Namespace) -> int:
    from headlong.checkpoint.checkpoint import Checkpoint
    from headlong.checkpoint.source import resolve
    from headlong.convert.quantize import quantize

    progress = default_progress()
    done = quantize(
        Checkpoint.open(resolve(args.model, progress=progress)),
        out_path(args),
        format=args.format,
        head=args.head,
        group_size=args.group_size,
        force=args.force,
        progress=progress,
    )
    return report(done)
