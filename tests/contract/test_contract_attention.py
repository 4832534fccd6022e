"""Our attention backends through the public contract test, and broken ones that it must catch."""

import pytest
import torch

from metronome.contracts import AttentionBackend
from metronome.errors import ConfigurationError
from metronome.shared_prompt.cascade import CascadeBackend
from metronome.shared_prompt.host import HostAttention
from metronome.shared_prompt.options import SharedPromptOptions
from metronome.shared_prompt.plan import SharedPromptPlan
from metronome.shared_prompt.reference import ReferenceBackend, allowed, masked_attention
from metronome.shared_prompt.select import SharedPromptAttention
from metronome.testing.attention import check_attention_backend


class MaskDropped(ReferenceBackend):
    name = "mask dropped"

    def attend(self, q, k, v, plan, scale, *, window=None, sinks=None):
        whole = SharedPromptPlan.build([(plan.tokens, [0])])
        return super().attend(q, k, v, whole, scale, window=window, sinks=sinks)


class WindowIgnored(CascadeBackend):
    name = "window ignored"

    def attend(self, q, k, v, plan, scale, *, window=None, sinks=None):
        return super().attend(q, k, v, plan, scale, sinks=sinks)


class SinksDropped(CascadeBackend):
    name = "sinks dropped"

    def attend(self, q, k, v, plan, scale, *, window=None, sinks=None):
        extra = 0.0 if sinks is None else 0.0 * sinks.sum()
        return super().attend(q, k, v, plan, scale, window=window) + extra


class GradientLost(CascadeBackend):
    name = "gradient lost"

    def attend(self, q, k, v, plan, scale, *, window=None, sinks=None):
        return super().attend(q, k.detach() + 0 * k, v, plan, scale, window=window, sinks=sinks)


class ScaleIgnored(CascadeBackend):
    name = "scale ignored"

    def attend(self, q, k, v, plan, scale, *, window=None, sinks=None):
        return super().attend(q, k, v, plan, q.shape[-1] ** -0.5, window=window, sinks=sinks)


class StridesIgnored(CascadeBackend):
    name = "strides ignored"

    def attend(self, q, k, v, plan, scale, *, window=None, sinks=None):
        if not q.is_contiguous():  # the storage as it lies, read as if it were [Q, Nq, D]
            q = q.transpose(0, 1).reshape(q.shape)
        return super().attend(q, k, v, plan, scale, window=window, sinks=sinks)


class QueriesMisplaced(ReferenceBackend):
    name = "cached prompt's queries misplaced"

    def attend(self, q, k, v, plan, scale, *, window=None, sinks=None):
        groups = [(one.prompt.length, [r.length for r in one.responses]) for one in plan.groups]
        mask = allowed(SharedPromptPlan.build(groups, plan.tokens), window)[: plan.queries]
        return masked_attention(q, k, v, mask, scale, sinks)


class GroupsMixed(ReferenceBackend):
    name = "groups mixed"

    def attend(self, q, k, v, plan, scale, *, window=None, sinks=None):
        _, segment = plan.segment_ids
        index = torch.arange(plan.tokens)
        rows = index[plan.first_query :]
        mask = (rows[:, None] >= index) & ((segment == 0) | (segment[rows, None] == segment))
        if window is not None:
            mask &= plan.key_positions[rows, None] - plan.key_positions < window
        return masked_attention(q, k, v, mask, scale, sinks)


class _Spent(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.passes = 0
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.passes += 1
        return grad * ctx.passes


class BackwardSpent(ReferenceBackend):
    name = "backward spent"

    def attend(self, q, k, v, plan, scale, *, window=None, sinks=None):
        return _Spent.apply(super().attend(q, k, v, plan, scale, window=window, sinks=sinks))


@pytest.mark.parametrize("backend", [ReferenceBackend(), CascadeBackend()], ids=lambda backend: backend.name)
def test_our_backends_keep_the_contract(backend):
    check_attention_backend(backend)


@pytest.mark.parametrize("wanted", ["auto", "reference", "cascade"])
def test_what_the_plugin_hands_out_keeps_the_contract(wanted):
    check_attention_backend(
        SharedPromptAttention(SharedPromptOptions(backend=wanted)), dtypes=["float64"], value_dims=[8]
    )


@pytest.mark.parametrize(
    "broken",
    [
        MaskDropped(),
        WindowIgnored(),
        SinksDropped(),
        GradientLost(),
        ScaleIgnored(),
        StridesIgnored(),
        QueriesMisplaced(),
        GroupsMixed(),
        BackwardSpent(),
    ],
    ids=lambda backend: backend.name,
)
def test_the_contract_catches_a_broken_backend(broken):
    with pytest.raises(AssertionError, match=broken.name):
        check_attention_backend(broken, dtypes=["float64"], value_dims=[8])


def test_host_attention_shares_nothing_and_says_what_to_set():
    host = HostAttention()
    assert isinstance(host, AttentionBackend)
    assert not host.shares_prompt
    plan = SharedPromptPlan.build([(2, [1])])
    x = torch.zeros(3, 1, 4)
    with pytest.raises(ConfigurationError, match="attention: shared_prompt"):
        host.attend(x, x, x, plan, 1.0)
