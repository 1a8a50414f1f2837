"""Feeds a target of targets.py with atheris, guided by coverage; `make fuzz` calls it for each. What breaks a
promise is kept in found/TARGET, where every test run reads it.

python tests/fuzz/run.py TARGET [libFuzzer's flags]
"""

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["headlong"]):
    import targets

    targets.TARGETS[sys.argv[1]](next(targets.seeds(sys.argv[1])))  # imports what it reads with


def main() -> None:
    name, *flags = sys.argv[1:]
    corpus = Path(tempfile.mkdtemp(prefix=f"headlong-corpus-{name}-"))
    for number, seed in enumerate(targets.seeds(name)):
        (corpus / f"seed{number}").write_bytes(seed)
    kept = Path(__file__).parent / "found" / name
    kept.mkdir(parents=True, exist_ok=True)
    words = [sys.argv[0], str(corpus), str(kept), f"-artifact_prefix={kept}/", *flags]
    atheris.Setup(words, targets.TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
