"""What an artifact is compared by: matrices, next tokens and their log-probabilities, and how many drafts are accepted.

The truth is a model of floats: what the tool itself unpacks from what it wrote, and where it says nothing the source's
own tensors. Knows no tools.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from headlong import LLM, SamplingParams
from headlong.checkpoint.checkpoint import Checkpoint
from headlong.checkpoint.load import WeightLoader
from headlong.cli.facts import gather
from headlong.config import EngineConfig
from headlong.convert.graft import graft
from headlong.engine.build import STORED_DTYPES, Blueprint, survey
from headlong.progress import silent

PROMPTS = (
    "Write a short story about a mouse who wants to see the sea.",
    "Explain why the sky is blue to a child.",
    "Give me three tips for learning a language.",
    "Write a short poem about a quiet river.",
)
TOPICS = {
    "Write a short story about {}.": (
        "a shy dragon who learns to share",
        "a lighthouse keeper and a lost whale",
        "two friends who build a kite",
        "a clock that runs backwards",
        "a baker who finds a magic spoon",
    ),
    "Explain {} to a child.": ("rain", "how bees make honey", "gravity", "sleep", "the moon"),
    "Give me three tips for {}.": (
        "sleeping better",
        "saving money",
        "growing tomatoes",
        "staying calm",
        "cooking rice",
    ),
    "Write a short poem about {}.": ("autumn", "my cat", "the first snow"),
    "Write a letter to {}.": (
        "a friend about a new puppy",
        "a teacher to say thank you",
        "my future self",
        "the mayor",
    ),
    "Write a dialogue between {}.": (
        "a cat and a dog",
        "the sun and the moon",
        "a boy and a robot",
        "two old trees",
    ),
}
MORE_PROMPTS = tuple(template.format(topic) for template, topics in TOPICS.items() for topic in topics)
"""Drafts are counted over these, too: each model has a text of its own, so that few would say little."""
ALL_PROMPTS = tuple(
    template.format(topic) for template in TOPICS for topics in TOPICS.values() for topic in topics
)
"""Every question about everything, for what is to be known to a point."""
RESAMPLED = 4000
TOKENS, DRAFT_TOKENS = 80, 3
DRAFTED_TOKENS = 120
CLOSE = 2**-7
"""How far a weight may be from the tool's, in parts of the matrix's largest: tools unpack to bfloat16."""
ROWS = 16
"""Rows of a matrix that are kept as a fixture."""
_WRAPPERS = ("", "model.", "model.language_model.", "language_model.model.", "language_model.")


@dataclass(frozen=True)
class Tokens:
    """How a checkpoint compares with the tool's own floats over all tokens of the prompts' answers."""

    count: int
    alike: int
    """Tokens that come next in both."""
    off: float
    """How far log-probabilities are apart, on average."""


@dataclass(frozen=True)
class Matrices:
    """What an artifact's matrices are, beside what the tool says of them."""

    labels: list[str]
    """Their formats."""
    worst: float
    """The largest part of a matrix's weights that are not the tool's."""
    bits: float
    """The fewest bits that a code has; of codes that lie in wider ones as many as their range takes."""


@dataclass(frozen=True)
class Drafts:
    """What drafting gives."""

    exact: bool
    """Whether tokens are those of plain decoding."""
    drafted: Tensor
    """How many tokens were drafted for each prompt."""
    accepted: Tensor

    @property
    def rate(self) -> float:
        """The part of drafts that is accepted."""
        return float(self.accepted.sum() / self.drafted.sum())

    def points_over(self, other: "Drafts") -> tuple[float, float, float]:
        """How many points the rate is above another's over the same prompts, and the 95% interval of that, prompts
        resampled."""
        chance = torch.Generator().manual_seed(1)
        count = len(self.drafted)
        some = torch.randint(0, count, (RESAMPLED, count), generator=chance)
        rates = [each.accepted[some].sum(1) / each.drafted[some].sum(1) for each in (self, other)]
        low, high = (rates[0] - rates[1]).quantile(torch.tensor([0.025, 0.975], dtype=torch.double)).tolist()
        return 100 * (self.rate - other.rate), 100 * low, 100 * high


