"""The three rollout sources: pure objects that decide and hold no data.

Admission is the window form of the survey's formula (ours): it survives a resume, and a bound of 0 makes
progress.

    capacity = max(0, (max_staleness + 1) * batch - (running + queued + trained))

All counts are prompt groups. A source never asks the time, so its answers are the same on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from metronome.contracts import Flow, RunFacts, Verdict
from metronome.errors import ConfigurationError, VersionMismatch
from metronome.periodic.strict import EQUALITY, ONE_VERSION, WHITENING, refuse


class _Source:
    """What the three share: admission, the end of a period, and the state that a checkpoint carries."""

    name: str
    max_staleness: int = 0
    spans_versions: bool = False

    def capacity(self, flow: Flow) -> int:
        """Groups that may be dispatched now: (max_staleness + 1) * batch less running, queued and trained."""
        window = (self.max_staleness + 1) * flow.batch
        return max(0, window - (flow.running + flow.queued + flow.trained))

    def period_complete(self, flow: Flow) -> bool:
        """Whether the period has trained its batch."""
        return flow.trained >= flow.batch

    def state_dict(self) -> dict[str, Any]:
        """Name and bound; nothing else is held."""
        return {"name": self.name, "max_staleness": self.max_staleness}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Accepts the state of an equal source; raises ConfigurationError for another name or bound."""
        mine = self.state_dict()
        found = {key: state.get(key) for key in mine}
        if found != mine:
            raise ConfigurationError(
                "the checkpoint was written with another rollout source",
                found=found,
                where="the checkpoint's rollout source",
                remedy=f"resume with rollout_source: {found['name']} and max_staleness "
                f"{found['max_staleness']}, or start a new run",
            )


class _OneVersion(_Source):
    """A source all of whose groups carry the version being trained."""

    def verdict(self, versions: Sequence[int], training_version: int) -> Verdict:
        """TRAIN if every token was sampled at ``training_version``; raises VersionMismatch otherwise."""
        _require_versions(versions, self.name)
        if any(version != training_version for version in versions):
            raise VersionMismatch(
                f"{self.name} trains version {training_version} but the group was sampled at {_listed(versions)}",
                found=sorted(set(versions)),
                where="the group's version stamps",
                remedy="publish to every worker before the period opens and stamp a group after the worker's "
                "acknowledgement, or rollout_source: bounded",
            )
        return Verdict.TRAIN


class Synchronous(_OneVersion):
    """Trains a period's groups only when all of them have arrived: the baseline without overlap."""

    name = "synchronous"

    def release(self, flow: Flow) -> int:
        """Nothing until queued + trained reaches the batch, then what is missing from the batch.

        At the end of the prompts the caller passes a Flow whose batch is what can still come.
        """
        if flow.queued + flow.trained < flow.batch:
            return 0
        return max(0, min(flow.queued, flow.batch - flow.trained))

    def check(self, facts: RunFacts) -> None:
        """Raises ConfigurationError unless running groups finish before a publication."""
        refuse(self.name, facts, [ONE_VERSION])


class Periodic(_OneVersion):
    """Trains groups as they arrive, all of one version: periodic asynchrony (arXiv 2511.18871).

    The gradient is the synchronous one only under the conditions of ``strict.EQUALITY`` (ours).

    Args:
        strict: refuse runs that break one of these conditions. False skips the equality rules, so the
            gradient may depend on the order of arrival; groups of one version and ``in_flight: finish`` stay
            required.
        audit_every: the host recomputes one period's gradient in N by index order with the reference backend;
            0 never.
        audit_tolerance: largest relative L2 difference that an audit lets pass (float32 gradients).
    """

    name = "periodic"

    def __init__(self, *, strict: bool = True, audit_every: int = 0, audit_tolerance: float = 1e-4) -> None:
        self.strict, self.audit_every, self.audit_tolerance = strict, audit_every, audit_tolerance

    def release(self, flow: Flow) -> int:
        """What is queued, up to what is missing from the batch."""
        return max(0, min(flow.queued, flow.batch - flow.trained))

    def check(self, facts: RunFacts) -> None:
        """Raises one ConfigurationError naming every condition that ``facts`` break, with what mends it."""
        if self.strict:
            refuse(self.name, facts, [*EQUALITY, ONE_VERSION])
        else:
            refuse(self.name, facts, [ONE_VERSION])


class Bounded(_Source):
    """Trains groups as they arrive, of any version up to ``max_staleness`` behind, by admission control.

    Args:
        max_staleness: largest staleness, in versions, that is trained; 0 makes progress and trains on policy.

    Raises ConfigurationError for a negative bound.
    """

    name = "bounded"
    spans_versions = True

    def __init__(self, max_staleness: int = 2) -> None:
        if max_staleness < 0:
            raise ConfigurationError(
                "the staleness bound can't be negative",
                found=max_staleness,
                where="metronome.bounded.max_staleness",
                remedy="max_staleness: 0 (on policy) or more",
            )
        self.max_staleness = max_staleness

    def release(self, flow: Flow) -> int:
        """What is queued, up to what is missing from the batch."""
        return max(0, min(flow.queued, flow.batch - flow.trained))

    def verdict(self, versions: Sequence[int], training_version: int) -> Verdict:
        """DROP a group whose oldest token is staler than the bound, else TRAIN.

        staleness = training_version - min(versions), measured now, so the time in the queue counts. The
        dropped prompt goes out again at the current version. Raises VersionMismatch for a future or unknown
        version.
        """
        _require_versions(versions, self.name)
        if max(versions) > training_version:
            raise VersionMismatch(
                f"{self.name} trains version {training_version} but the group was sampled at "
                f"{_listed(versions)}, in the future",
                found=sorted(set(versions)),
                where="the group's version stamps",
                remedy="raise the trainer's version before workers apply the weights of it",
            )
        staleness = training_version - min(versions)
        return Verdict.DROP if staleness > self.max_staleness else Verdict.TRAIN

    def check(self, facts: RunFacts) -> None:
        """Raises ConfigurationError for advantages whitened over the batch where the ratio isn't one."""
        refuse(self.name, facts, [WHITENING])


def _require_versions(versions: Sequence[int], name: str) -> None:
    if not versions or min(versions) < 0:
        raise VersionMismatch(
            f"{name} can't judge a group whose version is unknown",
            found=sorted(set(versions)),
            where="the group's version stamps",
            remedy="stamp every sampled token with the worker's version (0 or more); leave out prompt tokens",
        )


def _listed(versions: Sequence[int]) -> str:
    distinct = sorted(set(versions))
    return f"version{'s' if len(distinct) > 1 else ''} {', '.join(map(str, distinct))}"
