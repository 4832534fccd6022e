"""Backend ``npu_cascade`` on the CPU, through a stand-in that keeps the operators' documented contract."""

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).resolve().parents[2]))

from npu_standin import semantics
from npu_standin.cases import (
    EXACT,
    TOLERANCE,
    changed,
    contiguous,
    error,
    inputs,
    kept_bytes,
    outcome,
    plan_of,
    upper_left,
    views,
)
from npu_standin.install import installed
from npu_standin.model import check as check_model
from npu_standin.schemas import SCHEMAS, before_7_2

from metronome.contracts import AttentionNeed
from metronome.errors import ConfigurationError, EqualityViolated
from metronome.shared_prompt.calls import Limits, own
from metronome.shared_prompt.interface import Signature
from metronome.shared_prompt.npu_cascade import NpuCascadeBackend
from metronome.shared_prompt.select import choose
from metronome.shared_prompt.selfcheck import check_attention
from metronome.testing.attention import check_attention_backend

GROUPS = [(7, [3, 0, 5]), (2, [4]), (9, [1, 6])]
ONCE = {"dtypes": ["float64"], "value_dims": [8]}


@pytest.fixture
def ops():
    with installed("npu_exact", strict_dtypes=False) as space:
        yield space


def backend(ops, **options):
    return NpuCascadeBackend(ops, "cpu", EXACT, **options)


def need(**changes):
    return AttentionNeed(
        **{"device": "cpu", "dtype": "bfloat16", "head_dim": 64, "value_dim": 64, "heads": 8, "kv_heads": 2} | changes
    )


def test_the_attention_contract_holds(ops):
    check_attention_backend(backend(ops), dtypes=["float64"])
    check_attention_backend(backend(ops), dtypes=["float32", "bfloat16"], value_dims=[4])


def test_the_contract_holds_in_the_dtypes_that_the_documentation_lists():
    with installed("npu_strict") as ops:
        check_attention_backend(NpuCascadeBackend(ops, "cpu"), dtypes=["bfloat16", "float16"], value_dims=[8])


@given(
    groups=st.lists(
        st.tuples(st.integers(1, 12), st.lists(st.integers(0, 9), min_size=1, max_size=5)), min_size=1, max_size=3
    ),
    padding=st.integers(0, 3),
    heads=st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    value_width=st.sampled_from([4, 8, 12]),
    sinks=st.booleans(),
    dtype=st.sampled_from(list(TOLERANCE)),
)
@settings(deadline=None, max_examples=60)
def test_any_plan_gives_the_attention_of_separate_rows(groups, padding, heads, value_width, sinks, dtype):
    plan = plan_of(groups, padding)
    tensors = inputs(plan, heads, (8, value_width), dtype)
    with installed("npu_any", strict_dtypes=False) as ops:
        assert error(backend(ops), plan, tensors, sinks=sinks) < TOLERANCE[dtype]


@pytest.mark.parametrize("padding", [0, 4])
def test_a_cached_prompt_gives_the_attention_of_separate_rows(ops, padding):
    plan = plan_of([(9, [4, 0, 6])], padding, cached=True)
    assert error(backend(ops), plan, inputs(plan), sinks=True) < 1e-12


def test_scores_far_apart_are_joined_without_overflow(ops):
    plan = plan_of([(6, [4, 5])])
    tensors = inputs(plan)
    tensors[1][:6] *= 400  # the prompt's scores reach a thousand, the responses' own stay near one
    assert outcome(backend(ops).attend, plan, tensors)[0].isfinite().all()
    assert error(backend(ops), plan, tensors) < 1e-11
    tensors[1][:6] /= 400
    tensors[1][6:] *= 400
    assert error(backend(ops), plan, tensors) < 1e-11


def test_operators_get_contiguous_tensors_whatever_the_host_hands_over():
    plan = plan_of(GROUPS, 3)
    tensors = views(inputs(plan, widths=(8, 8)))
    assert not any(x.is_contiguous() for x in tensors[:3])
    kernels = {name: contiguous(name) for name in ("forward", "backward")}
    with installed("npu_contiguous", strict_dtypes=False, **kernels) as ops:
        assert error(backend(ops), plan, tensors, sinks=True) < 1e-12


@pytest.mark.parametrize("limits", [Limits(sequences=1), Limits(sequences=3, keys=16)])
def test_calls_split_at_the_limits_give_the_same_attention(limits):
    plan, calls = plan_of(GROUPS, 3), []

    def counting(**named):
        calls.append(len(named["actual_seq_qlen"]))
        assert calls[-1] <= limits.sequences
        assert limits.keys is None or named["actual_seq_kvlen"][-1] <= limits.keys
        return semantics.forward(**named)

    with installed("npu_counted", strict_dtypes=False, forward=counting) as ops:
        assert error(backend(ops, limits=limits), plan, inputs(plan), sinks=True) < 1e-12
    assert len(calls) > 2
    assert sum(calls) == (3 + 5 + 1) + 3  # each prompt, response and the padding to itself; each group to its prompt


