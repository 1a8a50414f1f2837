"""What a checkpoint's quantisation config claims of each module. A hint: what the tensors say wins.

Reads the spellings of fp8, compressed-tensors, modelopt, GPTQ, AWQ, AutoRound, Quark, torchao, bitsandbytes and MLX;
what their words mean is in `quant_words.py`. Knows names of modules; no tensors. A config may be wrong in every way, so
nothing here is an error: what cannot be read is claimed of nobody.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from headlong.checkpoint import quant_words as words

EXCLUSIONS = (
    "modules_to_not_convert",
    "ignore",
    "exclude_modules",
    "ignored_layers",
    "llm_int8_skip_modules",
    "exclude",
)
"""The keys under which a config lists modules that are left in floats."""
METHODS = frozenset(
    {
        "fp8",
        "compressed-tensors",
        "modelopt",
        "gptq",
        "awq",
        "auto-round",
        "quark",
        "bitsandbytes",
        "mxfp4",
        "mlx",
        "torchao",
    }
)
"""The methods that a `quant_method` may name whose tensors Headlong reads, as far as they are of a known format."""
MAX_PATTERN, MAX_NAME, MAX_REPETITIONS = 500, 300, 4
_REPEATED_GROUP = re.compile(r"\)[*+{]|\\[1-9]|\(\?P=")
_REPETITION = re.compile(r"[*+{]")
"""What makes a regular expression slow. Without repeated groups and with few repetitions, matching takes at most a
small power of the name's length."""


@dataclass(frozen=True)
class Claim:
    """What the config says of one module. `format` is None where it says that the module is left in floats."""

    format: str | None
    rule: str
    hint: Mapping[str, Any] = field(default_factory=dict)
    activations: str | None = None
    """What the config makes of the module's input, where it quantises that, too."""
    or_floats: bool = False
    """Whether the module may as well be in floats: its tool has a list of its own of what it leaves alone."""


