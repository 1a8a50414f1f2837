"""A linear whose results a bias is added to."""

from torch import Tensor

from headlong.ops.linear.linear import Linear
from headlong.ops.norm.normed import Normed


class BiasedLinear(Linear):
    def __init__(self, linear: Linear, bias: Tensor) -> None:
        self.linear = linear
        self.bias = bias
        self.name = linear.name
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def __call__(self, given: Normed) -> Tensor:
        return self.linear(given) + self.bias
