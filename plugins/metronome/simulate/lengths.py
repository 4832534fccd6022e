"""Where response lengths come from: a distribution, a file, or a run's own record."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from metronome.errors import ConfigurationError
from metronome.recipes import near_file
from metronome.simulate.cluster import Cluster, EmpiricalLengths, LognormalLengths

_LONGEST = 1_000_000  # tokens of a response in a file, as of lengths.cap


@dataclass(frozen=True, slots=True)
class Group:
    """Lengths of one group in tokens.

    Attributes:
        prompt_tokens: of its prompt.
        responses: ``[G]`` tokens of each rollout.
        cap: the length limit; a response of that length counts as truncated. None: none is known.
    """

    prompt_tokens: int
    responses: tuple[int, ...]
    cap: int | None = None


class LengthSource(Protocol):
    """The lengths of any group: the same answer to the same question, whatever the policy and whenever asked."""

    def group(self, step: int, prompt: int, size: int) -> Group:
        """The group of ``size`` rollouts of the ``prompt``-th prompt in the ``step``-th batch of prompts."""


class Drawn:
    """Lengths from the cluster's distribution, seeded by (seed, step, prompt); a small group is a large one's start.

    Args:
        cluster: whose distribution it is.
        seed: of the draws.

    Raises ConfigurationError for a file of lengths that can't be read or holds other than numbers from 1 to a million.
    """

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self._distribution = cluster.lengths
        self._prompt_tokens, self._seed = cluster.prompt_tokens, seed
        self._sample = np.zeros(1)  # logarithms of the file's lengths
        if isinstance(self._distribution, EmpiricalLengths):
            self._sample = np.log(_read(Path(self._distribution.file)))
        self._cap = self._distribution.cap or round(math.exp(self._sample.max()))

    def group(self, step: int, prompt: int, size: int) -> Group:
        """See ``LengthSource``."""
        random = np.random.Generator(np.random.PCG64([self._seed, step, prompt]))
        spec = self._distribution
        # In logarithms, since sigma or a growth of many steps may make more than a float holds.
        if isinstance(spec, LognormalLengths):
            own = spec.prompt_sigma * random.standard_normal() if spec.prompt_sigma else 0.0
            drawn = math.log(spec.median) + own + spec.sigma * random.standard_normal(size)
        else:
            drawn = self._sample[random.integers(len(self._sample), size=size)]
        grown = np.clip(drawn + step * math.log(spec.growth), 0.0, math.log(self._cap))
        return Group(self._prompt_tokens, tuple(np.rint(np.exp(grown)).astype(int).tolist()), self._cap)


class Recorded:
    """Lengths of a recorded run, step by step: replayed as they are, or bootstrapped.

    Where the simulation asks for more than there is it begins again: steps after the last at the first, prompts at the
    step's first. A smaller group takes the first members; a larger one draws what is missing from the members.

    Args:
        steps: ``[steps][prompts]`` groups, at least one in each step, each with at least one response.
        seed: of the draws for larger groups.

    Raises ConfigurationError for an empty record or group, or a length below 1.
    """

    def __init__(self, steps: Sequence[Sequence[Group]], seed: int = 0) -> None:
        self._steps, self._seed = tuple(tuple(groups) for groups in steps), seed
        if not self._steps or not all(self._steps):
            raise ConfigurationError(
                "a record of lengths needs a group in every step",
                found=[len(one) for one in self._steps],
                where="the recorded lengths",
                remedy="leave out steps without rollouts",
            )
        for group in (one for groups in self._steps for one in groups):
            if not group.responses or min(group.responses) < 1 or group.prompt_tokens < 1:
                raise ConfigurationError(
                    "a recorded group needs a prompt and responses of at least one token",
                    found=group,
                    where="the recorded lengths",
                    remedy="leave out empty responses",
                )

    def group(self, step: int, prompt: int, size: int) -> Group:
        """See ``LengthSource``."""
        groups = self._steps[step % len(self._steps)]
        found = groups[prompt % len(groups)]
        missing = size - len(found.responses)
        more: tuple[int, ...] = ()
        if missing > 0:
            random = np.random.default_rng([self._seed, step, prompt])
            more = tuple(found.responses[i] for i in random.integers(len(found.responses), size=missing))
        return Group(found.prompt_tokens, found.responses[:size] + more, found.cap)

    def bootstrapped(self, seed: int) -> Recorded:
        """A record of the same shape whose steps' groups are drawn with replacement from the same step."""
        random = np.random.default_rng(seed)
        return Recorded(
            [[groups[i] for i in random.integers(len(groups), size=len(groups))] for groups in self._steps], seed
        )


def _read(path: Path) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    try:
        words = path.read_text(encoding="utf-8").replace(",", " ").split()
    except (OSError, ValueError) as error:
        near = near_file(path) if isinstance(error, FileNotFoundError) else None
        raise ConfigurationError(
            f"the file of lengths can't be read: {error}",
            found=str(path),
            where="lengths.file",
            remedy=near or "give a text file of whole numbers",
        ) from None
    try:
        values = np.array([float(word) for word in words])
    except ValueError as error:
        values = np.array([])
        reason = str(error)
    else:
        reason = "no numbers" if not len(values) else ""
    if reason or not np.isfinite(values).all() or values.min() < 1 or values.max() > _LONGEST:
        raise ConfigurationError(
            f"a file of lengths holds numbers of tokens, each at least 1 and at most {_LONGEST:,}"
            f"{': ' + reason if reason else ''}",
            found=str(path),
            where="lengths.file",
            remedy="one number a line",
        )
    return values
