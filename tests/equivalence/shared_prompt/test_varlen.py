"""The varlen backend over stand-ins with the pinned contracts of torch's and flash-attn's kernels; no card here."""

import pytest
import torch
from flash_standin import FlashStandIn, package_flash, torch_flash
from hypothesis import given, settings
from hypothesis import strategies as st

from metronome.contracts import AttentionNeed
from metronome.errors import ConfigurationError
from metronome.shared_prompt import flash_kernels
from metronome.shared_prompt.calls import Limits, gathered
from metronome.shared_prompt.flash_kernels import PackageFlash, TorchFlash, find_kernel
from metronome.shared_prompt.plan import SharedPromptPlan
from metronome.shared_prompt.reference import allowed, masked_attention
from metronome.shared_prompt.varlen import VarlenBackend
from metronome.testing.attention import check_attention_backend

EXACT = ("float64", "float32")
PLANS = {
    "several groups and padding": ([(8, [3, 5, 0, 3]), (4, [6, 6])], 41, False),
    "a cached prompt and padding": ([(9, [4, 0, 2, 4])], 22, True),
    "a prompt of one token": ([(1, [1, 3, 1])], None, False),
    "single tokens": ([(1, [1, 1])], 4, False),
}


@pytest.fixture(params=["torch", "flash-attn"])
def varlen(request):
    """Makes a backend over a stand-in of either kernel: ``varlen(standin, dtypes, limits)``."""
    open_ones = []

    def close():
        while open_ones:
            open_ones.pop().__exit__(None, None, None)

    def make(standin, dtypes=EXACT, **limits):
        close()
        if request.param == "torch":
            context = torch_flash(standin)
            context.__enter__()
            kernel = TorchFlash(**limits)
        else:
            context = package_flash(standin)
            interface = context.__enter__()
            kernel = PackageFlash(interface._flash_attn_varlen_forward, interface._flash_attn_varlen_backward, **limits)
        open_ones.append(context)
        return VarlenBackend("cpu", dtypes, kernel)

    yield make
    close()


def tensors(plan, heads=6, kv_heads=2, width=8, value_width=8, dtype=torch.float64):
    draw = torch.Generator().manual_seed(plan.tokens)
    shapes = [
        (plan.queries, heads, width),
        (plan.tokens, kv_heads, width),
        (plan.tokens, kv_heads, value_width),
        (heads,),
    ]
    return [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes]


def outcome(attend, inputs, with_sinks=False):
    """The output, padding included, and the gradients of a random linear loss on it."""
    leaves = [x.clone().requires_grad_() for x in inputs[: 4 if with_sinks else 3]]
    out = attend(*leaves[:3], leaves[3] if with_sinks else None)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, weights)]


def through(backend, plan, inputs, window=None, with_sinks=False):
    return outcome(lambda q, k, v, s: backend.attend(q, k, v, plan, 0.4, window=window, sinks=s), inputs, with_sinks)


def wanted(plan, inputs, window=None, with_sinks=False):
    mask = allowed(plan, window)
    return outcome(lambda q, k, v, s: masked_attention(q, k, v, mask, 0.4, s), inputs, with_sinks)


def distance(one, other):
    return max((a - b).abs().max().item() for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("window", [None, 1, 4, 64])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_output_and_gradients_are_the_references(varlen, plan, window, with_sinks):
    plan = SharedPromptPlan.build(plan[0], plan[1], "cpu", plan[2])
    backend = varlen(FlashStandIn(strict_dtypes=False))
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-6)):
        for heads, kv_heads, width, value_width in ((6, 2, 8, 8), (4, 4, 12, 5), (4, 1, 8, 24)):
            inputs = tensors(plan, heads, kv_heads, width, value_width, dtype)
            exact = wanted(plan, [x.double() for x in inputs], window, with_sinks)
            largest = max(x.abs().max().item() for x in exact)
            assert distance(through(backend, plan, inputs, window, with_sinks), exact) < tolerance * max(1, largest)


def head_first(x):  # a host's view of [H,T,D]
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def width_strided(x):  # a view whose last dimension isn't contiguous, which the kernels refuse
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("view", [head_first, width_strided])
def test_views_of_any_strides_are_taken(varlen, view):
    plan = SharedPromptPlan.build([(8, [3, 5, 0, 3]), (4, [6, 6])], 41)
    backend, inputs = varlen(FlashStandIn(strict_dtypes=False)), tensors(plan)
    leaves = [view(x).requires_grad_() for x in inputs[:3]]
    assert not any(x.is_contiguous() for x in leaves)
    out = backend.attend(*leaves, plan, 0.4)
    gradients = torch.autograd.grad(out.square().sum(), leaves)
    exact = [x.clone().requires_grad_() for x in inputs[:3]]
    whole = masked_attention(*exact, allowed(plan), 0.4)
    wanted = torch.autograd.grad(whole.square().sum(), exact)
    assert distance([out, *gradients], [whole, *wanted]) < 1e-11


