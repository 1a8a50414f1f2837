"""The MTP head of a model as a file of its own. Knows no command line."""

from pathlib import Path

from headlong.checkpoint.checkpoint import Checkpoint
from headlong.checkpoint.gguf_writing import write_gguf
from headlong.checkpoint.writing import replacing, write_safetensors
from headlong.convert.folder import refuse_overlap
from headlong.convert.head import open_artifact, require_head
from headlong.convert.head_entries import gguf_head, head_file_metadata, head_metadata, safetensors_head
from headlong.convert.to_gguf import Written
from headlong.errors import CheckpointError
from headlong.progress import ProgressFn, silent

SUFFIXES = (".safetensors", ".gguf")


def extract(
    checkpoint: Checkpoint,
    out: Path,
    *,
    head_type: str = "bf16",
    force: bool = False,
    progress: ProgressFn = silent,
) -> Written:
    """Writes the head of `checkpoint` to the file `out`. `head_type` is the type of its matrices if `out` is a GGUF
    file."""
    if out.suffix not in SUFFIXES:
        raise CheckpointError(f"{out}: the name of a head's file must end in {' or '.join(SUFFIXES)}")
    require_head(checkpoint)
    refuse_overlap(out, checkpoint.folder)
    with replacing(out, force=force) as partial:
        if out.suffix == ".gguf":
            entries = gguf_head(checkpoint, head_type)
            write_gguf(partial, head_file_metadata(checkpoint), entries, progress, "write head")
        else:
            entries = safetensors_head(checkpoint)
            write_safetensors(partial, entries, head_metadata(checkpoint), progress, "write head")
    notes = []
    if not out.name.startswith("mtp-" if out.suffix == ".gguf" else "mtp"):
        notes.append(
            f"beside a model the head is found only under a name that begins with mtp, unlike {out.name}"
        )
    return Written(out, open_artifact(out).nbytes, len(entries), True, notes)