def found_in(meant: dict[str, Tensor], name: str) -> Tensor | None:
    """What the tool says of a tensor, by its canonical name."""
    return next((meant[wrapper + name].float() for wrapper in _WRAPPERS if wrapper + name in meant), None)


def pairs(blueprint: Blueprint, meant: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Matrices by canonical name with what the tool says that they mean."""
    for name in blueprint.formats:
        if (found := found_in(meant, name)) is not None:
            yield name, found


def compare_weights(blueprint: Blueprint, meant: dict[str, Tensor]) -> Matrices:
    """Every matrix that the tool says something of, weight by weight."""
    loader = WeightLoader(blueprint.names, blueprint.detector, torch.float32, "cpu", keep_stored=True)
    worst, labels, bits = 0.0, set(), [float("inf")]
    for name, wanted in pairs(blueprint, meant):
        weight = loader.matrix(name, *wanted.shape)
        found = weight.float() if isinstance(weight, Tensor) else weight.dequantize(0, weight.out_features)
        far = (found - wanted).abs() > CLOSE * wanted.abs().max()
        worst = max(worst, float(far.float().mean()))
        labels.add(blueprint.formats[name].label)
        if not isinstance(weight, Tensor):
            codes = weight.grouping()
            bits.append((codes.highest - codes.lowest).bit_length() if codes else weight.format.bits)
    return Matrices(sorted(labels) or ["nothing to compare"], worst if labels else float("inf"), min(bits))


def inspected(packed: Path, meant: dict[str, Tensor], *, quantises_inputs: bool) -> str | None:
    """What `headlong inspect` says wrongly of an artifact: of a matrix that the tool left alone that it is packed, that
    the config is false, that it cannot be served; or what it leaves out. None if all is right."""
    facts = gather(str(packed), EngineConfig(device="cpu"), silent, every=True, context=None, batch=1)
    if not facts.servable:
        return f"cannot be served: {facts.reason}"
    told = [module for module in facts.modules if module.format not in STORED_DTYPES]
    for module in told:
        if found_in(meant, module.name) is None:
            return f"{module.name} is told as {module.format}"
    if false := [module for module in facts.modules if re.search("the config (says|names)", module.reason)]:
        return f"{false[0].name}: {false[0].reason}"
    inputs = {"activations" in module.reason for module in told}
    if not told or inputs != {quantises_inputs}:
        return f"activations are {'' if True in inputs else 'not '}mentioned"
    return None


def write_floats(source: Path, meant: dict[str, Tensor], folder: Path) -> None:
    """The source with the tool's own numbers, in float32."""
    checkpoint = Checkpoint.open(source)
    tensors = {}
    for name, info in survey(checkpoint).names.sources.items():
        found = found_in(meant, name)
        tensors[info.name] = (checkpoint.read(info.name).float() if found is None else found).contiguous()
    folder.mkdir(exist_ok=True)
    for file in source.iterdir():
        if file.suffix != ".safetensors" and "index" not in file.name:
            (folder / file.name).write_bytes(file.read_bytes())
    save_file(tensors, folder / "model.safetensors")


def compare_tokens(floats: Path, packed: Path) -> Tokens:
    """Both read what the model of floats answers, token by token."""
    truth = LLM(floats, device="cpu", dtype="float32")
    starts = [tuple(ids) for ids in _starts(truth, PROMPTS)]
    plain = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0.0, draft_tokens=0)
    whole = [
        start + answer.token_ids for start, answer in zip(starts, truth.generate(starts, plain), strict=True)
    ]
    reading = SamplingParams(
        max_tokens=1, ignore_eos=True, temperature=0.0, draft_tokens=0, prompt_logprobs=0
    )
    answers = [llm.generate(whole, reading) for llm in (truth, LLM(packed, device="cpu", dtype="float32"))]
    read = [
        [token for one in answer for token in (one.prompt_logprobs or ())[-TOKENS:]] for answer in answers
    ]
    gaps = [abs(one.logprobs.logprob - other.logprobs.logprob) for one, other in zip(*read, strict=True)]
    alike = sum(one.rank == other.rank == 1 for one, other in zip(*read, strict=True))
    return Tokens(len(gaps), alike, sum(gaps) / len(gaps))