@given(
    groups=st.lists(
        st.tuples(st.integers(1, 12), st.lists(st.integers(0, 9), min_size=1, max_size=5)), min_size=1, max_size=3
    ),
    padding=st.integers(0, 3),
    window=st.sampled_from([None, 1, 3, 8]),
    with_sinks=st.booleans(),
    most=st.sampled_from([None, 1, 2]),
)
@settings(deadline=None, max_examples=40)
def test_any_plan_gives_the_references_attention_however_calls_are_split(groups, padding, window, with_sinks, most):
    used = sum(prompt + sum(lengths) for prompt, lengths in groups)
    plan = SharedPromptPlan.build(groups, used + padding)
    inputs = tensors(plan)
    with torch_flash(FlashStandIn(strict_dtypes=False)):
        backend = VarlenBackend("cpu", EXACT, TorchFlash(Limits(sequences=most)))
        assert distance(
            through(backend, plan, inputs, window, with_sinks), wanted(plan, inputs, window, with_sinks)
        ) < (1e-12)


def test_the_contract_holds_in_half_precision(varlen):
    backend = varlen(FlashStandIn(), ("bfloat16", "float16"))
    check_attention_backend(backend, dtypes=("float64", "float32", "bfloat16", "float16"))


def test_limits_split_calls_and_change_nothing(varlen):
    plan = SharedPromptPlan.build([(8, [3, 5, 3]), (4, [6, 6])], 41)
    inputs = tensors(plan)
    whole, split = FlashStandIn(strict_dtypes=False), FlashStandIn(strict_dtypes=False)
    one = through(varlen(whole), plan, inputs, 5, True)
    assert (whole.forwards, whole.backwards) == (1, 1)
    limits = Limits(sequences=3, keys=20)
    other = through(varlen(split, limits=limits), plan, inputs, 5, True)
    assert split.forwards == split.backwards == len(gathered(plan, limits)) > 3
    assert distance(one, other) < 1e-12


def test_a_sequence_beyond_the_limit_is_an_error(varlen):
    plan = SharedPromptPlan.build([(8, [3, 5])])
    with pytest.raises(ConfigurationError, match="longer than the attention kernel takes"):
        through(varlen(FlashStandIn(strict_dtypes=False), limits=Limits(keys=12)), plan, tensors(plan))


def test_no_gathered_copy_is_kept_for_the_backward_pass(varlen):
    plan = SharedPromptPlan.build([(64, [8] * 8)])
    leaves = [x.requires_grad_() for x in tensors(plan, dtype=torch.bfloat16)[:3]]
    kept = {}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    backend = varlen(FlashStandIn(), ("bfloat16",))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = backend.attend(*leaves, plan, 0.4)
    lse = 4 * plan.tokens * 6
    assert sum(kept.values()) == sum(2 * x.numel() for x in leaves) + 2 * out.numel() + lse
    copies = gathered(plan)[0].key_ends[-1]
    assert copies > 4 * plan.tokens  # what a kept copy would have cost


@pytest.mark.parametrize(
    ("mistake", "window"), [({"upper_left": True}, None), ({"window_dropped": True}, 4)], ids=["aligned", "window"]
)
def test_a_kernel_with_another_mask_is_another_attention(varlen, mistake, window):
    plan = SharedPromptPlan.build([(8, [3, 5])])
    inputs = tensors(plan)
    exact = wanted(plan, inputs, window)
    assert distance(through(varlen(FlashStandIn(strict_dtypes=False, **mistake)), plan, inputs, window), exact) > 0.1
    assert distance(through(varlen(FlashStandIn(strict_dtypes=False)), plan, inputs, window), exact) < 1e-12


def test_statistics_in_rows_order_are_another_attention(varlen):
    plan = SharedPromptPlan.build([(3, [3])])  # as many rows as heads: both orders have one shape
    inputs = tensors(plan)
    backend = varlen(FlashStandIn(strict_dtypes=False))
    assert distance(through(backend, plan, inputs, None, True), wanted(plan, inputs, None, True)) < 1e-12
    backend.kernel.log_sum_exp = lambda statistics: statistics[0]
    assert distance(through(backend, plan, inputs, None, True), wanted(plan, inputs, None, True)) > 1e-3


