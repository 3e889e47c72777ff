"""With a level of instructions some functions are computed in another way: their values stay right."""

import math
import textwrap

import pytest
import torch

from bootfile.machine import vector_math
from tests.conftest import environment, run

pytestmark = pytest.mark.rounding

SCRIPT = textwrap.dedent("""
    import numpy as np, torch
    names = ("sqrt", "acos", "asin", "atan", "tan", "log")
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.complex64)
    drawn = torch.rand(7, 9, generator=torch.Generator().manual_seed(0))
    inputs = {dtype: drawn.to(dtype) for dtype in dtypes}

    def compute():
        values = {}
        for name in names:
            for dtype, each in inputs.items():
                values[name, dtype] = getattr(torch, name)(each)
        for exponent in (0.5, 2, 0.3):
            values |= {(exponent, dtype): each**exponent for dtype, each in inputs.items()}
        values |= {("transposed", name): getattr(torch, name)(inputs[torch.float32].t()) for name in names}
        values["integers"] = torch.sqrt(torch.arange(9))
        values["number"] = torch.sqrt(torch.tensor(2.0))
        values["empty"] = torch.sqrt(torch.empty(0))
        return values

    expected = compute()
    from bootfile.machine import vector_math
    vector_math.protect()
    for name, value in compute().items():
        other = expected[name]
        assert value.dtype == other.dtype and value.stride() == other.stride(), name
        assert torch.allclose(value, other, rtol=1e-2 if value.dtype == torch.bfloat16 else 2e-6), name

    # the square root is correctly rounded, in each way in which a job calls it
    single = inputs[torch.float32]
    roots = torch.from_numpy(np.sqrt(single.numpy()))
    copy = single.clone()
    copy.sqrt_()
    for value in (single.sqrt(), copy, single**0.5, torch._foreach_sqrt([single])[0]):
        assert torch.equal(value, roots)
    assert torch.isnan(torch.sqrt(torch.tensor([-1.0]))) and torch.isnan(torch.acos(torch.tensor([2.0])))

    double = (inputs[torch.float64] * 0.8 + 0.1).requires_grad_(True)
    for name in names:
        assert torch.autograd.gradcheck(getattr(torch, name), double), name
    for eps in (None, 0.2):
        assert torch.autograd.gradcheck(lambda values, eps=eps: torch.logit(values, eps), double), eps
        for values in (double.detach(), double.detach().float()):
            odds = (values if eps is None else values.clamp(eps, 1 - eps)).double()
            expected = torch.log(odds / (1 - odds)).to(values.dtype)
            assert torch.allclose(torch.logit(values, eps), expected, rtol=1e-5, atol=1e-6)
            copy = values.clone()
            assert torch.equal(copy.logit_(eps), torch.logit(values, eps))
    for name in ("sqrt_", "log_", "logit_"):  # torch refuses what would cut the fractions off
        try:
            getattr(torch.tensor([2]), name)()
        except RuntimeError:
            continue
        raise AssertionError(name)
    print("right")
""")


@pytest.mark.parametrize("name", vector_math._FUNCTIONS)
def test_a_composed_function_has_the_values_of_its_name(name):
    dtypes, function = vector_math._FUNCTIONS[name]
    for dtype in dtypes:
        inputs = torch.tensor([0.0, 0.01, 0.3, 0.999, 1.0, -0.7, 2.5], dtype=dtype)
        expected = [_value(name, number) for number in inputs.tolist()]
        result = function(inputs)
        assert result.dtype == dtype
        torch.testing.assert_close(result.double(), torch.tensor(expected).double(), rtol=1e-6, atol=1e-6,
                                   equal_nan=True)  # fmt: skip


def _value(name: str, number: float) -> float:
    """Return a function of a number as Python computes it; NaN outside of its domain."""
    if name == "log" and number == 0:
        return -math.inf
    try:
        return getattr(math, name)(number)
    except ValueError:
        return math.nan


@pytest.mark.parametrize("eps, expected", [(None, 2.197225), (0.2, 1.386294)])
def test_a_logit_is_cut_on_both_sides(eps, expected):
    inputs = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    result = vector_math._logit(inputs, eps)
    torch.testing.assert_close(result, torch.tensor([-expected, 0, expected]).double(), rtol=1e-6, atol=1e-6)


@pytest.mark.thorough
def test_the_values_and_gradients_are_those_of_torch():
    job = run("-c", SCRIPT, fresh=True, env=environment())
    assert job.stdout == "right\n" and job.stderr == ""