def test_a_sequence_longer_than_the_operator_takes_is_a_clear_error(ops):
    plan = plan_of([(9, [3, 4])])
    q, k, v, _ = inputs(plan)
    backend(ops, limits=Limits(keys=9)).attend(q, k, v, plan, 1.0)  # no keys are gathered: the prompt is the longest
    with pytest.raises(ConfigurationError, match=r"longer than the attention kernel takes.*found 9.*at most 8"):
        backend(ops, limits=Limits(keys=8)).attend(q, k, v, plan, 1.0)


def test_keys_are_never_copied_and_each_statistic_is_kept_once(ops):
    plan, rows = plan_of([(64, [16] * 8)]), []

    def measuring(**named):
        rows.append(len(named["key"]))
        return semantics.forward(**named)

    leaves = [x.requires_grad_() for x in inputs(plan)[:3]]
    with installed("npu_measured", strict_dtypes=False, forward=measuring) as measured:
        kept, out = kept_bytes(lambda: backend(measured).attend(*leaves, plan, 0.4))
    assert rows == [plan.tokens, 64]
    assert kept == sum(x.nbytes for x in leaves) + out.nbytes + 2 * plan.tokens * 4 * 8


def test_gradients_of_both_parts_are_added_in_float32(ops):
    plan = plan_of([(24, [4] * 64)])
    tensors = inputs(plan, dtype=torch.bfloat16)
    wanted = outcome(backend(ops).attend, plan, [x.double() for x in tensors])
    found = outcome(backend(ops).attend, plan, tensors)
    parts = []

    def keeping(**named):
        parts.append(semantics.backward(**named)[1])
        return semantics.backward(**named)

    with installed("npu_parts", strict_dtypes=False, backward=keeping) as kept:
        outcome(backend(kept).attend, plan, tensors)
    own, far = parts
    assert torch.equal(found[2][:24], (own[:24].float() + far.float()).bfloat16())
    error_of = [((x[:24].double() - wanted[2][:24]).norm() / wanted[2][:24].norm()).item() for x in (found[2], own)]
    assert error_of[0] < 4e-3
    assert error_of[1] > 0.1  # the far part counts


# --- what must not pass ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault, kernels",
    [
        ("mask dropped in the gradient", {"backward": changed("backward", atten_mask=None, sparse_mode=0)}),
        ("the order of the gradient's statistics", {"backward": changed("backward", softmax_layout="")}),
        ("its own statistics in the gradient", {"backward": lambda **n: semantics.backward(**n | _own_statistics(n))}),
    ],
)
def test_the_contract_catches_an_operator_with_a_fault(fault, kernels):
    with (
        installed("npu_faulty", strict_dtypes=False, **kernels) as ops,
        pytest.raises(AssertionError, match="npu_cascade: "),
    ):
        check_attention_backend(backend(ops), **ONCE)


def _own_statistics(named):
    """A part's own softmax instead of the joined one's."""
    wanted = ("query", "key", "value", "head_num", "input_layout", "atten_mask", "sparse_mode", "softmax_layout")
    lengths = ("actual_seq_qlen", "actual_seq_kvlen", "strict_dtypes")
    again = {name: named[name] for name in (*wanted, *lengths) if name in named}
    _, peak, total = semantics.forward(**again, scale=named["scale_value"])[:3]
    return {"softmax_max": peak, "softmax_sum": total}


def test_statistics_in_the_wrong_order_give_wrong_results(ops):
    plan = plan_of(GROUPS)
    right = outcome(backend(ops).attend, plan, inputs(plan))
    assert error(backend(ops), plan, inputs(plan)) < 1e-12
    for direction in ("forward", "backward"):
        with installed("npu_order", strict_dtypes=False, **{direction: changed(direction, softmax_layout="")}) as bad:
            wrong = outcome(backend(bad).attend, plan, inputs(plan))
        differences = [(one - other).abs().max() for one, other in zip(right, wrong, strict=True)]
        assert all(difference > 1e-2 for difference in differences[1:])
        assert (differences[0] > 1e-2) == (direction == "forward")


def test_the_first_use_check_catches_what_the_probe_cannot_see(ops):
    plan, layer = plan_of(GROUPS, 2), Signature(4, 2, 8, 8, torch.float64, 0.4, None, False)
    check_attention(backend(ops), plan, layer, torch.device("cpu"))
    with installed("npu_late", strict_dtypes=False, backward=changed("backward", softmax_layout="")) as bad:
        assert backend(bad).supports(need()) is None  # the forward's order is right
        with pytest.raises(EqualityViolated, match="npu_cascade"):
            check_attention(backend(bad), plan, layer, torch.device("cpu"))


