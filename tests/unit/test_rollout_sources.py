"""Rollout sources: admission, release, verdicts, the rules of strict mode, options and state."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metronome.contracts import Flow, RunFacts, Verdict
from metronome.errors import ConfigurationError, VersionMismatch
from metronome.periodic.plugin import rollout_source
from metronome.periodic.sources import Bounded, Periodic, Synchronous


@given(
    bound=st.integers(0, 4),
    version=st.integers(0, 1000),
    batch=st.integers(1, 64),
    counts=st.tuples(*[st.integers(0, 400)] * 3),
)
@settings(deadline=None, max_examples=100)
def test_admission_fills_the_window_exactly(bound, version, batch, counts):
    running, queued, trained = counts
    capacity = Bounded(bound).capacity(Flow(version, batch, running, queued, trained))
    under_way, window = sum(counts), (bound + 1) * batch
    assert capacity + under_way == max(window, under_way)


@given(accepted=st.integers(0, 200), running=st.integers(0, 50), version=st.integers(0, 20))
@settings(deadline=None, max_examples=100)
def test_the_window_form_equals_the_running_total_of_the_survey(accepted, running, version):
    batch, bound = 8, 2
    accepted = max(accepted, version * batch)  # earlier periods trained their batches
    survey = (bound + version + 1) * batch - (accepted + running)
    flow = Flow(version, batch, running, queued=accepted - version * batch, trained=0)
    assert Bounded(bound).capacity(flow) == max(0, survey)


def test_synchronous_releases_nothing_before_the_whole_batch_is_there():
    source = Synchronous()
    assert source.release(Flow(0, 4, running=1, queued=3)) == 0
    assert source.release(Flow(0, 4, queued=4)) == 4
    assert source.release(Flow(0, 4, queued=2, trained=2)) == 2
    assert source.release(Flow(0, 4, running=1, queued=1, trained=2)) == 0  # one was filtered: wait for its refill
    assert source.release(Flow(0, 3, queued=3)) == 3  # the prompts ran out: a shorter batch


@pytest.mark.parametrize("source", [Periodic(), Bounded(2)], ids=lambda source: source.name)
def test_streaming_sources_release_what_is_queued_but_never_overfill(source):
    assert source.release(Flow(0, 4, running=3, queued=1)) == 1
    assert source.release(Flow(0, 4, queued=5, trained=3)) == 1
    assert source.release(Flow(0, 4, queued=5, trained=4)) == 0


@pytest.mark.parametrize("source", [Synchronous(), Periodic()], ids=lambda source: source.name)
def test_a_group_of_another_version_raises_and_is_named(source):
    assert source.verdict([3, 3], 3) is Verdict.TRAIN
    with pytest.raises(VersionMismatch, match=r"trains version 3 .*sampled at versions 2, 3.*to mend"):
        source.verdict([3, 2, 3], 3)
    with pytest.raises(VersionMismatch, match="sampled at version 4"):
        source.verdict([4], 3)


def test_bounded_drops_by_the_oldest_token_and_refuses_the_future():
    source = Bounded(2)
    assert source.verdict([3, 5], 5) is Verdict.TRAIN
    assert source.verdict([2, 5, 5, 5], 5) is Verdict.DROP
    with pytest.raises(VersionMismatch, match="in the future"):
        source.verdict([5, 6], 5)


@pytest.mark.parametrize("source", [Synchronous(), Periodic(), Bounded(2)], ids=lambda source: source.name)
@pytest.mark.parametrize("versions", [[-1], [3, -1], []])
def test_unknown_versions_raise(source, versions):
    with pytest.raises(VersionMismatch, match="unknown"):
        source.verdict(versions, 3)


BROKEN = [
    ({"normaliser_streams": False}, "(a)", "rescale once"),
    ({"advantage_scope": "batch", "ratio_is_one": False}, "(b)", "advantage_scope: group"),
    ({"dropout": 0.1}, "(c)", "dropout: 0.0"),
    ({"router_losses": True}, "(c)", "router_losses: false"),
    ({"optimiser_steps": 2}, "(d, e)", "optimiser_steps: 1"),
    ({"optimiser_steps": 0}, "(d, e)", "optimiser_steps: 1"),
    ({"accumulation_dtype": "bfloat16"}, "(f)", "accumulation_dtype: float32"),
    ({"seeds_per_prompt": False}, "(g)", "seeds_per_prompt: true"),
    ({"drops_by_arrival": True}, "(h)", "drops_by_arrival: false"),
    ({"in_flight": "abort"}, "span two versions", "in_flight: finish"),
    ({"in_flight": "resume"}, "span two versions", "in_flight: finish"),
]


@pytest.mark.parametrize(("changes", "reason", "remedy"), BROKEN)
def test_strict_mode_refuses_each_broken_condition_with_its_remedy(changes, reason, remedy):
    with pytest.raises(ConfigurationError) as caught:
        Periodic().check(RunFacts(**changes))
    message = str(caught.value)
    assert reason in message
    assert remedy in message.partition("to mend:")[2]
    assert all(f"{name!r}: {value!r}" in message for name, value in changes.items())
    assert "\n" not in message


def test_strict_mode_names_all_broken_conditions_at_once():
    with pytest.raises(ConfigurationError) as caught:
        Periodic().check(RunFacts(dropout=0.1, optimiser_steps=4, in_flight="abort"))
    message = str(caught.value)
    for part in (
        "(c)",
        "(d, e)",
        "span two versions",
        "dropout: 0.0",
        "optimiser_steps: 1",
        "in_flight: finish",
    ):
        assert part in message
    assert "(a)" not in message


@pytest.mark.parametrize(
    "facts",
    [
        RunFacts(),
        RunFacts(advantage_scope="batch", ratio_is_one=True),
        RunFacts(advantage_scope="group", ratio_is_one=False),
        RunFacts(accumulation_dtype="float64"),
    ],
)
def test_strict_mode_accepts_what_keeps_the_equality(facts):
    Periodic().check(facts)


def test_strict_off_skips_the_equality_rules_but_not_the_one_version_rule():
    broken = RunFacts(
        optimiser_steps=4,
        normaliser_streams=False,
        advantage_scope="batch",
        ratio_is_one=False,
        dropout=0.1,
        router_losses=True,
        accumulation_dtype="bfloat16",
        seeds_per_prompt=False,
        drops_by_arrival=True,
    )
    Periodic(strict=False).check(broken)
    with pytest.raises(ConfigurationError, match=r"\(a\).*\(h\)"):
        Periodic().check(broken)
    with pytest.raises(ConfigurationError, match="in_flight: finish"):
        Periodic(strict=False).check(dataclasses.replace(broken, in_flight="abort"))


def test_synchronous_accepts_any_run_whose_groups_finish():
    Synchronous().check(RunFacts(optimiser_steps=4, dropout=0.1, normaliser_streams=False))
    with pytest.raises(ConfigurationError, match="in_flight: finish"):
        Synchronous().check(RunFacts(in_flight="resume"))


def test_bounded_refuses_only_batch_whitening_off_policy():
    Bounded(2).check(RunFacts(optimiser_steps=4, dropout=0.1, in_flight="resume", ratio_is_one=False))
    with pytest.raises(ConfigurationError, match="advantage_scope: group"):
        Bounded(2).check(RunFacts(advantage_scope="batch", ratio_is_one=False))


def test_state_of_another_source_or_bound_is_refused():
    Bounded(2).load_state_dict(Bounded(2).state_dict())
    for other in (Bounded(3), Periodic()):
        with pytest.raises(ConfigurationError, match="resume with rollout_source"):
            Bounded(2).load_state_dict(other.state_dict())


@pytest.mark.parametrize(
    ("name", "options", "place", "remedy"),
    [
        ("synchronous", {"strict": True}, "metronome.synchronous", "none"),
        ("periodic", {"audit": 5}, "metronome.periodic", "use 'audit_every'"),
        ("periodic", {"audit_every": -1}, "metronome.periodic.audit_every", "one period in N"),
        ("periodic", {"audit_every": True}, "metronome.periodic.audit_every", "a value of its own"),
        ("periodic", {"audit_every": False}, "metronome.periodic.audit_every", "a value of its own"),
        ("periodic", {"audit_tolerance": 0.1}, "metronome.periodic", "set audit_every: N"),
        ("periodic", {"audit_tolerance": 0.1, "audit_every": 0}, "metronome.periodic", "set audit_every: N"),
        ("periodic", {"audit_tolerance": 0}, "metronome.periodic.audit_tolerance", "above 0"),
        ("periodic", {"audit_tolerance": float("nan")}, "metronome.periodic.audit_tolerance", "above 0"),
        ("bounded", {"max_staleness": -1}, "metronome.bounded.max_staleness", "0 (on policy)"),
        ("bounded", {"max_staleness": "two"}, "metronome.bounded.max_staleness", "a whole number"),
    ],
)
def test_bad_options_are_refused_with_place_and_remedy(name, options, place, remedy):
    with pytest.raises(ConfigurationError) as caught:
        rollout_source(name=name, settings=options)
    assert place in str(caught.value)
    assert remedy in str(caught.value)


def test_options_reach_the_source():
    source = rollout_source(name="periodic", settings={"strict": False, "audit_every": 3, "audit_tolerance": 1e-6})
    assert (source.strict, source.audit_every, source.audit_tolerance) == (False, 3, 1e-6)
    assert rollout_source(name="bounded", settings={"max_staleness": 5}).max_staleness == 5


def test_a_negative_bound_is_refused_without_the_plugin_too():
    with pytest.raises(ConfigurationError, match="can't be negative"):
        Bounded(-1)
