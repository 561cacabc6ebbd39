"""Projections have MLX's values and gradients, with the weight's memory layout."""

import numpy as np
import pytest

from mlxlm.backend.mlx import ON_CPU, mx, nn
from mlxlm.model.linear import Linear


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 7), (7,)])
def test_values_and_gradients_equal_mlx(bias, shape):
    mx.random.seed(0)
    ours, plain = Linear(7, 4, bias=bias), nn.Linear(7, 4, bias=bias)
    plain.update(ours.parameters())
    x, weight = mx.random.normal(shape), mx.random.normal((4,))

    def loss(layer):
        def function(parameters, x):
            layer.update(parameters)
            return (layer(x) * weight).square().sum()

        return function

    parameters = ours.parameters()
    (value, found), (wanted_value, wanted) = (
        mx.value_and_grad(loss(layer), (0, 1))(parameters, x) for layer in (ours, plain)
    )
    assert value.item() == pytest.approx(wanted_value.item(), rel=1e-6)
    np.testing.assert_allclose(np.array(found[1]), np.array(wanted[1]), rtol=1e-5)
    for name in parameters:
        np.testing.assert_allclose(np.array(found[0][name]), np.array(wanted[0][name]), rtol=1e-5)


@pytest.mark.skipif(not ON_CPU, reason="elsewhere the layout costs nothing")
def test_gradient_has_the_layout_of_the_weight():
    layer = Linear(7, 4, bias=False)
    x = mx.random.normal((3, 7))

    def loss(weight):
        layer.weight = weight
        return layer(x).square().sum()

    gradient = mx.grad(loss)(layer.weight)
    mx.eval(gradient)
    assert memoryview(gradient).strides == (7 * 4, 4)


def test_quantization():
    layer = nn.Sequential(Linear(64, 32, bias=False))
    nn.quantize(layer, group_size=32, bits=8)
    assert isinstance(layer.layers[0], nn.QuantizedLinear)
