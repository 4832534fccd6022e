"""How a group's rows become one row, and what the plan says about it."""

import random
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from metronome.contracts import AttentionNeed
from metronome.device import Device
from metronome.errors import ConfigurationError
from metronome.shared_prompt import plugin
from metronome.shared_prompt.calls import Limits, far
from metronome.shared_prompt.layout import longest_common_prefix, share_rows
from metronome.shared_prompt.plan import SharedPromptPlan
from metronome.shared_prompt.select import choose

rows_strategy = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=5)
groups_strategy = st.lists(
    st.tuples(st.integers(1, 6), st.lists(st.integers(0, 4), min_size=1, max_size=4)), min_size=1, max_size=3
)


@given(rows_strategy)
@settings(deadline=None, max_examples=80)
def test_the_prefix_is_common_and_no_longer_one_is(rows):
    prefix = longest_common_prefix(rows)
    assert all(row[:prefix] == rows[0][:prefix] for row in rows)
    longer = prefix + 1
    assert any(len(row) < longer for row in rows) or any(row[:longer] != rows[0][:longer] for row in rows)


def test_a_trained_token_never_falls_into_the_prefix():
    rows = [[1, 2, 9, 9, 5], [1, 2, 9, 9, 6]]  # the same prompt [1, 2], responses that begin alike
    assert longest_common_prefix(rows) == 4
    assert longest_common_prefix(rows, [2, 2]) == 2
    shared = share_rows(rows, [2, 2])
    assert (shared.prompt_len, shared.response_lens) == (2, (3, 3))
    assert shared.tokens == (1, 2, 9, 9, 5, 9, 9, 6)


def test_agents_with_different_prompts_share_what_they_have_in_common():
    rows = [[1, 2, 3, 7], [1, 2, 4, 4, 8], [1, 2]]
    shared = share_rows(rows, [3, 4, 2])
    assert (shared.prompt_len, shared.response_lens) == (2, (2, 3, 0))
    assert shared.tokens == (1, 2, 3, 7, 4, 4, 8)


@pytest.mark.parametrize(("rows", "untrained"), [([], []), ([[1], [2]], [1, 1]), ([[1, 2]], [0])])
def test_rows_that_share_nothing_are_refused(rows, untrained):
    with pytest.raises(ConfigurationError, match="share no prompt token"):
        share_rows(rows, untrained)


@given(groups_strategy, st.integers(0, 5))
@settings(deadline=None, max_examples=60)
def test_the_plan_restarts_positions_and_gathers_labels(groups, padding):
    used = sum(prompt + sum(lengths) for prompt, lengths in groups)
    plan = SharedPromptPlan.build(groups, used + padding)
    positions, rows, index, start = [], [], [], 0
    for prompt, lengths in groups:
        last = start + prompt - 1
        positions += range(prompt)
        start += prompt
        for length in lengths:
            positions += range(prompt, prompt + length)
            rows += [last if token == 0 else start + token - 1 for token in range(length)]
            index += range(start, start + length)
            start += length
    assert plan.position_ids.tolist() == positions + list(range(padding))
    assert plan.label_rows.tolist() == rows
    assert plan.response_index.tolist() == index
    assert plan.unique_label_rows.tolist() == sorted(set(rows))
    assert torch.equal(plan.unique_label_rows[plan.label_inverse], plan.label_rows)
    assert torch.equal(plan.label_order, torch.argsort(plan.label_rows, stable=True))
    assert np.diff(plan.label_bounds).tolist() == [rows.count(row) for row in sorted(set(rows))]
    assert (plan.tokens_shared, plan.tokens) == (used, used + padding)
    assert plan.tokens_separate == sum(prompt * len(lengths) + sum(lengths) for prompt, lengths in groups)
    for group in plan.groups:
        covered = sorted(place for bucket in group.buckets for place in bucket.index.tolist())
        assert covered == list(range(group.prompt.length, group.end - group.prompt.start))


@pytest.mark.parametrize(
    ("groups", "pad_to", "words"),
    [
        ([], None, "at least one group"),
        ([(0, [1])], None, "nothing predicts the first token"),
        ([(1, [])], None, "without responses"),
        ([(1, [2, -1])], None, "negative"),
        ([(4, [4])], 7, "pad_to >= 8"),
    ],
)
def test_impossible_plans_are_refused_with_the_remedy(groups, pad_to, words):
    with pytest.raises(ConfigurationError, match=words):
        SharedPromptPlan.build(groups, pad_to)


