"""Whole runs of the cluster model against a second one: plain lists, remaining tokens, a loop over the next event."""

import random
from collections import Counter

import numpy as np
import pytest

from metronome.contracts import GroupStats, StepStats
from metronome.simulate import Cluster, Policy, simulate
from metronome.simulate.lengths import Drawn

NEVER = float("inf")


class Second:
    """The second model; lengths, decoding curve, controller and the draws of failures are the first one's."""

    def __init__(self, cluster, policy):
        self.cluster, self.policy, self.now, self.version, self.paused = cluster, policy, 0.0, 0, False
        self.lengths, self.sagc = Drawn(cluster, cluster.seed), policy.controller(cluster.group_size, cluster.seed)
        self.engines = [
            {"decoding": [], "prefilling": [], "read": set(), "up": True} for _ in range(cluster.engines.count)
        ]
        self.waiting, self.queue, self.again = [], [], []
        self.running = self.restarted = self.sent = 0
        self.busy = self.slots = 0.0
        self.place, self.places, self.batch_number = 0, 0, 0
        self.chance = [np.random.default_rng([cluster.seed, 1_000_003, i]) for i in range(len(self.engines))]
        self.turns = [self.between(i) if cluster.failures else NEVER for i in range(len(self.engines))]

    def between(self, index):
        return self.chance[index].exponential(self.cluster.failures.mean_seconds_between)

    def fill(self):
        held = self.policy.source in ("periodic", "bounded") and self.cluster.queue_depth is not None
        while self.waiting and not self.paused and not (held and len(self.queue) >= self.cluster.queue_depth):
            loads = [len(one["decoding"]) + len(one["prefilling"]) for one in self.engines]
            free = [
                (load, i) for i, load in enumerate(loads) if self.engines[i]["up"] and load < self.cluster.engines.slots
            ]
            if not free:
                return
            engine, rollout = self.engines[min(free)[1]], self.waiting.pop(0)
            rollout["version"] = self.version
            seconds = self.cluster.engines.prefill_seconds_per_token * self.cluster.prompt_tokens
            key = (rollout["version"], *rollout["group"]["key"][:2])
            if self.cluster.engines.prefix_cache and key in engine["read"]:
                seconds = 0.0
            engine["read"].add(key)
            if seconds or engine["prefilling"]:
                engine["prefilling"].append([rollout, seconds])
            else:
                engine["decoding"].append([rollout, float(rollout["tokens"])])

    def rate(self, engine):
        return self.cluster.engines.decode.rate(len(engine["decoding"]))

    def decodes(self, engine):
        return engine["decoding"] and not (self.cluster.engines.prefill_stops_decoding and engine["prefilling"])

    def advance(self, until):
        """Runs the engines to ``until``; None: until a group arrives. Returns the seconds that passed."""
        start, arrived = self.now, len(self.queue)
        while until is not None or len(self.queue) == arrived:
            due, what, index = (NEVER if until is None else until), None, 0
            for i, engine in enumerate(self.engines):
                events = [(self.turns[i], "turn")]
                if not self.paused and engine["prefilling"]:
                    events.append((self.now + engine["prefilling"][0][1], "prefilled"))
                if not self.paused and self.decodes(engine):
                    least = min(left for _, left in engine["decoding"])
                    events.append((self.now + least / self.rate(engine), "ended"))
                if min(events)[0] < due:
                    (due, what), index = min(events), i
            seconds, self.now = due - self.now, due
            for engine in self.engines if not self.paused else ():
                load = len(engine["decoding"]) + len(engine["prefilling"])
                self.busy, self.slots = self.busy + seconds * (load > 0), self.slots + seconds * load
                tokens = seconds * self.rate(engine) if self.decodes(engine) else 0.0
                engine["decoding"] = [[rollout, left - tokens] for rollout, left in engine["decoding"]]
                if engine["prefilling"]:
                    engine["prefilling"][0][1] -= seconds
            if what is None:
                break
            getattr(self, what)(index, self.engines[index])
        return self.now - start

    def prefilled(self, _, engine):
        rollout, _ = engine["prefilling"].pop(0)
        engine["decoding"].append([rollout, float(rollout["tokens"])])

    def ended(self, _, engine):
        engine["decoding"].sort(key=lambda pair: pair[1])
        rollout, _ = engine["decoding"].pop(0)
        group = rollout["group"]
        group["ends"].append(self.now)
        group["versions"].append(rollout["version"])
        if len(group["ends"]) == len(group["lengths"]):
            group["arrived"] = self.now
            self.queue.append(group)
            self.running -= 1
        self.fill()

    def turn(self, index, engine):
        """An engine fails or returns."""
        if engine["up"]:
            lost = [rollout for rollout, _ in engine["prefilling"] + engine["decoding"]]
            self.waiting[:0] = sorted(lost, key=lambda rollout: rollout["number"])
            self.restarted += len(lost)
            engine.update(decoding=[], prefilling=[], read=set())
            self.turns[index] = self.now + self.cluster.failures.seconds_to_return
        else:
            self.turns[index] = self.now + self.between(index)
        engine["up"] = not engine["up"]
        self.fill()

    def admit(self, batch, trained):
        window = (self.policy.bound + 1) * batch - self.running - len(self.queue) - trained
        for _ in range(window):
            if self.again:
                key = self.again.pop(0)
            else:
                if self.place >= self.places:
                    self.batch_number += self.places > 0
                    self.place, self.places = 0, batch
                key = (self.batch_number, self.place, self.sagc.size())
                self.place += 1
            lengths = self.lengths.group(*key).responses
            group = {"key": key, "lengths": lengths, "ends": [], "versions": [], "sent": self.now, "arrived": 0.0}
            self.running += 1
            for tokens in lengths:
                self.waiting.append({"group": group, "tokens": tokens, "number": self.sent})
                self.sent += 1
        self.fill()

    def cost(self, group):
        trainer, prompt, lengths = self.cluster.trainer, self.cluster.prompt_tokens, group["lengths"]
        speed = 1 + (trainer.ranks - 1) * trainer.efficiency
        tokens = sum(prompt + length for length in lengths)
        if trainer.padded and not self.policy.shared_prompt:
            tokens = len(lengths) * (prompt + max(lengths))
        seconds = trainer.seconds_per_token * tokens / speed
        if self.policy.shared_prompt:

            def pairs(n):
                return n * (n + 1) / 2

            shared = pairs(prompt) + sum(length * prompt + pairs(length) for length in lengths)
            attention = shared / sum(pairs(prompt + length) for length in lengths)
            linear = (prompt + sum(lengths)) / tokens
            seconds *= (1 - trainer.attention_share) * linear + trainer.attention_share * attention
        seconds += trainer.seconds_per_group
        return seconds * (1 + trainer.forward_share * (self.policy.proximal == "recompute"))

    def run(self):
        cluster, policy = self.cluster, self.policy
        steps, staleness, trained_seconds, dropped, tokens = [], Counter(), 0.0, 0, 0
        rollout_seconds = []
        for number in range(cluster.steps):
            start, waiting, groups, drops = self.now, 0.0, [], []
            batch = self.sagc.prompts(cluster.prompts_per_step * cluster.group_size)
            self.admit(batch, 0)
            while len(groups) < batch:
                whole = policy.source.startswith("synchronous") and not groups
                while len(self.queue) < (batch if whole else 1):
                    waiting += self.advance(None)
                if whole and policy.source == "synchronous_colocated":
                    self.advance(self.now + cluster.resharding_seconds)
                group = self.queue.pop(0)
                if self.version - min(group["versions"]) > policy.bound:
                    drops.append(group)
                    self.again.append(group["key"])
                    self.admit(batch, len(groups))
                    continue
                groups.append(group)
                self.fill()
                trained_seconds += self.advance(self.now + self.cost(group))
            trained_seconds += self.advance(self.now + cluster.trainer.optimizer_seconds)
            if policy.source == "synchronous_colocated":
                self.advance(self.now + cluster.resharding_seconds)
            else:
                self.paused = True
                self.advance(self.now + cluster.publication_seconds)
                self.paused = False
            for group in groups:
                staleness[self.version - min(group["versions"])] += len(group["lengths"])
                tokens += sum(group["lengths"])
            rollout_seconds.append(sorted(end - one["sent"] for one in groups for end in one["ends"]))
            self.version += 1
            self.fill()
            steps.append(self.now - start)
            dropped += len(drops)
            stats = [
                GroupStats(len(g["lengths"]), g["lengths"], [False] * len(g["lengths"]), [0.0], g["sent"], g["arrived"])
                for g in groups + drops
            ]
            self.sagc.observe(StepStats(number, stats, waiting / steps[-1]))
        total, count = self.now, len(self.engines)
        exact = {"staleness": dict(staleness), "dropped": dropped, "restarted": self.restarted}
        return exact, {
            "steps": steps,
            "rollout_idle": 1 - self.busy / (count * total),
            "slots_idle": 1 - self.slots / (count * cluster.engines.slots * total),
            "trainer_idle": 1 - trained_seconds / total,
            "rollouts_per_second": sum(staleness.values()) / total,
            "tokens_per_second": tokens / total,
            "rollout_seconds": [one for step in rollout_seconds for one in step],
        }


