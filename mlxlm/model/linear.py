"""Linear projections, and several of them of one input as one product, for decoding."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

from mlxlm.backend.mlx import ON_CPU, mx, nn
from mlxlm.kernels.eval_points import eval_point
from mlxlm.kernels.quantized_matmul import quantized_matmul


class Linear(nn.Linear):
    """x · weightᵀ + bias, with a weight gradient in the memory layout of the weight.

    MLX's gradient is transposed in memory, with which an optimizer on a CPU takes a fifth more time.
    """

    def __call__(self, x: mx.array) -> mx.array:
        """Project `x` `[..., input]` to `[..., output]`."""
        if not (ON_CPU and self.training):
            return super().__call__(x)
        out = eval_point(project(x, self.weight))
        return out + self.bias if "bias" in self else out

    def to_quantized(self, group_size: int, bits: int, mode: str = "affine", **_options: Any) -> QuantizedLinear:
        """Quantize the weights."""
        return QuantizedLinear.from_linear(self, group_size, bits, mode)


class QuantizedLinear(nn.QuantizedLinear):
    """`Linear` with quantized weights."""

    def __call__(self, x: mx.array) -> mx.array:
        """Project `x` `[..., input]` to `[..., output]`."""
        out = multiply(self, x)
        return out + self.bias if "bias" in self else out


def multiply(layer: nn.Module, x: mx.array, matrices: mx.array | None = None) -> mx.array:
    """Multiply `x` by the quantized weights of a layer; see `quantized_matmul`."""
    format = {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}
    return quantized_matmul(x, layer.weight, layer.scales, layer.get("biases"), matrices, **format)


@mx.custom_function
def project(x: mx.array, weight: mx.array) -> mx.array:
    """Multiply `x` `[..., input]` by the transpose of `weight` `[output, input]`."""
    return x @ weight.T


@project.vjp
def _project_vjp(primals: list[mx.array], cotangent: mx.array, _output: mx.array) -> tuple[mx.array, mx.array]:
    x, weight = primals
    # In this order, the arrays that only the weight's gradient needs are freed first.
    weight_gradient = eval_point(cotangent.reshape(-1, weight.shape[0]).T @ x.reshape(-1, weight.shape[1]))
    return eval_point(cotangent @ weight), weight_gradient


class QuantizedMatrices(nn.Module):
    """A layer with several matrices, `[N, output, input]`, whose weights are quantized.

    Args:
        layer: The layer with float weights, and perhaps a bias.
        group_size: As for `mx.quantize`.
        bits: The same.
        mode: The same.
    """

    def __init__(self, layer: nn.Module, group_size: int, bits: int, mode: str):
        super().__init__()
        self.group_size, self.bits, self.mode = group_size, bits, mode
        self.weight, self.scales, *biases = mx.quantize(layer.weight, group_size, bits, mode=mode)
        if biases:
            self.biases = biases[0]
        if "bias" in layer:
            self.bias = layer.bias


class FusedLinear:
    """The outputs of several projections of one input, concatenated: one product reads all weights.

    The weights of the modules become views of the concatenated ones, so that these take no further memory.

    Args:
        modules: `nn.Linear` or `nn.QuantizedLinear`. If they can't be fused, such as adapters or layers with different
            quantizations, each computes its own product.
    """

    def __init__(self, *modules: nn.Module):
        self._modules = modules
        forms = {_form(module) for module in modules}
        form = forms.pop()
        self._quantization = None if form is None else form.quantization
        self._views: list[tuple[nn.Module, str, mx.array]] = []
        self._arrays: dict[str, mx.array] = {}
        if forms or form is None:
            return
        for name in form.names:
            self._fuse(name)
        if self._quantization is None:
            self._arrays["weight"] = self._arrays["weight"].T  # transposed here rather than in each step
            mx.eval(self._arrays["weight"])

    def _fuse(self, name: str) -> None:
        parts = [module[name] for module in self._modules]
        fused = mx.concatenate(parts) if len(parts) > 1 else parts[0]
        mx.eval(fused)
        self._arrays[name] = fused
        start = 0
        for module, part in zip(self._modules, parts, strict=True):
            view = fused[start : start + part.shape[0]]
            start += part.shape[0]
            mx.eval(view)
            module[name] = view
            self._views.append((module, name, view))

    @classmethod
    def updated(cls, fused: FusedLinear | None, *modules: nn.Module) -> FusedLinear:
        """Return `fused` if it is that of these modules and their weights, else fuse them."""
        return fused if fused is not None and fused._is_current(modules) else cls(*modules)

    def _is_current(self, modules: tuple[nn.Module, ...]) -> bool:
        same = all(mine is module for mine, module in zip(self._modules, modules, strict=True))
        return same and bool(self._views) and all(module.get(name) is view for module, name, view in self._views)

    def __call__(self, x: mx.array) -> mx.array:
        """Project `x` `[..., input]` to `[..., sum of the outputs]`."""
        arrays = self._arrays
        if not arrays:
            return mx.concatenate([module(x) for module in self._modules], axis=-1)
        bias = arrays.get("bias")
        if self._quantization is None:
            return x @ arrays["weight"] if bias is None else mx.addmm(bias, x, arrays["weight"])
        group_size, bits, mode = self._quantization
        weight, scales, biases = arrays["weight"], arrays["scales"], arrays.get("biases")
        x = quantized_matmul(x, weight, scales, biases, group_size=group_size, bits=bits, mode=mode)
        return x if bias is None else x + bias


class FusedProjections(nn.Module):
    """A layer whose decoding step has one product for all projections of one input.

    A subclass calls `self._fused.NAME(x)` in its decoding step, for each NAME of `_projections`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._fused = SimpleNamespace()

    def _projections(self) -> dict[str, list[nn.Module]]:
        """The projections of each input, by a name. By default those of a layer with one at each end."""
        return {"inputs": [self.in_proj], "output": [self.out_proj]}

    def fuse(self) -> None:
        """Fuse the projections, for decoding steps."""
        before = vars(self._fused)
        fused = {name: FusedLinear.updated(before.get(name), *modules) for name, modules in self._projections().items()}
        self._fused = SimpleNamespace(**fused)

    def unfuse(self) -> None:
        """Forget the fused projections, so that memory doesn't hold them and new weights."""
        self._fused = SimpleNamespace()


class _Form(NamedTuple):
    """What must be equal in modules that are fused: their arrays, the dtypes, and group size, bits and mode."""

    names: tuple[str, ...]
    dtypes: tuple[mx.Dtype, ...]
    quantization: tuple[Any, Any, Any] | None


def _form(module: Any) -> _Form | None:
    """The form of a module, None if it can't be fused."""
    names = tuple(name for name in ("weight", "scales", "biases", "bias") if module.get(name) is not None)
    if type(module) in (Linear, nn.Linear):
        quantization = None
    elif type(module) in (QuantizedLinear, nn.QuantizedLinear):
        quantization = module.group_size, module.bits, module.mode
    else:
        return None
    return _Form(names, tuple(module[name].dtype for name in names), quantization)