def test_auto_takes_the_cascade_and_the_reference_where_a_kernel_cannot_pay():
    need = AttentionNeed("cpu", "float32", 64, 64, 9, 3)
    assert choose("auto", need, SharedPromptPlan.build([(512, [64] * 8)]))[0].name == "cascade"
    tiny, why = choose("auto", need, SharedPromptPlan.build([(8, [2, 3, 4])]))
    assert tiny.name == "reference"
    assert "too few" in why
    with pytest.raises(ConfigurationError, match="backend: auto"):
        choose("cascade", AttentionNeed("cuda", "float32", 64, 64, 9, 3))


class Stub:
    def __init__(self, name, reason):
        self.name, self.reason = name, reason

    def supports(self, need):
        return self.reason


@pytest.mark.parametrize(
    ("device", "refusing", "taken"),
    [
        ("cuda", [], "varlen"),
        ("cuda", ["varlen"], "flex"),
        ("cuda", ["varlen", "flex"], "reference"),
        ("npu", [], "npu"),
        ("npu", ["npu"], "reference"),
        ("cpu", [], "cascade"),
        ("xpu", [], "reference"),
    ],
)
def test_auto_picks_by_device_and_tells_why_the_others_were_passed_over(device, refusing, taken):
    asked = []

    def find(name):
        asked.append(name)
        return Stub(name, f"{name} isn't there" if name in refusing else None)

    backend, why = choose("auto", AttentionNeed(device, "bfloat16", 64, 64, 9, 3), find=find)
    assert backend.name == taken
    assert why.startswith(f"{taken}: ")
    assert all(f"not {name}: {name} isn't there" in why for name in refusing)
    assert asked == [*refusing, taken]  # nothing else is imported
    with pytest.raises(ConfigurationError, match="no shared-prompt backend"):
        choose("auto", AttentionNeed(device, "bfloat16", 64, 64, 9, 3), find=lambda name: Stub(name, "no"))


def test_float32_on_cuda_goes_to_flex_and_float64_to_the_reference():
    assert choose("auto", AttentionNeed("cuda", "float32", 64, 64, 9, 3))[0].name == "flex"
    backend, why = choose("auto", AttentionNeed("cuda", "float64", 64, 64, 9, 3))
    assert backend.name == "reference"
    assert "not varlen: " in why
    assert "not flex: " in why


def test_the_far_part_is_cut_where_a_kernel_takes_fewer_rows_than_all_responses():
    plan = SharedPromptPlan.build([(3, [4, 4, 4])])
    calls = far(plan, Limits(keys=8))
    rows = [row for call in calls for row in range(plan.tokens)[call.query_rows]]
    assert rows == list(range(3, 15))
    assert all(call.query_ends[-1] <= 8 for call in calls)
    with pytest.raises(ConfigurationError, match="longer than the attention kernel"):
        far(plan, Limits(keys=2))


@pytest.mark.parametrize("lengths", [(20, 256), (1, 600)])
def test_a_plan_of_64_groups_and_16_responses_takes_milliseconds(lengths):
    draw = random.Random(0)
    groups = [(draw.randint(1, 512), [draw.randint(*lengths) for _ in range(16)]) for _ in range(64)]
    times = []
    for _ in range(5):
        start = time.process_time()
        SharedPromptPlan.build(groups)
        times.append(time.process_time() - start)
    assert min(times) < 0.05  # 3 ms alone on a core; the benchmark holds it to 5 ms


def test_the_plugin_builds_its_own_names_only():
    cpu = Device("cpu", "gloo")
    assert plugin.attention("host", {}, cpu).name == "host"
    chosen = plugin.attention("shared_prompt", {"backend": "reference", "self_check": False}, cpu)
    assert (chosen.options.backend, chosen.options.self_check) == ("reference", False)
    assert plugin.attention("another", {}, cpu) is None
    assert {offer.name for offer in plugin.describe()} == {"host", "shared_prompt"}


@pytest.mark.parametrize(
    ("name", "options", "device", "words"),
    [
        ("shared_prompt", {"backend": "flash"}, "cpu", "'cascade'"),
        ("shared_prompt", {"selfcheck": False}, "cpu", "self_check"),
        ("shared_prompt", {"self_check_tolerance": 0}, "cpu", "self_check_tolerance: above 0"),
        ("shared_prompt", {"self_check_tolerance": float("inf")}, "cpu", "finite"),
        ("shared_prompt", {"self_check_tolerance": 0.1, "self_check": False}, "cpu", "set self_check: true"),
        ("shared_prompt", {"backend": "cascade"}, "cuda", "backend: auto"),
        ("host", {"backend": "auto"}, "cpu", "unknown key"),
    ],
)
def test_wrong_options_are_refused_by_name(name, options, device, words):
    with pytest.raises(ConfigurationError, match=words):
        plugin.attention(name, options, Device(device, "gloo"))
