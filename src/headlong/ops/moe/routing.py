"""How a token's experts are chosen and what each of them counts, as data: the one definition that all backends keep.

    scores = softmax(logits), sigmoid(logits) or √softplus(logits)
    choice = scores + bias                          where there is a bias; it counts for the choice alone
    a group's score = the sum of its two best choices; of all groups only the best are kept
    experts = the best choices in kept groups, or those that are given
    weights = their scores, divided by their sum if `normalise`, times `scale`

Of equals the one with the lower number comes first, groups and experts alike.
"""

from dataclasses import dataclass
from typing import Literal

SMALL = 1e-20
"""Added to the sum of scores, but for those of a softmax, before it divides: all of them may be zero."""


@dataclass(frozen=True)
class Routing:
    num_experts: int
    num_active: int
    """How many experts a token has."""
    normalise: bool = True
    """Whether a token's weights are divided by their sum."""
    scores: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    scale: float = 1.0
    """The factor that weights are multiplied by at last."""
    num_groups: int = 1
    """The number of groups that experts fall into, those of a group one after the other."""
    kept_groups: int = 1
    """The number of groups that a token's experts may be of."""
    given: bool = False
    """Whether a token's experts are given with it, so that scores do not choose them."""

    def __post_init__(self) -> None:
        size = self.num_experts // self.num_groups
        assert self.num_experts % self.num_groups == 0 and 1 <= self.kept_groups <= self.num_groups
        assert self.num_active <= size * self.kept_groups
        assert size >= 2 or not self.is_grouped, "a group's score is that of two experts"

    @property
    def is_grouped(self) -> bool:
        """Whether some groups are left out."""
        return self.kept_groups < self.num_groups
