"""A linear and the bias that is added to what it gives."""

from torch import Tensor

from headlong.ops.linear.invariance import Linear


class BiasedLinear:
    def __init__(self, linear: Linear, bias: Tensor) -> None:
        self.linear = linear
        self.bias = bias
        self.name = linear.name
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def __call__(self, x_ND: Tensor) -> Tensor:
        return self.linear(x_ND) + self.bias