def count_drafts(model: Path, texts: Path, prompts: tuple[str, ...] = (*PROMPTS, *MORE_PROMPTS)) -> Drafts:
    """With the head that lies in the model; `texts` is a model whose tokenizer and chat template are taken."""
    starts = _starts(LLM(texts, device="cpu"), prompts)
    llm = LLM(model, device="cpu", mtp="on")
    answers = [
        llm.generate(
            starts,
            SamplingParams(max_tokens=DRAFTED_TOKENS, ignore_eos=True, temperature=0.0, draft_tokens=count),
        )
        for count in (0, DRAFT_TOKENS)
    ]
    exact = [each.token_ids for each in answers[0]] == [each.token_ids for each in answers[1]]
    return Drafts(
        exact,
        torch.tensor([each.stats.drafted for each in answers[1]], dtype=torch.double),
        torch.tensor([each.stats.accepted for each in answers[1]], dtype=torch.double),
    )


def with_head(packed: Path, whole: Path) -> Path:
    """The artifact with the source's head, as its own format is drafted for."""
    out = packed.with_name(f"{packed.name}-mtp")
    graft(packed, whole, out, force=True)
    return out


def reduce(blueprint: Blueprint, meant: dict[str, Tensor], path: Path) -> None:
    """Keeps the first rows of a packed matrix: its parts as they are stored, what it means, and the config."""
    checkpoint = blueprint.checkpoint
    packed = [
        (wanted.numel(), name, wanted)
        for name, wanted in pairs(blueprint, meant)
        if len(wanted) > ROWS and len(wanted) != wanted.shape[1] and len(blueprint.names.parts(name)) > 1
    ]
    _, name, wanted = min(packed, key=lambda each: each[:2])
    infos = blueprint.names.parts(name)
    parts = {part: checkpoint.read(info.name) for part, info in infos.items()}
    cut = {part: _first_rows(tensor, wanted.shape) for part, tensor in parts.items()}
    whole = any(tensor is None for tensor in cut.values())
    parts = parts if whole else {part: tensor for part, tensor in cut.items() if tensor is not None}
    said = checkpoint.config.get("quantization_config") or checkpoint.config.get("quantization") or {}
    part, info = next(iter(infos.items()))
    metadata = {
        "module": info.name.removesuffix(f".{part}"),
        "config": json.dumps({"quantization_config": said}),
        "beside": json.dumps(dict(checkpoint.quant_config)),
        "label": blueprint.formats[name].label,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = wanted if whole else wanted[:ROWS].contiguous()
    as_bfloat = kept.bfloat16()
    save_file(parts | {"meant": as_bfloat if torch.equal(as_bfloat.float(), kept) else kept}, path, metadata)


def _first_rows(part: Tensor, shape: Sequence[int]) -> Tensor | None:
    """The part of the matrix's first rows: along one axis it has them all, by twos to a byte or by eights to a word, or
    it has none. Other parts cannot be cut."""
    for axis, size in enumerate(part.shape):
        for together in (1, 2, 8):
            if size * together == shape[0]:
                return part.narrow(axis, 0, ROWS // together).contiguous()
    return part if part.numel() == 1 or part.shape == (shape[1],) else None


def _starts(llm: LLM, prompts: tuple[str, ...]) -> list[list[int]]:
    return [list(llm.text.encode_chat([{"role": "user", "content": prompt}])) for prompt in prompts]