def test_padding_that_is_no_sequence_would_be_uninitialised(ops):
    plan, short = plan_of(GROUPS, 3), plan_of(GROUPS)
    q, k, v, _ = inputs(plan)
    assert backend(ops).attend(q, k, v, plan, 1.0).isfinite().all()
    (call,) = own(short)  # its last sequence is a response
    named = {"actual_seq_qlen": call.query_ends, "actual_seq_kvlen": call.key_ends}
    out = ops.npu_fusion_attention(q, k, v, 4, "TND", **named)[0]
    assert out[: short.tokens].isfinite().all()
    assert out[short.tokens :].isnan().all()


# --- capability and refusals ----------------------------------------------------------------------


def test_windows_are_refused_with_the_backend_that_takes_them(ops):
    assert "use backend: npu" in backend(ops).supports(need(window=True))
    plan = plan_of(GROUPS)
    q, k, v, _ = inputs(plan)
    with pytest.raises(ConfigurationError, match=r"takes no window; found 3.*backend: npu"):
        backend(ops).attend(q, k, v, plan, 1.0, window=3)


def test_what_the_operators_cannot_do_is_refused_with_the_reason(ops):
    found = backend(ops)
    assert found.supports(need(sinks=True, cached_prompt=True)) is None
    assert "runs on cpu, this is cuda" in found.supports(need(device="cuda"))
    assert "at most 768 wide" in found.supports(need(head_dim=800))
    assert "softcapping" in found.supports(need(softcap=True))
    with pytest.raises(ConfigurationError, match=r"npu_cascade.*runs on npu, this is cpu"):
        choose("npu_cascade", need())


def test_without_operators_the_reason_is_said_before_anything_runs():
    found = NpuCascadeBackend(object(), "cpu")
    assert "lacks npu_fusion_attention and npu_fusion_attention_grad" in found.supports(need())
    plan = plan_of(GROUPS)
    with pytest.raises(ConfigurationError, match="'npu_cascade' has no operators: this torch_npu lacks"):
        found.attend(*inputs(plan)[:3], plan, 1.0)


def test_a_version_without_softmax_layout_is_refused():
    older = {name: before_7_2(text) for name, text in SCHEMAS.items()}
    with installed("npu_older", schemas=older) as ops:
        reason = backend(ops).supports(need())
    assert "has no softmax_layout" in reason
    assert "TorchNPU 7.2.0 with CANN 8.3.RC1" in reason


@pytest.mark.parametrize("dtype", EXACT)
def test_a_driver_that_drops_softmax_layout_is_found_out_by_the_probe_once(dtype):
    calls = []

    def dropping(**named):
        calls.append(named["softmax_layout"])
        return semantics.forward(**named | {"softmax_layout": ""})

    with installed("npu_drops", strict_dtypes=False, forward=dropping) as ops:
        found = backend(ops)
        assert "aren't each token's" in found.supports(need(dtype=dtype))
        assert "aren't each token's" in found.supports(need(dtype=dtype, sinks=True))
    assert calls == ["TND"]


def test_a_driver_that_fails_at_softmax_layout_is_a_refusal_with_its_message():
    def failing(**named):
        raise RuntimeError("EZ1001: softmax_layout isn't supported")

    with installed("npu_fails", forward=failing) as ops:
        reason = backend(ops).supports(need())
    assert "fails with softmax_layout (EZ1001: softmax_layout isn't supported" in reason
    assert "CANN 8.3.RC1" in reason


def uninitialised(**named):
    return tuple(x * torch.nan if torch.is_tensor(x) else x for x in semantics.forward(**named))


@pytest.mark.parametrize("forward", [uninitialised, changed("forward", atten_mask=None, sparse_mode=0)])
def test_a_probe_without_values_or_without_its_mask_is_a_refusal(forward):
    with installed("npu_bad_probe", forward=forward) as ops:
        assert "aren't each token's" in backend(ops).supports(need())


# --- a whole model --------------------------------------------------------------------------------


def test_a_hugging_face_model_through_the_operators_equals_separate_rows(ops):
    check_model(backend(ops))


def test_a_hugging_face_model_notices_a_wrong_alignment():
    kernels = {"forward": upper_left("forward"), "backward": upper_left("backward")}
    with installed("npu_model_upper", strict_dtypes=False, **kernels) as ops:
        check_model(backend(ops))  # own sequences have as many keys as queries: both alignments are one
    with (
        installed("npu_model_order", strict_dtypes=False, forward=changed("forward", softmax_layout="")) as ops,
        pytest.raises(ConfigurationError, match="aren't each token's"),
    ):
        check_model(backend(ops))
