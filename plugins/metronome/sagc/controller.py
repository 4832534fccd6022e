"""SAGC, straggler-aware group control (arXiv 2606.02218), as one object that lives on the CPU."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from metronome.contracts import GroupStats, StepStats
from metronome.errors import ConfigurationError
from metronome.sagc import events
from metronome.sagc.budget import prompts
from metronome.sagc.options import SagcOptions, utility


class SagcController:
    """Chooses G by dual ascent and Thompson sampling (arXiv 2606.02218; docs/techniques/sagc.md).

    maximise u(G) subject to E[S | G] <= delta, where S = 1 in a step with stragglers. After each step::

        lambda <- clip(lambda + eta * (S - delta), 0, lambda_max)
        a_g <- a0 + gamma * (a_g - a0), b_g alike, for every size;  then a_G += S, b_G += 1 - S
        next G = argmax over the neighbours of G of  u(g) - lambda * p_g,   p_g ~ Beta(a_g, b_g)

    An outcome belongs to the G that generated it: where a step holds groups of several sizes, each size's
    posterior takes the event of its own groups (a measured bubble can't be split and counts for each size in
    the step), and lambda takes the event of all groups. A step without responses changes nothing.

    Fallback [ours]: lambda within one eta of its cap for ``infeasible_after`` steps running, while the
    posterior mean of the smallest size is above delta, means that no size meets delta. Then the smallest size
    is taken at once, whatever ``neighbours`` and ``min_dwell`` say, and kept until its posterior mean falls
    below delta; lambda and the posteriors keep learning meanwhile.

    Decide on ONE rank, at an optimiser-step boundary, and broadcast ``size()``: samplers on several ranks
    would drift apart. Validation keeps its own number of samples: don't give it this G, don't report it here.

    Args:
        options: see ``SagcOptions``.
        seed: of the Thompson sampler.
    """

    name = "sagc"

    def __init__(self, options: SagcOptions, seed: int) -> None:
        self._options = options
        sizes = options.sizes
        self._index = len(sizes) - 1 if options.start is None else sizes.index(options.start)
        self._lambda = options.lambda_start
        self._a = [options.prior[0]] * len(sizes)
        self._b = [options.prior[1]] * len(sizes)
        self._step = -1
        self._dwell = 0
        self._capped = 0
        self._infeasible = False
        self._successes = 0.0
        self._rollouts = 0.0
        self._rng = np.random.default_rng(seed)
        self._reason = f"G {self.size()}: the first size, no step observed yet"

    def size(self) -> int:
        """G for the next step; the same until the next ``observe``."""
        return self._options.sizes[self._index]

    def largest(self) -> int:
        """The largest of ``sizes``."""
        return self._options.sizes[-1]

    def prompts(self, rollout_budget: int, multiple: int = 1) -> int:
        """Prompt groups for the next step under the chosen budget (``sagc.budget.prompts``)."""
        options = self._options
        return prompts(options.budget, rollout_budget, multiple, size=self.size(), largest=self.largest())

    def observe(self, stats: StepStats) -> Mapping[str, float]:
        """Takes one step's *generated* groups (kept or filtered), decides the next G, returns metrics.

        Metrics: straggler_rate (this step's S, 0 or 1), straggler_ratio, idle, truncation_rate (these four
        absent in a step without responses), lambda, success_rate, p/<size> (posterior means), group_size (the
        next G), infeasible and switched (0 or 1).

        Raises ConfigurationError for a group of a size that isn't among ``sizes``.
        """
        groups = events.with_responses(stats.groups)
        if not groups:
            return self._state_metrics(switched=False)
        by_size = self._by_size(groups)
        options = self._options
        event = self._event(groups, stats.bubble)
        outcomes = {index: self._event(own, stats.bubble).straggles for index, own in by_size.items()}

        self._learn(float(event.straggles), outcomes)
        won, tried = events.successes(groups, options.success_above)
        self._successes = options.gamma * self._successes + won
        self._rollouts = options.gamma * self._rollouts + tried
        self._step = stats.step
        self._dwell += 1
        switched = self._decide(event)
        return {
            "straggler_rate": float(event.straggles),
            "straggler_ratio": events.ratio_event(groups, options.tau).value,
            "idle": events.idle_event(groups, options.idle_tau, stats.bubble).value,
            "truncation_rate": events.truncation_rate(groups),
            **self._state_metrics(switched),
        }

    def explain(self) -> str:
        """One sentence: why G is what it is."""
        return self._reason

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state, the sampler's included; it goes into the checkpoint."""
        return {
            "sizes": list(self._options.sizes),
            "index": self._index,
            "lambda": self._lambda,
            "a": list(self._a),
            "b": list(self._b),
            "step": self._step,
            "dwell": self._dwell,
            "capped": self._capped,
            "infeasible": self._infeasible,
            "successes": self._successes,
            "rollouts": self._rollouts,
            "random": self._rng.bit_generator.state,
            "reason": self._reason,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores ``state_dict``; raises ConfigurationError for a state of other sizes, without a key, or untrue."""
        where = "state of group controller 'sagc'"
        missing = sorted(set(self.state_dict()) - set(state))
        if missing:
            raise ConfigurationError(
                f"the state lacks {', '.join(missing)}",
                found=sorted(state),
                where=where,
                remedy="load a checkpoint that was written with group_controller: sagc",
            )
        if list(state["sizes"]) != list(self._options.sizes):
            raise ConfigurationError(
                f"the checkpoint was written with other sizes than {list(self._options.sizes)}",
                found=list(state["sizes"]),
                where=where,
                remedy=f"sagc: {{sizes: {list(state['sizes'])}}}, or start a new run",
            )
        restored = SagcController(self._options, seed=0)
        try:
            restored._restore(state)
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"the state can't be read: {type(error).__name__}: {error}",
                where=where,
                remedy="load an earlier checkpoint, or start a new run",
            ) from None
        self.__dict__.update(restored.__dict__)

    def _restore(self, state: Mapping[str, Any]) -> None:
        self._index = int(state["index"])
        self._lambda = float(state["lambda"])
        self._a = [float(value) for value in state["a"]]
        self._b = [float(value) for value in state["b"]]
        self._step, self._dwell, self._capped = (int(state[key]) for key in ("step", "dwell", "capped"))
        self._infeasible = bool(state["infeasible"])
        self._successes, self._rollouts = float(state["successes"]), float(state["rollouts"])
        self._rng.bit_generator.state = state["random"]
        self._reason = str(state["reason"])
        self._check()

    def _check(self) -> None:
        """Raises ValueError for a state that no run of these options can reach."""
        sizes, cap = len(self._options.sizes), self._options.lambda_max
        if not 0 <= self._index < sizes:
            raise ValueError(f"index {self._index} isn't one of {sizes} sizes")
        for name, values in (("a", self._a), ("b", self._b)):
            if len(values) != sizes or not all(0 < value < math.inf for value in values):
                raise ValueError(f"{name} must hold {sizes} finite positive numbers, found {values}")
        if not 0 <= self._lambda <= cap:
            raise ValueError(f"lambda {self._lambda} isn't between 0 and lambda_max {cap}")
        if not 0 <= self._successes <= self._rollouts < math.inf:
            raise ValueError(f"{self._successes} successes of {self._rollouts} rollouts are no rate")
        if self._step < -1 or self._dwell < 0 or self._capped < 0:
            raise ValueError(f"step {self._step}, dwell {self._dwell} and capped {self._capped} must count up from 0")

    def _event(self, groups: list[GroupStats], bubble: float | None) -> events.Event:
        if self._options.event == "mean_ratio":
            return events.ratio_event(groups, self._options.tau)
        return events.idle_event(groups, self._options.idle_tau, bubble)

    def _by_size(self, groups: list[GroupStats]) -> dict[int, list[GroupStats]]:
        """Index in ``sizes`` -> the groups that this size generated."""
        split: dict[int, list[GroupStats]] = {}
        for group in groups:
            if group.size not in self._options.sizes:
                raise ConfigurationError(
                    "a group of a size that this controller never chose",
                    found=group.size,
                    where="GroupStats.size",
                    remedy=f"report the G that generated the group, one of {list(self._options.sizes)}; "
                    "leave validation out",
                )
            split.setdefault(self._options.sizes.index(group.size), []).append(group)
        return split

    def _learn(self, straggled: float, outcomes: Mapping[int, bool]) -> None:
        options = self._options
        self._lambda += options.eta * (straggled - options.delta)
        self._lambda = min(options.lambda_max, max(0.0, self._lambda))
        a0, b0 = options.prior
        self._a = [a0 + options.gamma * (a - a0) for a in self._a]
        self._b = [b0 + options.gamma * (b - b0) for b in self._b]
        for index, outcome in outcomes.items():
            self._a[index] += float(outcome)
            self._b[index] += 1.0 - float(outcome)

    def _decide(self, event: events.Event) -> bool:
        """Sets the next index, its reason and the dwell time; returns whether G changes."""
        options = self._options
        before = self.size()
        smallest = self._mean(0)
        why = f"{event}, lambda {self._lambda:.2f}"
        at_cap = self._lambda >= options.lambda_max - options.eta and smallest > options.delta
        self._capped = self._capped + 1 if at_cap else 0
        if self._infeasible and smallest < options.delta:
            self._infeasible, self._capped = False, 0
        elif self._capped >= options.infeasible_after:
            self._infeasible = True

        if self._infeasible:
            self._index = 0
            why = (
                f"no size meets delta {options.delta}, lambda {self._lambda:.2f} against a cap of "
                f"{options.lambda_max} and posterior p {smallest:.2f} at the smallest size; {event}"
            )
        elif self._dwell < options.min_dwell:
            why += f", {self._dwell} of min_dwell {options.min_dwell} steps at this size"
        else:
            low, high = self._index - options.neighbours, self._index + options.neighbours + 1
            near = range(max(0, low), min(high, len(options.sizes)))
            sampled = {i: float(self._rng.beta(self._a[i], self._b[i])) for i in near}
            here = self._index
            rate = self._success_rate()
            self._index = max(
                near,
                key=lambda i: utility(options.utility, options.sizes[i], rate) - self._lambda * sampled[i],
            )
            rivals = [self._index] if self._index != here else [i for i in near if i != here]
            others = " and ".join(f"{sampled[i]:.2f} at {options.sizes[i]}" for i in rivals)
            why += f", straggler probability sampled as {sampled[here]:.2f} at {before} against {others}"

        switched = self.size() != before
        if switched:
            self._dwell = 0
        move = f"G {before} -> {self.size()}" if switched else f"G {before} kept"
        self._reason = f"{move} at step {self._step}: {why}"
        return switched

    def _mean(self, index: int) -> float:
        return self._a[index] / (self._a[index] + self._b[index])

    def _success_rate(self) -> float:
        """Forgetting mean with a Beta(1, 1) prior, so that it stays off 0 and 1."""
        return (1 + self._successes) / (2 + self._rollouts)

    def _state_metrics(self, switched: bool) -> dict[str, float]:
        means = {f"p/{size}": self._mean(index) for index, size in enumerate(self._options.sizes)}
        return {
            "lambda": self._lambda,
            "success_rate": self._success_rate(),
            **means,
            "group_size": float(self.size()),
            "infeasible": float(self._infeasible),
            "switched": float(switched),
        }