def test_the_kernel_is_told_when_results_must_repeat(varlen):
    plan = SharedPromptPlan.build([(4, [2, 2])])
    standin = FlashStandIn(strict_dtypes=False)
    backend, inputs = varlen(standin), tensors(plan)
    through(backend, plan, inputs)
    torch.use_deterministic_algorithms(True)
    try:
        through(backend, plan, inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    assert standin.deterministic == [False, True]


@pytest.mark.parametrize("window", [None, 4])
def test_torchs_own_meta_kernels_take_the_call_and_give_the_shapes_we_count_on(window):
    plan = SharedPromptPlan.build([(8, [3, 5])])
    (call,) = gathered(plan)
    q = torch.empty(call.query_ends[-1], 6, 16, dtype=torch.bfloat16, device="meta")
    k = torch.empty(call.key_ends[-1], 2, 16, dtype=torch.bfloat16, device="meta")
    kernel = TorchFlash()
    out, statistics = kernel.forward(q, k, k, call, 0.4, window)
    assert out.shape == q.shape
    assert kernel.log_sum_exp(statistics).shape == q.shape[:2]
    assert kernel.log_sum_exp(statistics).dtype == torch.float32
    assert kernel.statistics(kernel.log_sum_exp(statistics))[0].shape == statistics[0].shape
    dq, dk, dv = kernel.backward(out, q, k, k, out, statistics, call, 0.4, window)
    assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, k.shape)


def test_torchs_ops_have_the_schema_that_torch_itself_calls(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    assert isinstance(find_kernel(), TorchFlash)


def test_nothing_of_the_stand_in_stays_behind():
    with torch_flash(FlashStandIn()):
        assert torch._C._dispatch_has_kernel_for_dispatch_key("aten::_flash_attention_forward", "CPU")
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_flash_attention_forward", "CPU")
    with package_flash(FlashStandIn()):
        pass
    with pytest.raises(ImportError):
        import flash_attn.flash_attn_interface  # noqa: F401


def test_flash_attn_serves_where_torch_was_built_without():
    with package_flash(FlashStandIn()):
        assert isinstance(find_kernel(), PackageFlash)


def test_another_flash_attn_is_passed_over_with_what_differs():
    need = AttentionNeed("cuda", "bfloat16", 64, 64, 6, 2)
    with package_flash(FlashStandIn()) as interface:
        interface._flash_attn_varlen_forward = lambda q, k, v, window_size, s_aux: None
        reason = VarlenBackend().supports(need)
        assert "doesn't take cu_seqlens_q" in reason
        assert "asks for window_size, s_aux" in reason
        del interface._flash_attn_varlen_forward
        assert "_flash_attn_varlen_forward is missing" in VarlenBackend().supports(need)


def test_the_limits_are_the_grids_and_those_of_32_bit_lengths():
    assert Limits(sequences=65535, keys=2**31 - 1) == TorchFlash().limits == PackageFlash(print, print).limits


def test_what_the_kernel_does_not_take_is_refused_with_a_reason():
    def reason(backend=None, **changes):
        need = {"device": "cuda", "dtype": "bfloat16", "head_dim": 64, "value_dim": 64, "heads": 6, "kv_heads": 2}
        return (backend or VarlenBackend()).supports(AttentionNeed(**{**need, **changes}))

    assert "this is cpu" in reason(device="cpu")
    assert "this is float32" in reason(dtype="float32")
    assert "at most 256 wide" in reason(value_dim=264)
    assert "softcapping" in reason(softcap=True)
    assert "dropout" in reason(dropout=0.1)
    assert "don't divide" in reason(kv_heads=4)
    assert "this build has no flash attention" in reason()
    assert "can't be imported" in reason()
    assert reason(VarlenBackend(kernel=TorchFlash()), cached_prompt=True, window=True, sinks=True) is None


def test_an_old_card_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    need = AttentionNeed("cuda", "bfloat16", 64, 64, 6, 2)
    assert "this card has 7.5" in VarlenBackend(kernel=TorchFlash()).supports(need)


def test_without_a_kernel_attend_says_what_is_missing():
    plan = SharedPromptPlan.build([(2, [1])])
    with pytest.raises(ConfigurationError, match="flash-attn: can't be imported"):
        VarlenBackend().attend(*tensors(plan)[:3], plan, 0.4)


def test_torchs_op_is_passed_over_on_rocm_and_with_another_schema(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    with monkeypatch.context() as patch:
        patch.setattr(torch.version, "hip", "7.0")
        assert "ROCm" in find_kernel()
    monkeypatch.setattr(flash_kernels, "_TORCH_BACKWARD", [*flash_kernels._TORCH_BACKWARD, "deterministic"])
    assert "aten::_flash_attention_backward doesn't take deterministic" in find_kernel()
