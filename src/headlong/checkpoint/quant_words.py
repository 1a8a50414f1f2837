"""What the words of quantisation configs mean: names of algorithms and of numbers, as names of Headlong's formats.

Whatever a config holds, nothing here is an error: what is not known is passed on as it is written. Knows no modules.
"""

from collections.abc import Mapping
from typing import Any

from headlong.quant.zero_points import DISPUTED

_ALGORITHMS = {
    "FP8": "fp8",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8",
    "FP8_PB_WO": "fp8",
    "FP8_PB_REAL": "fp8",
    "NVFP4": "nvfp4",
    "NVFP4_AWQ": "nvfp4",
    "W4A16_NVFP4": "nvfp4",
    "W4A8_NVFP4": "nvfp4",
    "W4A8_NVFP4_FP8": "nvfp4",
    "INT8": "int8",
    "W8A8_SQ_PER_CHANNEL": "int8",
    "W8A16": "int8",
    "INT8_SQ": "int8",
    "INT8_WO": "int8",
    "W4A16_AWQ": "int4",
    "W4A8_AWQ": "int4",
    "INT4_AWQ": "int4",
    "MXFP4": "mxfp4",
    "W4A8_MXFP4_FP8": "mxfp4",
    "MXFP8": "mxfp8",
}
_WEIGHTS_ONLY = ("W4A16_NVFP4", "W4A16_AWQ", "INT4_AWQ", "W8A16", "INT8_WO", "FP8_PB_WO", "INT8")
"""The algorithms of modelopt that leave activations alone."""
ORDERED_GROUPS = ("group", "dynamic", True)
"""The `actorder` of compressed-tensors under which each column has a group of its own choice."""
_QUARK = {
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "fp4": "mxfp4",
    "mxfp4": "mxfp4",
    "uint4": "quark int4",
    "int4": "quark int4",
    "uint8": "int8",
}


def algorithm(name: Any, rule: str, hint: dict[str, Any]) -> tuple[str, str, dict[str, Any], str | None]:
    """What modelopt's name of an algorithm claims, with the rule and the hint as they were given."""
    if not isinstance(name, str):
        return "unknown", rule, hint, None
    known = name.upper()  # some are written in small letters
    activations = name if known in _ALGORITHMS and known not in _WEIGHTS_ONLY else None
    return _ALGORITHMS.get(known, name.lower()), rule, hint, activations


def numbers(weights: Mapping[str, Any]) -> str:
    """The format of compressed-tensors' `weights`."""
    bits, group = weights.get("num_bits"), weights.get("group_size")
    if weights.get("type") == "float":
        if bits == 4:
            return "mxfp4" if group == 32 else "nvfp4"
        if bits == 8:
            return "mxfp8" if "uint8" in str(weights.get("scale_dtype")) else "fp8"
        return f"fp{bits}"
    return f"int{bits}" if isinstance(bits, int) and 0 < bits < 8 else "int8"


def activations(given: Any) -> str | None:
    """What compressed-tensors' `input_activations` ask for; None where they are left alone."""
    if not isinstance(given, Mapping) or not given:
        return None
    kind = "fp" if given.get("type") == "float" else "int"
    bits = given.get("num_bits")
    return (
        f"{kind}{bits}, {'dynamic' if given.get('dynamic') else 'static'}" if isinstance(bits, int) else None
    )


def gptq_hint(data: Mapping[str, Any], older: Mapping[str, Any]) -> dict[str, Any]:
    """The `checkpoint_format` that the config and quantize_config.json name, and who wrote the model."""
    named = {found for section in (data, older) if isinstance(found := section.get("checkpoint_format"), str)}
    hint: dict[str, Any] = {}
    if named:
        hint["checkpoint_format"] = named.pop() if len(named) == 1 else DISPUTED
    for section in (data, older):
        meta = section.get("meta")
        writers = meta.get("quantizer") if isinstance(meta, Mapping) else None
        writers = writers if isinstance(writers, list) else [writers]
        if any(isinstance(writer, str) and writer.lower().startswith("gptqmodel") for writer in writers):
            hint["writer"] = "gptqmodel"
    return hint


def mlx(data: Mapping[str, Any]) -> str:
    mode = data.get("mode")
    return mode if mode in ("mxfp4", "mxfp8", "nvfp4") else "mlx"


def bitsandbytes(data: Mapping[str, Any]) -> str:
    if data.get("load_in_4bit") or data.get("_load_in_4bit"):
        kind = data.get("bnb_4bit_quant_type")
        return kind if isinstance(kind, str) else "fp4"
    return "int8"