def drawn(seed):
    """A small cluster; long responses on fast engines, so that no two rollouts end at one moment."""
    model, chance = plain(seed), random.Random(seed + 1000)
    fixed = {"seconds_per_group": chance.choice([0.0, 0.31, 4.7]), "padded": chance.choice([False, True])}
    reads = {"prefix_cache": chance.choice([False, True]), "prefill_stops_decoding": chance.choice([False, True])}
    changes = {"trainer": model.trainer.model_copy(update=fixed), "engines": model.engines.model_copy(update=reads)}
    return model.model_copy(update=changes)


def plain(seed):
    """The cluster without the costs and rules that are off by default."""
    chance = random.Random(seed)
    law = {"kind": "law", "tokens_per_second": 4903.3, "half": 5.7}
    points = {"kind": "points", "points": [[1, 8101.7], [3, 6607.3], [50, 1561.9]]}
    return Cluster(
        engines={
            "count": chance.randint(1, 4),
            "slots": chance.choice([1, 3, 8, 40]),
            "decode": chance.choice([law, points]),
            "prefill_seconds_per_token": chance.choice([0.0, 3.7e-3]),
        },
        trainer={
            "ranks": chance.randint(1, 4),
            "seconds_per_token": chance.choice([0.9e-6, 1.8e-5, 1.3e-4]),
            "efficiency": chance.choice([1.0, 0.83]),
            "attention_share": chance.choice([0.0, 0.3]),
            "optimizer_seconds": chance.choice([0.0, 1.7]),
        },
        lengths={
            "kind": "lognormal",
            "median": 40307.0,
            "sigma": chance.choice([0.3, 0.9]),
            "prompt_sigma": chance.choice([0.0, 0.4]),
            "cap": 1_000_000,
            "growth": chance.choice([1.0, 1.07]),
        },
        prompts_per_step=chance.randint(1, 10),
        group_size=chance.choice([2, 4, 8]),
        prompt_tokens=chance.randint(20, 500),
        publication_seconds=chance.choice([0.0, 2.9, 40.0]),
        resharding_seconds=chance.choice([0.0, 3.3]),
        queue_depth=chance.choice([None, None, 1, 3]),
        failures=chance.choice([None, {"mean_seconds_between": 211.3, "seconds_to_return": 17.9}]),
        seed=seed,
        steps=5,
    )


