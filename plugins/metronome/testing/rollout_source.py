"""The contract of a rollout source, as a check that a third party runs on its own plug-in object."""

from __future__ import annotations

import json
from collections.abc import Iterator

from metronome.contracts import Flow, RolloutSource, RunFacts, Verdict
from metronome.errors import VersionMismatch

_VERSION = 7
_BATCHES = (1, 2, 5)


def check_rollout_source(source: RolloutSource) -> None:
    """Raises AssertionError with a sentence for the first promise that ``source`` breaks.

    Promises: the attributes of the contract; a capacity never negative and never beyond
    (max_staleness + 1) * batch in all; a release never beyond what is queued and what is missing; every
    period ends, from any flow; groups of the trained version are trained, staler ones than the bound aren't,
    future and unknown ones raise VersionMismatch; the defaults of RunFacts are accepted; answers depend on
    the arguments alone; the state is JSON-able and loads back.
    """
    _check_attributes(source)
    for flow in _flows(source.max_staleness):
        _check_counts(source, flow)
        _check_progress(source, flow)
    _check_verdicts(source)
    source.check(RunFacts())
    _check_state(source)


def _check_attributes(source: RolloutSource) -> None:
    assert isinstance(source, RolloutSource), "a rollout source has all attributes of contracts.RolloutSource"
    assert isinstance(source.name, str), "name is a string"
    assert source.name, "name isn't empty"
    assert isinstance(source.max_staleness, int), "max_staleness is an integer"
    assert source.max_staleness >= 0, "max_staleness isn't negative"
    assert isinstance(source.spans_versions, bool), "spans_versions is a bool"
    assert source.spans_versions or source.max_staleness == 0, "a source with max_staleness above 0 spans versions"


def _flows(max_staleness: int) -> Iterator[Flow]:
    """Every flow within the admission window of a few batch sizes."""
    for batch in _BATCHES:
        window = (max_staleness + 1) * batch
        for trained in range(batch + 1):
            for queued in range(window - trained + 1):
                for running in range(window - trained - queued + 1):
                    yield Flow(_VERSION, batch, running, queued, trained)


def _check_counts(source: RolloutSource, flow: Flow) -> None:
    capacity, release = source.capacity(flow), source.release(flow)
    under_way = flow.running + flow.queued + flow.trained
    assert capacity >= 0, f"capacity is negative for {flow}"
    assert capacity + under_way <= (source.max_staleness + 1) * flow.batch, (
        f"capacity {capacity} lets more than (max_staleness + 1) * batch groups out for {flow}"
    )
    assert 0 <= release <= flow.queued, f"release {release} isn't within what is queued for {flow}"
    assert release <= flow.batch - flow.trained, f"release {release} overfills the batch for {flow}"
    assert source.period_complete(flow) == (flow.trained >= flow.batch), (
        f"a period is complete when it has trained its batch, not otherwise: {flow}"
    )
    assert (capacity, release) == (source.capacity(flow), source.release(flow)), (
        f"the same flow gets two answers: {flow}"
    )


def _check_progress(source: RolloutSource, flow: Flow) -> None:
    """Release, else dispatch, else let a running group finish: the period must end."""
    while not source.period_complete(flow):
        release, capacity = source.release(flow), source.capacity(flow)
        running, queued, trained = flow.running, flow.queued, flow.trained
        if release:
            queued, trained = queued - release, trained + release
        elif capacity:
            running += capacity
        elif running:
            running, queued = running - 1, queued + 1
        else:
            raise AssertionError(f"nothing runs, nothing is admitted and nothing is released: {flow}")
        flow = Flow(flow.version, flow.batch, running, queued, trained)


def _check_verdicts(source: RolloutSource) -> None:
    for version in (0, _VERSION):
        assert source.verdict([version, version], version) is Verdict.TRAIN, (
            "a group sampled at the trained version is trained"
        )
    stale = _VERSION + source.max_staleness
    if source.spans_versions:
        assert source.verdict([_VERSION, stale], stale) is Verdict.TRAIN, (
            f"a group of staleness {source.max_staleness} (its bound) is trained"
        )
    for versions, trained, sentence in (
        ([_VERSION + 1], _VERSION, "a group of a future version raises VersionMismatch"),
        (
            [_VERSION, _VERSION + 1],
            _VERSION,
            "a group with one token of a future version raises VersionMismatch",
        ),
        ([-1, _VERSION], _VERSION, "a group with a token of unknown version raises VersionMismatch"),
        ([], _VERSION, "a group without versions raises VersionMismatch"),
    ):
        assert _verdict(source, versions, trained) is None, sentence
    for versions in ([_VERSION], [_VERSION, stale + 1]):
        assert _verdict(source, versions, stale + 1) is not Verdict.TRAIN, (
            f"a group with a token of staleness {source.max_staleness + 1} isn't trained"
        )


def _verdict(source: RolloutSource, versions: list[int], trained: int) -> Verdict | None:
    try:
        return source.verdict(versions, trained)
    except VersionMismatch:
        return None


def _check_state(source: RolloutSource) -> None:
    state = source.state_dict()
    written = json.dumps(state)
    source.load_state_dict(json.loads(written))
    assert json.dumps(source.state_dict()) == written, "the state loads back as it was saved"