def auto_round(data: Mapping[str, Any]) -> str:
    packing, kind, bits = _packing(data), str(data.get("data_type", "int")), data.get("bits")
    if "awq" in packing:
        return "awq"
    for prefix, format in (("mx", f"mxfp{bits}"), ("nv", "nvfp4"), ("fp", "fp8")):
        if kind.startswith(prefix):
            return format
    return f"int{bits}" if "llm_compressor" in packing or "llmcompressor" in packing else "gptq"


def auto_round_hint(data: Mapping[str, Any]) -> dict[str, Any]:
    """AutoRound's own packing stores zero points as they are; what it writes for GPTQ's readers stores them less
    one."""
    packing = _packing(data)
    if not packing or "awq" in packing:
        return {}
    is_first = "gptq" in packing and "gptqmodel" not in packing
    return {"checkpoint_format": "gptq" if is_first else "gptq_v2"}


def auto_round_activations(data: Mapping[str, Any]) -> str | None:
    bits = data.get("act_bits")
    return f"{bits} bits" if isinstance(bits, int) and bits < 16 else None


def _packing(data: Mapping[str, Any]) -> str:
    packing = data.get("packing_format") or data.get("backend")
    return packing if isinstance(packing, str) else ""


def torchao_modules(data: Mapping[str, Any]) -> Any:
    """How modules are packed that have a way of their own, by name; null leaves one alone."""
    given = data.get("quant_type")
    given = given.get("default") if isinstance(given, Mapping) else None
    if not isinstance(given, Mapping) or "fqn" not in str(given.get("_type")).lower():
        return {}
    inner = given.get("_data")
    if not isinstance(inner, Mapping):
        return {}
    modules = next((value for value in inner.values() if isinstance(value, Mapping)), {})
    return {name: own for name, own in modules.items() if name != "_default"}


def torchao_hint(way: Any) -> dict[str, Any]:
    """Whether codes have zero points, of a way to pack: the word stands at some depth of it."""
    if not isinstance(way, Mapping):
        return {}
    mapping = way.get("mapping_type")
    if isinstance(mapping, Mapping) and isinstance(mapping.get("_data"), str):
        return {"symmetric": mapping["_data"] != "ASYMMETRIC"}
    if str(way.get("_type")).startswith("Int8WeightOnly"):
        return {"symmetric": True}
    inner = (way.get(key) for key in ("default", "_data"))
    return next((found for each in inner if (found := torchao_hint(each))), {})


def rotation(data: Mapping[str, Any], older: Mapping[str, Any]) -> str | None:
    """Where the config says that inputs of matrices are rotated as the model runs. The matrices hold the inverse, and
    no tensor need say so. Rotations that are part of the weights change nothing."""
    if data.get("rotation_config"):
        return "rotation_config"
    for section in (data, older):  # GPT-QModel
        if section.get("rotation") or _mapping(section.get("meta")).get("rotation"):
            return "rotation"
    for scheme in _mappings(_mapping(_mapping(data.get("transform_config")).get("config_groups")).values()):
        for place in _mappings(scheme.get("apply")):
            if not str(place.get("location")).startswith("weight_"):
                return f"transform_config: location {place.get('location')!r}"
    for algorithm in _mappings(data.get("algo_config")):
        for key in ("r4", "online_r1_rotation"):
            if algorithm.get("name") in ("rotation", "quarot") and algorithm.get(key):
                return f"algo_config: {key}"
    return None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _mappings(values: Any) -> list[Mapping[str, Any]]:
    """The mappings among some values; a mapping that stands alone counts as a list of one."""
    if isinstance(values, Mapping):
        values = [values]
    try:
        return [value for value in values or () if isinstance(value, Mapping)]
    except TypeError:
        return []


def quark(weight: Mapping[str, Any]) -> str:
    kind = str(weight.get("dtype"))
    return _QUARK.get(kind, kind)


def quark_hint(data: Mapping[str, Any], weight: Mapping[str, Any]) -> dict[str, Any]:
    """How codes lie in words, and of what they are."""
    export = data.get("export")
    method = export.get("pack_method") if isinstance(export, Mapping) else None
    return {"dtype": weight.get("dtype"), "pack_method": method, "symmetric": weight.get("symmetric")}


def quark_activations(chosen: Any) -> str | None:
    given = chosen.get("input_tensors") if isinstance(chosen, Mapping) else None
    return str(given.get("dtype")) if isinstance(given, Mapping) else None