SAGC = {"sizes": (2, 4, 8), "eta": 0.5, "min_dwell": 1, "delta": 0.2, "tau": 1.6}
POLICIES = [
    Policy(source="synchronous", proximal="recompute"),
    Policy(source="synchronous_colocated", shared_prompt=True),
    Policy(source="periodic"),
    Policy(source="periodic", group_controller="sagc", sagc={**SAGC, "budget": "fixed_prompts"}),
    Policy(source="bounded", max_staleness=0, shared_prompt=True),
    Policy(source="bounded", max_staleness=1, proximal="recompute"),
    Policy(source="bounded", max_staleness=3),
    Policy(source="bounded", max_staleness=2, group_controller="sagc", sagc=SAGC),
]


@pytest.mark.parametrize("policy", POLICIES, ids=[policy.label() for policy in POLICIES])
def test_a_second_model_gives_the_same_run(policy):
    met = Counter()
    for seed in range(16):
        model = drawn(seed)
        outcome = simulate(model, policy)
        if policy.source == "synchronous_colocated":
            model = model.with_split(model.devices(), model.devices())
        exact, close = Second(model, policy).run()
        assert {name: getattr(outcome, name) for name in exact} == exact, seed
        found = {name: getattr(outcome, name) for name in close if name not in ("steps", "rollout_seconds")}
        found["steps"] = [step.seconds for step in outcome.steps]
        found["rollout_seconds"] = [one for step in outcome.steps for one in sorted(step.rollout_seconds)]
        for name, value in close.items():
            assert found[name] == pytest.approx(value, rel=1e-9, abs=1e-9), (seed, name)
        met.update(restarted=outcome.restarted > 0, dropped=outcome.dropped > 0, stale=max(outcome.staleness))
    assert met["restarted"] > 0
    assert (met["stale"] > 0) == (policy.bound > 0)
    assert met["dropped"] > 0 or policy.bound != 1