class QuantConfig:
    """`quantization_config` (or MLX's `quantization`) of config.json, else what hf_quant_config.json holds."""

    def __init__(
        self, config: Mapping[str, Any], beside: Mapping[str, Any], older: Mapping[str, Any] | None = None
    ) -> None:
        """`older` is what quantize_config.json holds, in which GPTQ's tools once wrote what config.json says now."""
        text = config.get("text_config")
        nested = text.get("quantization_config") if isinstance(text, Mapping) else None
        found = config.get("quantization_config") or nested or config.get("quantization")
        if not isinstance(found, Mapping):
            found = beside.get("quantization")
        self.older: Mapping[str, Any] = older or {}
        if not isinstance(found, Mapping) and "bits" in self.older:
            found = {"quant_method": "gptq"} | dict(self.older)
        self.data: Mapping[str, Any] = found if isinstance(found, Mapping) else {}
        method = self.data.get("quant_method") or ("modelopt" if "quant_algo" in self.data else None)
        if method is None and "group_size" in self.data and "bits" in self.data:
            method = "mlx"
        self.method = method if isinstance(method, str) else None

    @property
    def rotation(self) -> str | None:
        """Where the config says that inputs of matrices are rotated as the model runs; None where it does not."""
        return words.rotation(self.data, self.older)

    def claim(self, *names: str) -> Claim | None:
        """What the config says of a module that goes by these `names`; None where there is no config."""
        if self.method is None:
            return None
        for pattern in self._excluded():
            if any(_matches(pattern, name) for name in names):
                return Claim(None, f"{pattern!r} is excluded")
        claims = {
            "compressed-tensors": self._compressed,
            "modelopt": self._modelopt,
            "fp8": self._fp8,
            "gptq": self._gptq,
            "mlx": self._mlx,
            "auto-round": self._auto_round,
            "quark": self._quark,
            "torchao": self._torchao,
        }
        return claims.get(self.method, self._everywhere)(names)

    def _excluded(self) -> Iterable[str]:
        for key in EXCLUSIONS:
            yield from _strings(self.data.get(key))

    def _hint(self, known: Mapping[str, Any] | None = None) -> dict[str, Any]:
        keys = ("bits", "group_size", "weight_block_size", "mode", "desc_act")
        given = {key: self.data[key] for key in keys if self.data.get(key) is not None}
        return {"method": self.method} | given | words.gptq_hint(self.data, self.older) | dict(known or {})

    def _everywhere(self, names: tuple[str, ...]) -> Claim:
        if self.method in ("fp8", "awq", "bitsandbytes", "mxfp4") and _is_outside_layers(names):
            return Claim(None, f"{self.method} quantises layers")
        format = words.bitsandbytes(self.data) if self.method == "bitsandbytes" else self.method
        activations = None
        if self.method == "fp8" and isinstance(self.data.get("activation_scheme"), str):
            activations = f"fp8, {self.data['activation_scheme']}"
        return Claim(format, f"quant_method {self.method!r}", self._hint(), activations)

    def _fp8(self, names: tuple[str, ...]) -> Claim:
        """Modules that modelopt has quantised anew in an FP8 checkpoint are listed by it; the others are FP8."""
        return self._listed(names) or self._everywhere(names)

    def _compressed(self, names: tuple[str, ...]) -> Claim:
        best: Claim | None = None
        for label, group in _objects(self.data.get("config_groups")):
            weights = group.get("weights")
            if not isinstance(weights, Mapping):
                continue
            for target in _strings(group.get("targets")):
                if target != "Linear" and not any(_matches(target, name) for name in names):
                    continue
                bits, group_size = weights.get("num_bits"), weights.get("group_size")
                known = {
                    "bits": bits,
                    "group_size": group_size,
                    "weight_block_size": weights.get("block_structure"),
                    "weights": weights,
                    "symmetric": weights.get("symmetric"),
                    "desc_act": weights.get("actorder") in words.ORDERED_GROUPS,
                }
                claim = Claim(
                    words.numbers(weights),
                    f"{label} targets {target!r}",
                    self._hint(known),
                    words.activations(group.get("input_activations")),
                )
                if target != "Linear":
                    return claim
                best = best or claim
        if best is not None and any("embed_tokens" in name for name in names):
            best = None
        return best or Claim(None, "no config group targets it")

    def _listed(self, names: tuple[str, ...]) -> Claim | None:
        """What modelopt's list of quantised modules says of this one; None where it is not among them."""
        for module, entry in _objects(self.data.get("quantized_layers")):
            if any(_matches(module, name) for name in names):
                algorithm = entry.get("quant_algo")
                rule = f"quantized_layers: {module} is {algorithm}"
                return Claim(*words.algorithm(algorithm, rule, self._hint(entry)))
        return None

    def _modelopt(self, names: tuple[str, ...]) -> Claim:
        if (listed := self._listed(names)) is not None:
            return listed
        algorithm = self.data.get("quant_algo")
        if self.data.get("quantized_layers") or any("embed_tokens" in name for name in names):
            return Claim(
                None, "not among quantized_layers" if self.data.get("quantized_layers") else "an embedding"
            )
        return Claim(*words.algorithm(algorithm, f"quant_algo {algorithm!r}", self._hint()))

    def _gptq(self, names: tuple[str, ...]) -> Claim:
        packs_lm_head = self.data.get("lm_head") is True and any("lm_head" in name for name in names)
        if _is_outside_layers(names) and not packs_lm_head:
            return Claim(None, "GPTQ quantises layers")
        for rule, changes in _objects(self.data.get("dynamic")):
            sign, _, pattern = rule.partition(":") if rule[:2] in ("+:", "-:") else ("+", "", rule)
            if any(_searches(pattern, name) for name in names):
                if sign == "-":
                    return Claim(None, f"dynamic rule {rule!r}")
                return Claim("gptq", f"dynamic rule {rule!r}", self._hint(changes))
        hint = self._hint()
        return Claim("gptq", "quant_method 'gptq'", hint, or_floats=hint.get("writer") == "gptqmodel")

    def _mlx(self, names: tuple[str, ...]) -> Claim:
        for name in names:
            own = self.data.get(name)
            if own is False:
                return Claim(None, f"{name!r} is false")
            if isinstance(own, Mapping):
                return Claim(words.mlx(own), f"{name!r} has its own entry", self._hint(own))
        return Claim(words.mlx(self.data), "the checkpoint is MLX-quantised", self._hint())

    def _auto_round(self, names: tuple[str, ...]) -> Claim:
        data = dict(self.data)
        for rule, own in _objects(self.data.get("extra_config")):
            if any(rule == name or _searches(rule, name) for name in names):
                if isinstance(bits := own.get("bits"), int) and bits >= 16:
                    return Claim(None, f"extra_config: {rule!r} has {bits} bits")
                return self._rounded(data | dict(own), f"extra_config: {rule!r}")
        blocks = self.data.get("block_name_to_quantize")
        blocks = [b.strip() for b in blocks.split(",")] if isinstance(blocks, str) else _strings(blocks)
        if _is_outside_layers(names) or (
            blocks and not any(name.startswith(block) for name in names for block in blocks)
        ):
            return Claim(None, "AutoRound quantises blocks")
        return self._rounded(data, "quant_method 'auto-round'")

    def _rounded(self, data: Mapping[str, Any], rule: str) -> Claim:
        known = {key: data[key] for key in ("bits", "group_size") if data.get(key) is not None}
        known |= {"symmetric": data.get("sym")} | words.auto_round_hint(data)
        return Claim(words.auto_round(data), rule, self._hint(known), words.auto_round_activations(data))

    def _quark(self, names: tuple[str, ...]) -> Claim:
        rule, chosen = "global_quant_config", self.data.get("global_quant_config")
        for pattern, own in _objects(self.data.get("layer_quant_config")):
            if any(_matches(pattern, name) for name in names):
                rule, chosen = f"layer_quant_config: {pattern!r}", own
                break
        weight = chosen.get("weight") if isinstance(chosen, Mapping) else None
        if not isinstance(weight, Mapping) or _is_outside_layers(names):
            return Claim(None, "Quark quantises linears in layers" if weight else f"{rule} has no weight")
        hint = self._hint(words.quark_hint(self.data, weight))
        return Claim(words.quark(weight), rule, hint, words.quark_activations(chosen))

    def _torchao(self, names: tuple[str, ...]) -> Claim:
        if _is_outside_layers(names) and not self.data.get("include_input_output_embeddings"):
            return Claim(None, "include_input_output_embeddings is not true")
        for module, own in _objects(words.torchao_modules(self.data)):
            if any(_matches(module, name) for name in names):
                hint = self._hint(words.torchao_hint(own))
                return Claim("torchao" if own else None, f"quant_type: {module!r}", hint)
        hint = self._hint(words.torchao_hint(self.data.get("quant_type")))
        return Claim("torchao", "quant_method 'torchao'", hint)


