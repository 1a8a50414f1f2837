"""Random numbers that are a function of what they are for: seed, choice, position, stream and token.

Philox4x32-10, counter-based: nothing is drawn in sequence, so drafts, verification, plain decoding, other
rows and preemption all see the same number for the same token. Known answers are tested against the paper's.
"""

import torch
from torch import Tensor

Key = tuple[Tensor, Tensor, Tensor, Tensor]
"""Seed, choice, position and stream of each row: what its noise is a function of."""
TARGET, DRAFT, ACCEPT, RESIDUAL = STREAMS = range(4)
"""Independent streams: the target's choice (coupled drafts share it), a `ratio`/`block` draft's own choice,
its acceptance test, and the token after a rejection."""

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four 32-bit words per counter, all held in int64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The product wraps in int64; its high word is right once the sign extension is masked away.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = ((product1 >> 32) & _MASK) ^ c1 ^ k0
        c2 = ((product0 >> 32) & _MASK) ^ c3 ^ k1
        c1, c3 = product1 & _MASK, product0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: Tensor, choice: Tensor, position: Tensor, stream: Tensor, token: Tensor) -> Tensor:
    """Uniform random numbers in (0, 1), float64. All arguments broadcast; `token` picks one of the position's
    numbers."""
    words = _words(seed, choice, position, stream, token >> 2)
    lanes = torch.stack(torch.broadcast_tensors(*words), dim=-1)
    lane = (token & 3).expand(lanes.shape[:-1])
    return _to_unit(lanes.gather(-1, lane[..., None])[..., 0])


def uniform_vocab(seed: Tensor, choice: Tensor, position: Tensor, stream: Tensor, vocab_size: int) -> Tensor:
    """`uniform` of every token for each of L seeds and positions: [L, V], at a quarter of the work."""
    quads = torch.arange(-(-vocab_size // 4), device=seed.device)
    words = _words(seed[:, None], choice[:, None], position[:, None], stream[:, None], quads[None])
    return _to_unit(torch.stack(words, dim=-1).flatten(1)[:, :vocab_size])


def gumbel(unit: Tensor) -> Tensor:
    return -torch.log(-torch.log(unit))


def draw(scores_MV: Tensor, key: Key) -> Tensor:
    """The best of scores plus noise."""
    return (scores_MV + gumbel(uniform_vocab(*key, scores_MV.shape[1]))).argmax(-1)


def _words(
    seed: Tensor, choice: Tensor, position: Tensor, stream: Tensor, quad: Tensor
) -> tuple[Tensor, ...]:
    counter = (quad, position & _MASK, choice, stream)
    return philox(counter, (seed & _MASK, seed >> 32))


def _to_unit(word: Tensor) -> Tensor:
    return (word.to(torch.float64) + 0.5) * 2.0**-32
