"""Compiles a request's grammar for one model's vocabulary, once for all requests that send the same.

Compiling may take long and may be asked of several threads at a time; it never runs on the caller's stack. Knows
the tokenizer and the grammar library, no model.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any, Generic, TypeVar

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from headlong.errors import BusyError, RequestError
from headlong.params import Grammar
from headlong.text.bans import BanConstraint, Bans
from headlong.text.constraint import CompiledGrammar, GrammarPath, explain
from headlong.text.grammar_cost import LIMITS, STACK_BYTES, Cost, TooCostly, is_plain, measure
from headlong.text.grammar_row import GrammarConstraint
from headlong.text.grammar_source import refusal, translate
from headlong.text.tokenizer import Tokenizer
from headlong.text.vocabulary import Marker, Vocabulary
from headlong.types import Constraint

MAX_CACHED = 32
MAX_MARKER_CHARS = 256
MAX_SECONDS = 10.0
MAX_AT_ONCE = 4
PLAIN_BYTES = 1 << 18
"""The least that a compiled grammar is counted as."""
MAX_CACHED_BYTES = 256 << 20
"""The most memory, as far as it can be estimated, of the grammars that are kept for other requests."""

Key = TypeVar("Key")
Value = TypeVar("Value")


class GrammarCompiler:
    """Compiles grammars for one model. `vocab_size` is the model's, which may be more than the tokenizer's; `eos_ids`
    are allowed exactly where a grammar accepts."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._size = vocab_size
        self._eos_ids = frozenset(token for token in eos_ids if token < vocab_size)
        self._compiled: Recent[Grammar, CompiledGrammar] = Recent(
            MAX_CACHED, lambda grammar: grammar.num_bytes
        )
        self._markers: Recent[str, Marker] = Recent(MAX_CACHED)
        self._bans: Recent[tuple[tuple[str, ...], bool], Bans] = Recent(MAX_CACHED)
        self._lock = threading.Lock()
        self._vocabulary: tuple[Vocabulary, LLTokenizer] | None = None

    def compile(self, grammar: Grammar) -> Callable[[], Constraint]:
        """A factory of constraints for one row under `grammar`, called each time the row is admitted. Raises
        `RequestError` if the grammar is wrong, unsupported or too large."""
        if not self._eos_ids:
            raise RequestError(
                "grammar: this model names no end-of-sequence token, so no output could end; "
                "add eos_token_id to its generation_config.json"
            )
        vocabulary, _ = self._of_library()
        marker = None if grammar.after is None else self._marker(grammar.after, vocabulary)
        form = replace(grammar, after=None)
        compiled = self._compiled.get(form, partial(self._compile, form))
        return lambda: GrammarConstraint(GrammarPath(compiled, vocabulary, marker), plain=compiled.plain)

    def ban(self, strings: tuple[str, ...], *, skip_special_tokens: bool) -> Callable[[], Constraint]:
        """A factory of constraints for one row whose text has none of the strings."""
        try:
            wanted = tuple(one.encode() for one in strings)
        except UnicodeEncodeError as error:
            raise RequestError("banned_strings: not valid Unicode; remove lone surrogates") from error

        def make() -> Bans:
            pieces = [
                b"" if skip_special_tokens and self._tokenizer.is_special(token) else self._bytes(token)
                for token in range(self._size)
            ]
            return Bans(wanted, pieces)

        bans = self._bans.get((strings, skip_special_tokens), make)
        return lambda: BanConstraint(bans)

    def _bytes(self, token: int) -> bytes:
        return b"" if token in self._eos_ids else self._tokenizer.token_bytes(token)

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        stay_here()
        vocabulary, _ = self._of_library()
        text, num_bytes = translate(grammar), PLAIN_BYTES
        plain = is_plain(grammar)
        if not plain:
            specials = tuple(vocabulary.tokens[token] for token in vocabulary.special_token_ids)
            num_bytes += cost(grammar, text, specials, self._size).num_bytes
        build = partial(self._build, grammar, text)
        prototype = bounded(grammar, build)
        return CompiledGrammar(prototype, lambda: _deeply(build).result(MAX_SECONDS), num_bytes, plain=plain)

    def _build(self, grammar: Grammar, text: str) -> LLMatcher:
        limits = LLParserLimits(**LIMITS)
        matcher = LLMatcher(self._of_library()[1], text, log_level=0, limits=limits)
        if matcher.is_error():
            raise refusal(grammar, explain(matcher.get_error()))
        if warnings := matcher.get_grammar_warnings():
            raise refusal(grammar, f"a part would not be enforced ({explain(warnings[0])})")
        self._rehearse(grammar, matcher)
        return matcher

    def _rehearse(self, grammar: Grammar, matcher: LLMatcher) -> None:
        """Takes a first token and takes it back: some grammars allow no text at all, are too large for a single
        step, or have parts that cannot be taken back."""
        allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        first = next((int(t) for t in np.flatnonzero(allowed) if int(t) not in self._eos_ids), None)
        pieces = () if first is None else self._of_library()[0].in_bytes(first)
        read = sum(1 for _ in takewhile(lambda piece: matcher.try_consume_tokens([piece]), pieces))
        if read:
            matcher.rollback(read)
        if not matcher.is_error():
            return
        error = matcher.get_error()
        if error.startswith("rollback"):
            raise refusal(
                grammar, "max_tokens and stop cannot be followed draft by draft", "use suffix or a pattern"
            )
        raise refusal(grammar, explain(error))

    def _marker(self, text: str, vocabulary: Vocabulary) -> Marker:
        if len(text) > MAX_MARKER_CHARS:
            raise RequestError(
                f"grammar.after has {len(text)} characters; at most {MAX_MARKER_CHARS} are allowed"
            )
        try:
            marker = text.encode()
        except UnicodeEncodeError as error:
            raise RequestError("grammar.after is not valid Unicode; remove lone surrogates") from error
        return self._markers.get(text, lambda: Marker(marker, vocabulary))

    def _of_library(self) -> tuple[Vocabulary, LLTokenizer]:
        """The vocabulary and the library's tokenizer, made when they are first asked for: a large one takes a
        second."""
        with self._lock:
            if self._vocabulary is None:
                vocabulary = Vocabulary(self._tokenizer, self._size, self._eos_ids)
                eos = sorted(self._eos_ids)
                # Its stubs ask for a class of its own; its code, for that class's attributes.
                library: Any = LLTokenizer
                self._vocabulary = vocabulary, library(vocabulary, n_vocab=self._size, eos_token=eos)
            return self._vocabulary


