"""Writes docs/models.md, the table of the models that are served, from the registry.

`python -m headlong.cli.models_table` writes it; nothing needs it while a model runs.
"""

from pathlib import Path

from headlong.models.family import Family
from headlong.models.registry import FAMILIES

HEAD = """\
# Models

One row for each `model_type` of a config.json; this page is written from the code by
`python -m headlong.cli.models_table`. Every model is read from safetensors in each format of
[Checkpoints](checkpoints.md), plain or packed, and runs in all backends: the reference, the native CPU library and
Triton. The same tokens come out with drafting on and off. A model without a head of its own drafts with n-grams, with a
smaller model of the same vocabulary, or with a head that was trained for it, under `mtp.*` inside or beside it.

| `model_type` | releases | GGUF | MTP head | tested against |
|---|---|---|---|---|
"""
TAIL = """
Where no release brings a head, `mtp.*` are the names of one that is grafted. N counts the layers of a head, after the
model's own where it says `model.layers.N`. Copies of the embedding and of the lm_head that a head's layers hold are
compared with the target's and not loaded.

Layers with a window (`sliding_window`, by `layer_types` or by a family's own rule) attend through it, and keep keys and
values of the whole sequence like others. Files of llama.cpp can name a window for `gpt-oss` alone; of other models with
one they say that the context ends where the window does. A `model_type` that is not listed is refused with the name of
the nearest that is.
"""


def page() -> str:
    return HEAD + "".join(f"{_row(kind, family)}\n" for kind, family in FAMILIES.items()) + TAIL


def _row(kind: str, family: Family) -> str:
    arch = "–" if family.gguf is None else f"`{family.gguf.arch}`"
    return f"| `{kind}` | {family.releases} | {arch} | {_head(family)} | {family.oracle} |"


def _head(family: Family) -> str:
    naming, spec = family.naming, family.mtp
    if spec.refusal is not None:
        return f"refused: {spec.refusal}"
    where = "mtp." if naming.head_layer is None else f"model.{naming.head_layer}"
    where = where.replace("{block}", "N").replace("{k}", "N")
    order = ", the hidden state first" if spec.order == "hidden_first" else ""
    return f"`{where}*`{order}"


def main(path: Path) -> None:
    path.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main(Path("docs/models.md"))
