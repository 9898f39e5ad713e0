"""Operations that a traced loss may use, by the names that torch.fx gives them."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Operation = Callable[..., Any]

_MAX_INT = 2**53
_MAX_DIMS_IN_TUPLE = 64

# Names of torch functions, of tensor methods, or of both. Methods that keep the shape of their
# input may have the suffix ``_`` (in place).
_SHAPE_KEEPING = """
abs absolute acos acosh add addcdiv addcmul asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or bitwise_xor
ceil clamp clamp_max clamp_min clip copysign cos cosh deg2rad div divide eq erf erfc erfinv exp exp2 expm1 fix
float_power floor floor_divide fmax fmin fmod frac ge greater greater_equal gt heaviside hypot isclose isfinite isinf
isnan isneginf isposinf ldexp le lerp less less_equal lgamma log log10 log1p log2 logaddexp logaddexp2 logical_and
logical_not logical_or logical_xor logit lt masked_fill maximum minimum mul multiply nan_to_num ne neg negative
nextafter not_equal pow positive rad2deg real reciprocal relu remainder round rsqrt rsub sgn sigmoid sign signbit sin
sinc sinh softmax log_softmax sqrt square sub subtract tan tanh tril triu true_divide trunc where xlogy zeros_like
ones_like full_like celu selu threshold
"""
_ALONG_A_DIMENSION = """
all allclose amax amin aminmax any argmax argmin argsort count_nonzero cummax cummin cumprod cumsum diff dist equal
kthvalue logcumsumexp logsumexp max mean median min mode msort nanmean nanmedian nanquantile nansum norm prod quantile
renorm sort std std_mean sum topk trapezoid trapz trace unique unique_consecutive var var_mean cumulative_trapezoid
searchsorted bucketize
"""
_SHAPES = """
atleast_1d atleast_2d broadcast_to chunk diagonal flatten flip fliplr flipud gather movedim moveaxis narrow permute
ravel reshape roll rot90 scatter scatter_add select squeeze split swapaxes swapdims t take take_along_dim transpose
unbind unflatten unsqueeze masked_select nonzero index_add index_copy index_fill masked_scatter clone detach numel
is_floating_point is_tensor broadcast_tensors split_with_sizes
"""
_GROWING = """
zeros ones full arange linspace logspace eye tril_indices triu_indices cat concat concatenate stack hstack vstack
dstack column_stack outer ger matmul mm bmm mv dot inner vdot tensordot addmm addmv addbmm baddbmm einsum kron cdist
repeat tile repeat_interleave cartesian_prod meshgrid block_diag diag diag_embed diagflat vander cov corrcoef
index_select new_zeros new_ones new_full
"""
_METHODS_ONLY = """
bfloat16 bool contiguous dim double expand expand_as float half int long ndimension nelement size stride type_as view
view_as reshape_as is_contiguous is_complex unfold fill_ zero_ masked_fill_ clamp_ copy_ sum_to_size
"""
_FUNCTIONAL = """
relu relu6 elu selu celu leaky_relu gelu silu mish softplus softsign hardtanh hardsigmoid hardswish tanhshrink
softshrink hardshrink logsigmoid sigmoid tanh softmax softmin log_softmax threshold normalize cosine_similarity
pairwise_distance l1_loss mse_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy
binary_cross_entropy_with_logits cross_entropy nll_loss poisson_nll_loss gaussian_nll_loss soft_margin_loss
hinge_embedding_loss margin_ranking_loss cosine_embedding_loss triplet_margin_loss multi_margin_loss layer_norm
rms_norm
"""
_FUNCTIONAL_GROWING = "pad one_hot linear"
_SPECIAL = """
digamma entr erf erfc erfcx erfinv exp2 expit expm1 gammainc gammaincc gammaln i0 i0e i1 i1e log1p log_ndtr
log_softmax logit logsumexp ndtr ndtri polygamma psi round sinc softmax xlog1py xlogy zeta
"""
_LINALG = "norm vector_norm"
_FFT = "fft ifft rfft irfft"
_OPERATORS = """
abs add and_ eq floordiv ge gt iadd iand ifloordiv imod imul invert ior ipow isub itruediv ixor le lt matmul mod mul
ne neg or_ pos pow sub truediv xor
"""
_MATH = """
acos acosh asin asinh atan atan2 atanh ceil copysign cos cosh degrees erf erfc exp exp2 expm1 fabs floor fmod gamma
hypot isclose isfinite isinf isnan lgamma log log10 log1p log2 pow radians sin sinh sqrt tan tanh trunc
"""


def checked_arithmetic(function: Operation) -> Operation:
    """Restrict a Python operator to tensors and numbers; tuples, such as shapes, can only be joined and compared.

    Strings and lists are refused, because they could grow without limit.
    """

    def compute(*args: Any) -> Any:
        if any(isinstance(arg, Tensor) for arg in args):
            if all(isinstance(arg, Tensor | int | float) for arg in args):
                return function(*args)
        elif all(isinstance(arg, int | float) for arg in args):
            _check_power(function, args)
            return _check_number(function(*args))
        elif function in (operator.add, operator.iadd, operator.eq, operator.ne) and all(
            isinstance(arg, tuple) and len(arg) <= _MAX_DIMS_IN_TUPLE for arg in args
        ):
            return function(*args)
        types = " and ".join(type(arg).__name__ for arg in args)
        raise TypeError(f"{function.__name__} of {types} is not supported: use tensors and numbers")

    return compute


def _check_power(function: Operation, args: tuple[Any, ...]) -> None:
    """Refuse a power of integers beyond 2**53 without computing it, because that could take forever."""
    if function in (operator.pow, operator.ipow) and all(isinstance(arg, int) for arg in args):
        base, exponent = args
        if abs(base) > 1 and exponent > 0 and exponent * math.log2(abs(base)) > math.log2(_MAX_INT):
            raise OverflowError(f"{base} ** {exponent} is beyond {_MAX_INT}")


def _check_number(value: Any) -> Any:
    if isinstance(value, int) and abs(value) > _MAX_INT:
        raise OverflowError(f"the integer {value:.3g} is beyond {_MAX_INT}")
    return value


def _getattr(value: object, name: str) -> Any:
    if isinstance(value, Tensor) and name in _ATTRIBUTES:
        return _ATTRIBUTES[name](value)
    raise TypeError(f"the attribute {str(name)[:50]!r} is not supported; a tensor has {', '.join(_ATTRIBUTES)}")


_ATTRIBUTES: dict[str, Operation] = {
    "shape": lambda tensor: tensor.shape,
    "dtype": lambda tensor: tensor.dtype,
    "device": lambda tensor: tensor.device,
    "ndim": lambda tensor: tensor.ndim,
    "T": lambda tensor: tensor.T,
    "mT": lambda tensor: tensor.mT,
    "data": lambda tensor: tensor.detach(),
}


def _to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Run ``Tensor.to`` without its device argument: graphs stay on the CPU."""
    dtypes = [arg for arg in args if not isinstance(arg, str | torch.device)]
    kwargs.pop("device", None)
    return tensor.to(*dtypes, **kwargs) if dtypes or kwargs else tensor


