"""Each slot's sampling settings, as tensors a step can gather. Knows slots and tokens, no model.

Rows without penalties, bias or minimum length cost nothing: the [slots, vocabulary] tensors exist only from the first
request that needs them, and stay where they are from then on.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from headlong.sampling import noise
from headlong.sampling.penalties import NAMES as PENALTIES
from headlong.sampling.penalties import Seen
from headlong.sampling.tally import Tally
from headlong.types import Constraint, Request

BYTES_PER_TOKEN = 9
"""Bytes for each slot and token of the vocabulary, once rows ask for everything: a count, a bias, whether it ends the
row."""
_SCALARS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    *PENALTIES,
    "penalised",
    "biased",
)


class SamplingTable:
    """`requests[slot]` is the host's view; the tensors are the device's."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.requests: list[Request | None] = [None] * (num_slots + 1)
        self.constraints: dict[int, Constraint] = {}
        """The constraints by slot, for the rows that have one."""
        self.seen: dict[int, Seen] = {}
        """The tokens seen so far by slot, for the rows that are penalised."""
        self.tally = Tally(self.seen, (num_slots + 1, vocab_size), device)
        """The counts of seen tokens on the device, which steps that do not ask the host update by themselves."""
        size = num_slots + 1
        self._scalars_SN = torch.zeros(size, len(_SCALARS), dtype=torch.float64, device=device)
        self.scalars: dict[str, Tensor] = dict(zip(_SCALARS, self._scalars_SN.unbind(1), strict=True))
        self._keys_S4 = torch.zeros(size, 4, dtype=torch.long, device=device)
        self._keys_S4[:, 3] = noise.TARGET
        self.seed, self.choice = self._keys_S4[:, 0], self._keys_S4[:, 1]
        self.earliest = torch.zeros(size, dtype=torch.long, device=device)
        """The position from which on a row may end."""
        self._dense: dict[str, Tensor] = {}

    def set(self, slot: int, request: Request, output: list[int]) -> None:
        """Writes a row's settings into its slot; `output` is what it produced before it was preempted."""
        params = request.params
        self.requests[slot] = request
        for name in _SCALARS:
            self.scalars[name][slot] = float(getattr(params, name))
        self.seed[slot] = request.seed
        self.choice[slot] = request.choice
        self.earliest[slot] = len(request.prompt) + params.min_tokens
        if request.constraint is not None:
            self.constraints[slot] = request.constraint()
            self.constraints[slot].advance(output)
            self.constraints[slot].ready()  # which begins now what takes long
        if params.penalised:
            # Of a prompt's tokens the other penalties do not ask.
            prompt = request.prompt if params.repetition_penalty != 1.0 else ()
            self.seen[slot] = Seen(prompt, output)
        if params.biased:
            self.bias[slot] = 0.0
            for token, value in params.logit_bias.items():
                self.bias[slot, token] = value
            self.bias[slot, self._ids(params.bad_token_ids)] = -torch.inf
        if params.min_tokens:
            self.stops[slot] = False
            self.stops[slot, self._ids(request.stop_ids)] = True

    def filters(self, slots_M: Tensor) -> Tensor:
        """Temperature, top-k, top-p and min-p of these slots, [M, 4]."""
        return self._scalars_SN[slots_M, :4]

    def keys(self, slots_M: Tensor, positions_M: Tensor) -> Tensor:
        """Seed, choice, position and stream of the target's choice at these positions of slots, [M, 4]."""
        keys_M4 = self._keys_S4[slots_M]
        keys_M4[:, 2] = positions_M
        return keys_M4

    def clear(self, slot: int) -> None:
        self.requests[slot] = None
        self.constraints.pop(slot, None)
        self.seen.pop(slot, None)

    def is_ready(self, slot: int, seconds: float = 0.0, *, in_grace: bool = False) -> bool:
        """Whether the slot's next step can be computed without waiting for its constraint; waits for so long, or as
        long as others may wait for it."""
        constraint = self.constraints.get(slot)
        return constraint is None or constraint.ready(constraint.grace if in_grace else seconds)

    def is_slow(self, slot: int) -> bool:
        """Whether the slot's masks take long, so that a step should need no more than the next one."""
        constraint = self.constraints.get(slot)
        return constraint is not None and constraint.slow

    def commit(self, slot: int, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], str | None]:
        """What of a step's tokens stands under the slot's constraint, and why the row must end if it must."""
        constraint = self.constraints.get(slot)
        if constraint is None:
            return tokens, None
        return tokens[: constraint.advance(tokens)], constraint.failure

    def count(self, slot: int, tokens: Iterable[int]) -> None:
        """Adds committed tokens to a penalised slot."""
        self.seen[slot].count(tokens)

    def penalties(self, slots_M: Tensor) -> Tensor:
        """The penalties for repetition, presence and frequency of these slots, [M, 3]."""
        return self._scalars_SN[slots_M, 4:7]

    @property
    def changes_S5(self) -> Tensor:
        """What each slot has done to its logits: the penalties, whether there is any, and whether there is a bias."""
        return self._scalars_SN[:, 4:]

    @property
    def bias(self) -> Tensor:
        return self._lazy("bias", torch.float32)

    @property
    def stops(self) -> Tensor:
        """Tokens that would end the row."""
        return self._lazy("stops", torch.bool)

    def _lazy(self, name: str, dtype: torch.dtype) -> Tensor:
        if name not in self._dense:
            shape = (len(self.requests), self.vocab_size)
            self._dense[name] = torch.zeros(shape, dtype=dtype, device=self.device)
        return self._dense[name]

    def _ids(self, tokens: Iterable[int]) -> Tensor:
        return torch.tensor(list(tokens), dtype=torch.long, device=self.device)
