"""Our rollout sources keep the public contract, and the contract check catches sources that don't."""

from __future__ import annotations

import pytest

from metronome.contracts import Flow, RunFacts, Verdict
from metronome.errors import ConfigurationError
from metronome.periodic.plugin import describe, rollout_source
from metronome.periodic.sources import Bounded, Periodic, Synchronous
from metronome.testing.rollout_source import check_rollout_source


@pytest.mark.parametrize(
    "source",
    [Synchronous(), Periodic(), Periodic(strict=False), Bounded(0), Bounded(1), Bounded(3)],
    ids=lambda source: f"{source.name}-{source.max_staleness}",
)
def test_shipped_sources_keep_the_contract(source):
    check_rollout_source(source)


def test_every_offer_is_built_with_its_described_defaults():
    for offer in describe():
        source = rollout_source(name=offer.name, settings={})
        assert source is not None
        assert source.name == offer.name
        assert {key: getattr(source, key) for key in offer.options} == dict(offer.options)
        check_rollout_source(source)


def test_a_foreign_name_is_left_to_other_plugins():
    assert rollout_source(name="elsewhere", settings={}) is None


class _Greedy(Periodic):
    def capacity(self, flow):
        return super().capacity(flow) + 1


class _Stuck(Periodic):
    def capacity(self, flow):
        return max(0, super().capacity(flow) - 1)


class _Overfull(Periodic):
    def release(self, flow):
        return flow.queued + 1


class _Impatient(Periodic):
    def period_complete(self, flow):
        return flow.trained + flow.queued >= flow.batch


class _Lenient(Bounded):
    def verdict(self, versions, training_version):
        return Verdict.TRAIN


class _Averaging(Bounded):
    def verdict(self, versions, training_version):
        super().verdict(versions, training_version)
        stale = training_version - sum(versions) / len(versions)
        return Verdict.DROP if stale > self.max_staleness else Verdict.TRAIN


class _Strict(Bounded):
    def verdict(self, versions, training_version):
        verdict = super().verdict(versions, training_version)
        return Verdict.DROP if training_version > min(versions) else verdict


class _Choosy(Periodic):
    def check(self, facts):
        raise ConfigurationError("never content")


class _Moody(Periodic):
    asked = 0

    def capacity(self, flow: Flow) -> int:
        self.asked += 1
        return super().capacity(flow) if self.asked % 2 else 0


class _Amnesiac(Periodic):
    def state_dict(self):
        return {"seen": object()}


@pytest.mark.parametrize(
    ("broken", "error"),
    [
        (_Greedy(), AssertionError),
        (_Stuck(), AssertionError),
        (_Overfull(), AssertionError),
        (_Impatient(), AssertionError),
        (_Lenient(), AssertionError),
        (_Averaging(), AssertionError),
        (_Strict(), AssertionError),
        (_Choosy(), ConfigurationError),
        (_Moody(), AssertionError),
        (_Amnesiac(), TypeError),
        (object(), AssertionError),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, type) else value.__name__,
)
def test_the_contract_check_catches_a_broken_source(broken, error):
    with pytest.raises(error):
        check_rollout_source(broken)


def test_default_facts_are_those_of_a_streamed_on_policy_run():
    Periodic().check(RunFacts())