class Recent(Generic[Key, Value]):
    """A cache of the values that were asked for last, of bounded number and bytes. Values are made outside the lock, so
    two threads may make the same one, of which one is kept."""

    def __init__(self, size: int, num_bytes: Callable[[Value], int] = lambda _: 0) -> None:
        """`num_bytes` says how large a value is now; it may grow."""
        self._size = size
        self._num_bytes = num_bytes
        self._values: OrderedDict[Key, Value] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Key, make: Callable[[], Value]) -> Value:
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                value = self._values[key]
                self._shrink()
                return value
        value = make()
        with self._lock:
            value = self._values.setdefault(key, value)
            self._values.move_to_end(key)
            self._shrink()
        return value

    def _shrink(self) -> None:
        taken = sum(map(self._num_bytes, self._values.values()))
        while self._values and (len(self._values) > self._size or taken > MAX_CACHED_BYTES):
            _, gone = self._values.popitem(last=False)
            taken -= self._num_bytes(gone)


_here: ContextVar[bool] = ContextVar("grammars may be compiled here", default=True)


class CompileElsewhere(Exception):
    """A grammar has to be compiled, which may take a while, in a thread that must not wait."""


@contextmanager
def not_compiling() -> Iterator[None]:
    """Inside of it, grammars that have to be compiled raise `CompileElsewhere`."""
    token = _here.set(False)
    try:
        yield
    finally:
        _here.reset(token)


def stay_here() -> None:
    """Raises `CompileElsewhere` where grammars are not compiled."""
    if not _here.get():
        raise CompileElsewhere


def cost(grammar: Grammar, text: str, specials: tuple[bytes, ...] = (), size: int = 0) -> Cost:
    """What the grammar costs in the library's form. Raises `RequestError` where that is too much or it is wrong."""
    stay_here()
    try:
        found = measure(text, specials, size)
    except TooCostly as error:
        raise refusal(grammar, str(error), "simplify it") from error
    if found.error:
        raise refusal(grammar, explain(found.error))
    return found


_places = threading.BoundedSemaphore(MAX_AT_ONCE)
_starting = threading.Lock()


def bounded(grammar: Grammar, work: Callable[[], Value]) -> Value:
    """What `work` makes of a grammar whose cost is known to be bounded, on a deep stack and in `MAX_SECONDS` at most.
    A thread that was given up, on a machine that is busy, keeps its place until it is done, so that few can run."""
    if not _places.acquire(timeout=MAX_SECONDS):
        raise BusyError("grammar: others are being compiled; try again later")
    try:
        result = _deeply(work)
    except RuntimeError:
        _places.release()
        raise
    result.add_done_callback(lambda _: _places.release())
    try:
        return result.result(MAX_SECONDS)
    except TimeoutError as error:
        why = f"compiling it takes longer than {MAX_SECONDS:g} seconds"
        raise refusal(grammar, why, "simplify it") from error


def _deeply(work: Callable[[], Value]) -> Future[Value]:
    """Does `work` in a thread of its own with a deep stack."""
    result: Future[Value] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    with _starting:
        usual = threading.stack_size(STACK_BYTES)
        try:
            threading.Thread(target=run, name="headlong-grammar", daemon=True).start()
        finally:
            threading.stack_size(usual)
    return result