def _is_outside_layers(names: tuple[str, ...]) -> bool:
    return any(part in name for name in names for part in ("embed_tokens", "lm_head"))


def _strings(value: Any) -> list[str]:
    """The strings of a list; a string that stands alone counts as a list of one."""
    listed = value if isinstance(value, list) else [value]
    return [entry for entry in listed if isinstance(entry, str)]


def _objects(value: Any) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """The entries of a mapping that are mappings themselves; null counts as an empty one."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            if isinstance(key, str):
                yield key, entry if isinstance(entry, Mapping) else {}


def _matches(pattern: str, name: str) -> bool:
    """Whether `pattern` matches a module's name. It may be the name, whole words of it between dots, a shell pattern of
    the name or of what it is in, or a regular expression behind `re:`."""
    if pattern.startswith("re:"):
        return _searches(pattern[3:], name)
    if f".{pattern.strip('.')}." in f".{name}.":
        return True
    if not any(c in pattern for c in "*?["):
        return False
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def _searches(pattern: str, name: str) -> bool:
    """Matches a regular expression at the name's beginning. Expressions that could take for ever match nothing."""
    if len(pattern) > MAX_PATTERN or len(name) > MAX_NAME or _REPEATED_GROUP.search(pattern):
        return False
    if len(_REPETITION.findall(pattern)) > MAX_REPETITIONS:
        return False
    try:
        return re.match(pattern, name) is not None
    except (re.error, OverflowError, RecursionError):
        return False
