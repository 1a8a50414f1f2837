"""What a replica's texts depend on besides the requests, as one short word. Replicas whose words are equal go on with
each other's streams.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headlong.engine.service import Service
from headlong.ops import native
from headlong.version import __version__

SMALL_BYTES = 4 << 20
"""Files up to this size are read as a whole."""
SAMPLE_BYTES = 1 << 16
SAMPLES = 32
"""Parts of a larger file that are read, spread over it."""
VARIABLES = ("HEADLONG_NATIVE", "HEADLONG_TRITON", "MKL_CBWR")
"""Variables of the environment that choose who computes."""


def of_model(path: Path) -> str:
    """Names a model by its files: small ones by all they hold, large ones by their size and parts of them."""
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file())
    found = hashlib.sha256()
    for file in files:
        found.update(f"{file.name} {file.stat().st_size}\n".encode())
        for part in _parts(file):
            found.update(part)
    return found.hexdigest()[:16]


def of_engine(service: Service, model: str) -> str:
    """Names all that a text can depend on, but for the request: the model, the build, the machine, the context."""
    engine = service.engine
    facts: dict[str, Any] = {
        name: engine.conditions[name] for name in ("dtype", "device", "threads", "torch")
    }
    facts |= {
        "model": model,
        "version": __version__,
        "native": _native(),
        "environment": {name: os.environ.get(name) for name in VARIABLES},
        "max_len": engine.max_len,
        "page_size": engine.state.page_size,
        "eos_ids": sorted(service.eos_ids),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _native() -> str | None:
    """The build of the native kernels, by what is in its file; None where they do not serve."""
    library = native.library()
    return None if library is None else hashlib.sha256(Path(library._name).read_bytes()).hexdigest()[:16]


def _parts(file: Path) -> Iterator[bytes]:
    size = file.stat().st_size
    with file.open("rb") as opened:
        if size <= SMALL_BYTES:
            yield opened.read()
            return
        for number in range(SAMPLES):
            opened.seek(number * (size - SAMPLE_BYTES) // (SAMPLES - 1))
            yield opened.read(SAMPLE_BYTES)
