"""What every command that writes a checkpoint needs: copies of the files beside the weights, a changed config, and a
look at the result as the engine would see it, before it gets its name.

Knows files and configs; nothing of how tensors are packed.
"""

import json
import os
import re
import tempfile
from copy import deepcopy
from pathlib import Path
from typing import Any

from headlong.checkpoint.checkpoint import CONFIG, QUANT_CONFIG, Checkpoint
from headlong.checkpoint.quant_config import EXCLUSIONS, QuantConfig
from headlong.checkpoint.shards import INDEX
from headlong.checkpoint.writing import CHUNK_BYTES
from headlong.config import EngineConfig
from headlong.convert.to_gguf import Written
from headlong.engine.build import Blueprint, survey
from headlong.errors import CheckpointError
from headlong.models import registry
from headlong.progress import ProgressFn

WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".onnx", ".msgpack", ".h5")
WRITTEN_ANEW = frozenset({CONFIG, QUANT_CONFIG, INDEX})
_USUAL_KEY = {
    "compressed-tensors": "ignore",
    "modelopt": "exclude_modules",
    "quark": "exclude",
    "bitsandbytes": "llm_int8_skip_modules",
}


def refuse_overlap(out: Path, *inputs: Path) -> None:
    """Raises where writing `out` would destroy, or become part of, what is read."""
    target = out.absolute().resolve()
    for path in inputs:
        given = path.absolute().resolve()
        if target == given or given in target.parents or target in given.parents:
            raise CheckpointError(
                f"{out}: is, holds or lies in the input {path}; name another place to write to"
            )


def other_files(folder: Path) -> list[Path]:
    """Every file of the folder that holds no weights and is copied as it is: tokenizer, templates, licences."""
    files = (path for path in sorted(folder.iterdir()) if path.is_file() and not path.name.startswith("."))
    return [path for path in files if path.suffix not in WEIGHTS and path.name not in WRITTEN_ANEW]


def copy_files(files: list[Path], folder: Path, progress: ProgressFn, label: str = "copy files") -> None:
    """Copies piece by piece, so that an interrupt is heard."""
    total, done = sum(file.stat().st_size for file in files), 0
    for file in files:
        with file.open("rb") as source, (folder / file.name).open("wb") as target:
            while piece := source.read(CHUNK_BYTES):
                target.write(piece)
                done += len(piece)
                progress(label, done, total)


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def with_head_layers(config: dict[str, Any], count: int) -> dict[str, Any]:
    """The config with the number of layers of the head changed."""
    changed = deepcopy(config)
    text = changed.get("text_config")
    (text if isinstance(text, dict) else changed)[registry.find(config).mtp.layers_field] = count
    return changed


def exclude(config: dict[str, Any], beside: dict[str, Any], modules: list[str]) -> None:
    """Changes the quantisation config in `config`, or `beside` it in hf_quant_config.json, so that it says of `modules`
    that they are left in floats, in the words of its method. Changes nothing where it says so already."""
    for place, quant in ((config, QuantConfig(config, {})), (beside, QuantConfig({}, beside))):
        if not place or quant.method is None:
            continue
        data: dict[str, Any] = quant.data  # type: ignore[assignment]
        wrong = [module for module in modules if (claim := quant.claim(module)) and claim.format is not None]
        if not wrong:
            continue
        if quant.method == "gptq":
            rules = {f"-:.*{re.escape(module)}(\\..*)?$": {} for module in wrong}
            data["dynamic"] = rules | (data.get("dynamic") or {})  # the first rule that matches decides
        elif quant.method == "mlx":
            data |= dict.fromkeys(wrong, False)
        elif quant.method == "auto-round":
            data["extra_config"] = {module: {"bits": 16} for module in wrong} | (
                data.get("extra_config") or {}
            )
        else:
            key = next((key for key in EXCLUSIONS if isinstance(data.get(key), list)), None)
            key = key or _USUAL_KEY.get(quant.method, "modules_to_not_convert")
            added = dict.fromkeys(_pattern(module, quant.method) for module in wrong)
            data[key] = [*(data.get(key) or []), *added]


def _pattern(module: str, method: str) -> str:
    """What excludes a module in the words of the method: its name, or one rule for all experts of its layer."""
    before, inside, _ = module.partition(".experts.")
    if not inside:
        return module
    experts = f"{before}.experts"
    if method == "compressed-tensors":
        return f"re:.*{re.escape(experts)}\\..*"
    return f"{experts}*" if method == "modelopt" else experts


def inspect_result(path: Path, *, head: bool) -> Blueprint:
    """Compares what was written with its model, and raises where it does not fit. A GGUF file may still have its
    temporary name."""
    options = EngineConfig(mtp="on" if head else "off")
    if path.is_dir():
        return survey(Checkpoint.open(path), options)
    with tempfile.TemporaryDirectory(prefix="headlong-") as folder:
        link = Path(folder) / "model.gguf"
        os.symlink(path.absolute(), link)
        return survey(Checkpoint.open(link), options)


def written(out: Path, blueprint: Blueprint, notes: list[str] | None = None) -> Written:
    checkpoint = blueprint.checkpoint
    has_head = blueprint.head_refusal is None
    return Written(out, checkpoint.nbytes, len(checkpoint.tensors), has_head, notes or [])
