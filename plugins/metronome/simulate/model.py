"""A policy run on a cluster: admission and release by the shipped rollout sources, G by the shipped controllers."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Generator
from typing import Any

import numpy as np

from metronome.contracts import Flow, GroupStats, StepStats, Verdict
from metronome.errors import ConfigurationError
from metronome.observe.records import Span
from metronome.simulate.cluster import Cluster, Failures
from metronome.simulate.engine import Engine
from metronome.simulate.lengths import Drawn, LengthSource
from metronome.simulate.outcome import Outcome, StepOutcome
from metronome.simulate.policy import Policy
from metronome.simulate.pool import Dispatch, Pool
from metronome.simulate.training import Work, work

# Keeps the draws of failures apart from those of lengths.
_FAILURES = 1_000_003

Process = Generator[Any, Any, None]


def simulate(
    cluster: Cluster,
    policy: Policy,
    *,
    steps: int | None = None,
    seed: int | None = None,
    lengths: LengthSource | None = None,
) -> Outcome:
    """``policy`` simulated on ``cluster``; the same arguments give the same outcome.

    Lengths follow (seed, batch of prompts, place in it), so all policies get the same ones; a group that was dropped
    goes out again with its own. Weights are published with all engines standing still; rollouts that run meanwhile (of
    a bounded source) go on afterwards. In a colocated run every device generates, then every device trains.

    Args:
        steps, seed: over the cluster's own.
        lengths: instead of the cluster's distribution, as ``Recorded``.

    Raises ConfigurationError without simpy, for fewer steps than one, and for engines that fail so often that nothing
    ends.
    """
    simpy = simulation_package()
    seed = cluster.seed if seed is None else seed
    steps = cluster.steps if steps is None else steps
    if steps < 1:
        raise ConfigurationError("a simulation needs a step", found=steps, where="steps", remedy="steps: 1 or more")
    if policy.source == "synchronous_colocated":
        cluster = _colocated(cluster)
    policy = policy.fitted(cluster.group_size)
    run = _Run(simpy.Environment(0.0), cluster, policy, steps, seed, lengths or Drawn(cluster, seed))
    return run.outcome()


class _Run:
    """The state of one simulation."""

    def __init__(
        self, environment: Any, cluster: Cluster, policy: Policy, steps: int, seed: int, lengths: LengthSource
    ) -> None:
        self._environment, self._cluster, self._policy = environment, cluster, policy
        self._steps, self._seed, self._lengths = steps, seed, lengths
        self._source = policy.rollout_source()
        self._controller = policy.controller(cluster.group_size, seed)
        self._colocated = policy.source == "synchronous_colocated"
        self._depth = cluster.queue_depth if policy.source in ("periodic", "bounded") else None
        self._pool = Pool(environment, cluster.engines, self._arrive, self._room)
        self._queue: deque[Dispatch] = deque()
        self._again: deque[Dispatch] = deque()
        self._running = self._dispatched = self._trained_in_all = self._dropped_in_all = 0
        self._batch = self._next_prompt = 0
        self._places = self._next_step = 0  # of the batch of prompts that goes out: how many it has, its number
        self._flow_trained = 0
        self._awaited: Any = None
        self._done: list[StepOutcome] = []
        self._spans: list[Span] = []

    def outcome(self) -> Outcome:
        """Runs to the end."""
        environment = self._environment
        if (failures := self._cluster.failures) is not None:
            for engine in self._pool.engines:
                environment.process(self._fail(engine, failures))
        environment.run(until=environment.process(self._train()))
        end = environment.now
        starts = np.array([step.start for step in self._done])
        for engine in self._pool.engines:
            engine.close()
            for begin, finish in engine.busy:
                number = int(np.searchsorted(starts, begin, side="right")) - 1
                self._spans.append(Span(f"engine {engine.index}", "generate", begin, finish, number))
        engines = self._pool.engines
        busy = sum(finish - begin for engine in engines for begin, finish in engine.busy)
        slots = sum(engine.slot_seconds for engine in engines)
        trained = sum(step.training + step.proximal + step.optimizer for step in self._done)
        return Outcome(
            policy=self._policy,
            steps=tuple(self._done),
            dispatched=self._dispatched,
            trained=self._trained_in_all,
            dropped=self._dropped_in_all,
            unfinished=self._running + len(self._queue),
            restarted=self._pool.restarted,
            rollout_idle=1.0 - busy / (len(engines) * end),
            slots_idle=1.0 - slots / (len(engines) * engines[0].slots * end),
            trainer_idle=1.0 - trained / end,
            spans=tuple(sorted(self._spans, key=lambda span: (span.start, span.lane))),
        )

    # --- the trainer --------------------------------------------------------------------------------

    def _train(self) -> Process:
        for number in range(self._steps):
            yield from self._step(number)

    def _step(self, number: int) -> Process:
        environment, cluster, source = self._environment, self._cluster, self._source
        start, size = environment.now, self._controller.size()
        budget = cluster.prompts_per_step * cluster.group_size
        self._batch, self._flow_trained = self._controller.prompts(budget), 0
        trained: list[tuple[Dispatch, Work]] = []
        dropped: list[Dispatch] = []
        waiting = resharding = 0.0
        self._admit()
        while not source.period_complete(self._flow()):
            ready = source.release(self._flow())
            if not ready:
                since = environment.now
                self._awaited = environment.event()
                yield self._awaited
                waiting += environment.now - since
                continue
            if self._colocated:
                resharding += yield from self._spend("reshard", cluster.resharding_seconds, number)
            for _ in range(ready):
                group = self._queue.popleft()
                if source.verdict(group.versions, self._pool.version) is Verdict.DROP:
                    dropped.append(group)
                    self._again.append(Dispatch(group.step, group.prompt, group.lengths, 0.0))
                    self._admit()
                    continue
                self._flow_trained += 1
                self._pool.fill()  # the queue has room again
                cost = work(cluster.trainer, self._policy, group.lengths)
                trained.append((group, cost))
                yield from self._spend("train", cost.seconds, number)
        optimizer = yield from self._spend("step", cluster.trainer.optimizer_seconds, number)
        publication = 0.0
        if self._colocated:
            resharding += yield from self._spend("reshard", cluster.resharding_seconds, number)
        elif cluster.publication_seconds > 0.0:
            self._pool.pause()
            publication = yield from self._spend("publish", cluster.publication_seconds, number)
        self._pool.version += 1
        if publication > 0.0:
            self._pool.resume()
        seconds = environment.now - start
        version = self._pool.version - 1
        self._trained_in_all += len(trained)
        self._dropped_in_all += len(dropped)
        bubble = min(1.0, waiting / seconds) if seconds > 0.0 else 0.0
        generated = [_stats(group) for group in [*(one for one, _ in trained), *dropped]]
        metrics = self._controller.observe(StepStats(number, generated, bubble))
        staleness: Counter[int] = Counter()
        for group, _ in trained:
            staleness[version - min(group.versions)] += group.size
        self._done.append(
            StepOutcome(
                number=number,
                start=start,
                seconds=seconds,
                generation=max(0.0, max(group.arrived for group, _ in trained) - start),
                waiting=waiting,
                training=sum(cost.training for _, cost in trained),
                proximal=sum(cost.proximal for _, cost in trained),
                optimizer=optimizer,
                publication=publication,
                resharding=resharding,
                group_size=size,
                sizes=tuple(group.size for group, _ in trained),
                arrivals=tuple(group.arrived - start for group, _ in trained),
                work=tuple(cost.seconds for _, cost in trained),
                rollout_seconds=tuple(end - group.sent for group, _ in trained for end in group.ends),
                response_tokens=sum(sum(group.lengths.responses) for group, _ in trained),
                trained_tokens=sum(cost.tokens for _, cost in trained),
                staleness=dict(sorted(staleness.items())),
                dropped=len(dropped),
                straggler_ratio=metrics["straggler_ratio"],
            )
        )

    def _spend(self, kind: str, seconds: float, step: int) -> Generator[Any, Any, float]:
        """Lets the trainer do something for ``seconds``; what follows at once in the same kind is one span."""
        if seconds <= 0.0:
            return 0.0
        start = self._environment.now
        yield self._environment.timeout(seconds)
        end, last = self._environment.now, self._spans[-1] if self._spans else None
        if last is not None and (last.kind, last.step, last.end) == (kind, step, start):
            self._spans[-1] = Span("trainer", kind, last.start, end, step)
        else:
            self._spans.append(Span("trainer", kind, start, end, step))
        return seconds

    # --- dispatch -----------------------------------------------------------------------------------

    def _flow(self) -> Flow:
        return Flow(self._pool.version, self._batch, self._running, len(self._queue), self._flow_trained)

    def _admit(self) -> None:
        """Sends out what the source admits: dropped groups' prompts first."""
        groups = [
            self._again.popleft() if self._again else self._new() for _ in range(self._source.capacity(self._flow()))
        ]
        for group in groups:
            group.sent = self._environment.now
        self._running += len(groups)
        self._dispatched += len(groups)
        self._pool.dispatch(groups)

    def _new(self) -> Dispatch:
        """The next prompt's group, of the size that the controller asks for now."""
        if self._next_prompt >= self._places:
            self._next_step += self._places > 0
            self._next_prompt, self._places = 0, self._batch
        step, prompt = self._next_step, self._next_prompt
        self._next_prompt += 1
        return Dispatch(step, prompt, self._lengths.group(step, prompt, self._controller.size()), 0.0)

    def _arrive(self, group: Dispatch) -> None:
        self._running -= 1
        self._queue.append(group)
        if self._awaited is not None:
            self._awaited.succeed()
            self._awaited = None

    def _room(self) -> bool:
        return self._depth is None or len(self._queue) < self._depth

    # --- failures -----------------------------------------------------------------------------------

    def _fail(self, engine: Engine, spec: Failures) -> Process:
        random = np.random.default_rng([self._seed, _FAILURES, engine.index])
        while True:
            yield self._environment.timeout(random.exponential(spec.mean_seconds_between))
            self._pool.fail(engine)
            yield self._environment.timeout(spec.seconds_to_return)
            self._pool.repair(engine)


def _stats(group: Dispatch) -> GroupStats:
    responses, cap = group.lengths.responses, group.lengths.cap
    truncated = [cap is not None and tokens >= cap for tokens in responses]
    # Rewards aren't simulated; the policy refuses a controller that looks at them.
    return GroupStats(group.size, responses, truncated, [0.0] * group.size, group.sent, group.arrived)


def _colocated(cluster: Cluster) -> Cluster:
    """The cluster whose devices all generate and all train."""
    total = cluster.devices()
    return cluster.with_split(total // cluster.engines.devices, total // cluster.trainer.devices)


def simulation_package() -> Any:
    """The package simpy; raises ConfigurationError where it isn't installed."""
    try:
        import simpy
    except ModuleNotFoundError:
        raise ConfigurationError(
            "the simulation needs a package that isn't installed",
            found="simpy",
            where="metronome.simulate",
            remedy='pip install "metronome-rl[plan]"',
        ) from None
    return simpy