def _stay_on_device(tensor: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
    return tensor


def _collect(owner: object, names: str, prefix: str) -> dict[str, Operation]:
    return {f"{prefix}{name}": getattr(owner, name) for name in names.split() if hasattr(owner, name)}


_SHARED = f"{_SHAPE_KEEPING} {_ALONG_A_DIMENSION} {_SHAPES} {_GROWING}"

FUNCTIONS: dict[str, Operation] = {
    **_collect(torch, _SHARED, "torch."),
    **_collect(torch.functional, _SHARED, "torch.functional."),
    **_collect(torch.nn.functional, f"{_FUNCTIONAL} {_FUNCTIONAL_GROWING}", "torch.nn.functional."),
    # torch.fx names functions that are implemented in C++ by their C++ module.
    **_collect(torch.nn.functional, f"{_FUNCTIONAL} {_FUNCTIONAL_GROWING}", "torch._C._nn."),
    "torch._C._nn.log_sigmoid": torch.nn.functional.logsigmoid,
    **_collect(torch.special, _SPECIAL, "torch.special."),
    **_collect(torch.special, _SPECIAL, "torch._C._special.special_"),
    **_collect(torch.linalg, _LINALG, "torch.linalg."),
    **_collect(torch.linalg, _LINALG, "torch._C._linalg.linalg_"),
    **_collect(torch.fft, _FFT, "torch.fft."),
    **_collect(torch.fft, _FFT, "torch._C._fft.fft_"),
    **{f"operator.{name}": checked_arithmetic(getattr(operator, name)) for name in _OPERATORS.split()},
    "operator.getitem": operator.getitem,
    **_collect(math, _MATH, "math."),
    "getattr": _getattr,
}

METHODS: dict[str, Operation] = {
    **_collect(torch.Tensor, f"{_SHARED} {_METHODS_ONLY}", ""),
    **_collect(torch.Tensor, " ".join(f"{name}_" for name in _SHAPE_KEEPING.split()), ""),
    "to": _to,
    "cpu": _stay_on_device,
    "cuda": _stay_on_device,
}


def _operations_named(names: str) -> frozenset[Operation]:
    known = {**FUNCTIONS, **METHODS}
    return frozenset(operation for name, operation in known.items() if name.rpartition(".")[2] in names.split())


_ARITHMETIC = """
abs absolute add addcdiv addcmul bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp clamp_max clamp_min clip
copysign deg2rad div divide eq fix floor floor_divide fmax fmin fmod frac ge greater greater_equal gt heaviside isfinite
isinf isnan isneginf isposinf le lerp less less_equal logical_and logical_not logical_or logical_xor lt masked_fill
maximum minimum mul multiply nan_to_num ne neg negative nextafter not_equal positive rad2deg real reciprocal relu
remainder round rsqrt rsub sgn sign signbit sqrt square sub subtract tril triu true_divide trunc where zeros_like
ones_like full_like threshold relu6 leaky_relu hardtanh
all amax amin aminmax any argmax argmin count_nonzero equal max mean min nansum prod std std_mean sum trace var
var_mean
"""

# Operations of one or two steps for each element. Others, such as logarithms, take about ten times as long.
CHEAP = _operations_named(
    f"{_ARITHMETIC} {_SHAPES} {_METHODS_ONLY} and_ floordiv iadd iand ifloordiv imod imul invert ior isub itruediv "
    f"ixor mod or_ pos truediv xor getattr to cpu cuda {' '.join(f'{name}_' for name in _ARITHMETIC.split())}"
)
# Operations whose results or work can be larger than their broadcast inputs: they are checked before they run.
GROWING = _operations_named(f"{_GROWING} {_FUNCTIONAL_GROWING} {_FFT} norm getitem")
# Operations that return many results.
SPLITTING = _operations_named("chunk split split_with_sizes unbind")
# Operations that sort their input, or that sum a mathematical series for each element, forward or backward.
SLOW = _operations_named(
    "argsort bucketize digamma erfcx i0 i0e i1 i1e kthvalue lgamma log_ndtr logcumsumexp median mode msort nanmedian "
    "nanquantile ndtri polygamma psi quantile renorm searchsorted sort topk unique unique_consecutive zeta"
)
# Operations that return one index for each dimension of each element if they have one argument.
INDICES = _operations_named("nonzero where")
# Operations with a result for each element of their second argument, q.
QUANTILES = _operations_named("quantile nanquantile")
ITERATIVE = _operations_named("gammainc gammaincc")  # hundreds of terms for each element
REPEATED = _operations_named("diff")  # their argument n is a number of passes
