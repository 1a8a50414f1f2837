"""What a request asks of sampling. Plain data with its own range checks; knows no tensors and no engine."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from headlong.errors import RequestError

Verify = Literal["coupled", "ratio", "block"]
Pooling = Literal["mean", "last"]
MAX_LOGPROBS = 64
MAX_BANNED, MAX_BANNED_BYTES = 128, 4096
"""The most strings that a request may ban, and the most bytes of all of them."""
MIN_REPETITION_PENALTY = 0.01
"""Logits are divided by it. By much smaller numbers they become infinite, and no bias could ban them any more."""
MIN_TEMPERATURE = 1e-4
"""The lowest temperature above 0: below it logits overflow, and 0 says the same."""
MAX_BIAS = 1e6
_INT64_MAX = 2**63 - 1


GrammarKind = Literal["json_schema", "json_object", "regex", "lark", "gbnf", "choice"]
GRAMMAR_KINDS = ("json_schema", "json_object", "regex", "lark", "gbnf", "choice")


@dataclass(frozen=True)
class Grammar:
    """A form that the output must have. `source` is the schema as JSON text, the pattern, the grammar's text, or for
    `choice` a JSON list of strings; `json_object` needs none."""

    kind: GrammarKind
    source: str = ""
    after: str | None = None
    """A text, such as the end of reasoning, until which the output is free; the grammar rules what follows it, white
    space right after it apart."""
    alternative: "Grammar | None" = None
    """Another form that the whole output may have instead, such as that of tool calls."""

    def __post_init__(self) -> None:
        if self.kind not in GRAMMAR_KINDS:
            raise RequestError(f"grammar.kind must be one of {', '.join(GRAMMAR_KINDS)}, not {self.kind!r}")
        if not isinstance(self.source, str) or (self.kind != "json_object" and not self.source):
            raise RequestError(f"grammar.source must be the text of the {self.kind}, not {self.source!r}")
        if self.after is not None and (not isinstance(self.after, str) or not self.after):
            raise RequestError(f"grammar.after must be a text or nothing, not {self.after!r}")
        if self.alternative is not None:
            if not isinstance(self.alternative, Grammar):
                raise RequestError(f"grammar.alternative must be a Grammar, not {self.alternative!r}")
            if (self.alternative.after, self.alternative.alternative) != (None, None):
                raise RequestError("grammar.alternative must be a form alone, without after or alternative")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one prompt is continued.

    Filters apply in this order: penalties, `logit_bias`, banned and too-early stop tokens, temperature,
    `top_k`, `top_p`, `min_p`. Repetition penalty looks at prompt and output, presence and frequency
    penalties at the output alone. `logprobs` are the model's own, before any of these.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    """The sampling temperature; 0 is greedy."""
    top_k: int = 0
    """How many of the best tokens are kept; 0 keeps all. Ties with the k-th logit are kept."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    """The seed of the random numbers: None draws a fresh one; a given one repeats the text, with drafting on or off."""
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_token_ids: tuple[int, ...] = ()
    """Tokens that are never produced."""
    banned_strings: tuple[str, ...] = ()
    """Texts that the output never has, however tokens cut them; letters of ASCII stand for both cases."""
    stop: tuple[str, ...] = ()
    """Strings that end the text, of which they are no part unless `include_stop` says so."""
    include_stop: bool = False
    """Whether the stop string, or the text of the stop token, ends the text."""
    skip_special_tokens: bool = True
    """Whether special tokens are left out of the text."""
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    """The number of tokens before which neither a stop token nor a stop string may end the text."""
    ignore_eos: bool = False
    logprobs: int | None = None
    """None turns log-probabilities off; n gives those of the chosen token and of the n best alternatives."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt, which is read as a whole for it, whatever is cached of it."""
    pooling: Pooling | None = None
    """What is made of the prompt's hidden states: their mean, or the last one; None if nobody asks for them."""
    priority: int = 0
    """The place in the queue: lower goes first, equal ones in the order they came. A level is worth a thousand places
    in the queue, no more."""
    n: int = 1
    draft_tokens: int | None = None
    """Drafts per step for this request; 0 turns drafting off; None takes the engine's."""
    grammar: Grammar | None = None
    """A form the output must have; it masks drafts and verification alike, and wins over bans and biases."""
    verify: Verify = "coupled"
    """How drafts are accepted. `coupled`: the text is the same as without drafting. `ratio`, `block`: the distribution
    is the same, and more drafts are accepted."""

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        set_(self, "stop", (self.stop,) if isinstance(self.stop, str) else self._tuple("stop", str))
        set_(self, "banned_strings", self._tuple("banned_strings", str))
        set_(self, "bad_token_ids", self._tuple("bad_token_ids", int))
        set_(self, "stop_token_ids", self._tuple("stop_token_ids", int))
        set_(self, "logit_bias", self._bias())
        self._check_int("max_tokens", 1)
        self._check_float("temperature", 0.0, 100.0)
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise RequestError(
                f"temperature must be 0 (greedy) or at least {MIN_TEMPERATURE:g}, not {self.temperature!r}"
            )
        self._check_int("top_k", 0)
        self._check_float("top_p", 0.0, 1.0, open_low=True)
        self._check_float("min_p", 0.0, 1.0)
        self._check_float("repetition_penalty", MIN_REPETITION_PENALTY, 100.0)
        self._check_float("presence_penalty", -100.0, 100.0)
        self._check_float("frequency_penalty", -100.0, 100.0)
        self._check_int("min_tokens", 0)
        self._check_int("n", 1, 256)
        self._check_int("priority", -1_000_000, 1_000_000)
        for name, low, high in (
            ("seed", 0, _INT64_MAX),
            ("logprobs", 0, MAX_LOGPROBS),
            ("prompt_logprobs", 0, MAX_LOGPROBS),
            ("draft_tokens", 0, 64),
        ):
            if getattr(self, name) is not None:
                self._check_int(name, low, high)
        for name in ("ignore_eos", "include_stop", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, not {getattr(self, name)!r}")
        if self.pooling not in (None, *get_args(Pooling)):
            raise RequestError(f"pooling must be 'mean', 'last' or nothing, not {self.pooling!r}")
        if self.verify not in ("coupled", "ratio", "block"):
            raise RequestError(f"verify must be 'coupled', 'ratio' or 'block', not {self.verify!r}")
        if self.grammar is not None:
            self._check_grammar()
        self._check_banned()
        if any(not stop for stop in self.stop):
            raise RequestError("stop must not contain an empty string")
        if self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def biased(self) -> bool:
        return bool(self.logit_bias or self.bad_token_ids)

    @property
    def plain(self) -> bool:
        """Whether sampling is greedy and logits are left as they are."""
        changed = self.penalised or self.biased or self.min_tokens or self.constrained
        return self.greedy and not changed

    @property
    def free(self) -> bool:
        """Whether every token is the target's argmax or draw, whatever was drafted."""
        return self.greedy or self.verify == "coupled"

    @property
    def asks_host(self) -> bool:
        """Whether a device cannot choose the tokens alone, or more than tokens is asked for."""
        return not self.free or self.constrained or self.logprobs is not None

    @property
    def constrained(self) -> bool:
        """Whether something follows the output and says which tokens may come next."""
        return self.grammar is not None or bool(self.banned_strings)

    @property
    def reads_prompt(self) -> bool:
        """Whether something is asked of every token of the prompt."""
        return self.prompt_logprobs is not None or self.pooling is not None

    def _check_grammar(self) -> None:
        if not isinstance(self.grammar, Grammar):
            raise RequestError(f"grammar must be a Grammar, not {self.grammar!r}")
        for name in ("min_tokens", "ignore_eos"):
            if getattr(self, name):
                raise RequestError(
                    f"{name} cannot be combined with a grammar, which decides where the output ends"
                )

    def _check_banned(self) -> None:
        if not all(self.banned_strings):
            raise RequestError("banned_strings must not contain an empty string")
        size = sum(len(one.encode("utf-8", "surrogatepass")) for one in self.banned_strings)
        if len(self.banned_strings) > MAX_BANNED or size > MAX_BANNED_BYTES:
            raise RequestError(
                f"banned_strings may hold {MAX_BANNED} strings of {MAX_BANNED_BYTES} bytes in all, "
                f"not {len(self.banned_strings)} of {size}"
            )
        if self.banned_strings and self.grammar is not None:
            raise RequestError(
                "banned_strings cannot be combined with a grammar, which says what the output may be"
            )

    def _tuple(self, name: str, kind: type) -> tuple[Any, ...]:
        value = getattr(self, name)
        if not isinstance(value, (list, tuple, set, frozenset)):
            raise RequestError(f"{name} must be a list, not {value!r}")
        for item in value:
            if not isinstance(item, kind) or isinstance(item, bool):
                raise RequestError(f"{name} must hold {kind.__name__} values, not {item!r}")
        return tuple(value)

    def _bias(self) -> dict[int, float]:
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(f"logit_bias must map token ids to numbers, not {self.logit_bias!r}")
        for token, value in self.logit_bias.items():
            if (
                not _is_int(token)
                or not _is_number(value)
                or not (abs(value) <= MAX_BIAS or value == -math.inf)
            ):
                raise RequestError(
                    f"logit_bias must map token ids to numbers within ±{MAX_BIAS:g}, or -inf for a ban, "
                    f"not {token!r}: {value!r}"
                )
        return {int(token): float(value) for token, value in self.logit_bias.items()}

    def _check_int(self, name: str, low: int, high: int = 2**31) -> None:
        value = getattr(self, name)
        if not _is_int(value) or not low <= value <= high:
            raise RequestError(f"{name} must be a whole number from {low} to {high}, not {value!r}")

    def _check_float(self, name: str, low: float, high: float, *, open_low: bool = False) -> None:
        value = getattr(self, name)
        if not _is_number(value) or not low <= value <= high or (open_low and value == low):
            bound = f"{'above' if open_low else 'at least'} {low:g} and at most {high:g}"
            raise RequestError(f"{name} must be {bound}, not {value!r}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
