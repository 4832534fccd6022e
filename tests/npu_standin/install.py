"""Puts the stand-in's operators under a name of ``torch.ops``, for as long as a ``with`` block lasts.

As with torch_npu, gradients flow through the output alone, and come from the gradient operator.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from npu_standin import semantics
from npu_standin.schemas import BACKWARD, FORWARD, SCHEMAS, UPDATE
from torch import Tensor

_FORWARD_ONLY = ("scale", "seed", "offset", "dropout_mask")


@contextmanager
def installed(
    namespace: str = "npu",
    *,
    strict_dtypes: bool = True,
    forward: Callable[..., Any] = semantics.forward,
    backward: Callable[..., Any] = semantics.backward,
    schemas: dict[str, str] | None = None,
    define: bool = True,
) -> Iterator[Any]:
    """Yields ``torch.ops.<namespace>`` with CPU kernels; at the end the operators are gone.

    Args:
        namespace: the name under ``torch.ops``.
        strict_dtypes: refuse what the documentation doesn't list; off for equalities in float64 and float32.
        forward, backward: the kernels, to be replaced by faulty ones.
        schemas: other schemas, as of an older version.
        define: False where an official wheel has already defined the operators.
    """
    space = getattr(torch.ops, namespace)
    with (
        torch.library._scoped_library(namespace, "FRAGMENT") as definitions,
        torch.library._scoped_library(namespace, "IMPL") as kernels,
    ):
        for name, schema in (schemas or SCHEMAS).items() if define else ():
            definitions.define(name + schema)
        by_name = {name: _by_name(getattr(space, name)) for name in (FORWARD, BACKWARD)}

        def run_forward(*arguments: Any, **named: Any) -> Any:
            return forward(**by_name[FORWARD](arguments, named), strict_dtypes=strict_dtypes)

        def run_backward(*arguments: Any, **named: Any) -> Any:
            return backward(**by_name[BACKWARD](arguments, named), strict_dtypes=strict_dtypes)

        def differentiable(*arguments: Any, **named: Any) -> Any:
            named = by_name[FORWARD](arguments, named)
            q, k, v = (named.pop(name) for name in ("query", "key", "value"))
            return (*_Fused.apply(q, k, v, space, named), 0, 0, 0)

        kernels.impl(FORWARD, run_forward, "CPU")
        kernels.impl(BACKWARD, run_backward, "CPU")
        kernels.impl(UPDATE, semantics.update, "CPU")
        kernels.impl(FORWARD, differentiable, "AutogradCPU")
        yield space


def _by_name(operator: Any) -> Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any]]:
    names = [argument.name for argument in operator.default._schema.arguments]
    return lambda arguments, named: {**dict(zip(names, arguments, strict=False)), **named}


class _Fused(torch.autograd.Function):
    """The operator's autograd formula: statistics aren't differentiable."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, space: Any, named: dict[str, Any]) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            out, peak, total, empty = getattr(space, FORWARD)(query=q, key=k, value=v, **named)[:4]
        ctx.save_for_backward(q, k, v, out, peak, total)
        ctx.arguments = space, named
        ctx.mark_non_differentiable(peak, total, empty)
        return out, peak, total, empty

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, peak, total = ctx.saved_tensors
        space, named = ctx.arguments
        rest = {name: value for name, value in named.items() if name not in _FORWARD_ONLY}
        dq, dk, dv = getattr(space, BACKWARD)(
            query=q,
            key=k,
            value=v,
            dy=grad,
            softmax_max=peak,
            softmax_sum=total,
            attention_in=out,
            scale_value=named.get("scale", 1.0),
            **rest,
        )[:3]
        return dq, dk, dv, None, None
