"""Runs made by hand for the tests of advice: engines and trainer of known speed, so that every answer is known."""

from __future__ import annotations

import random
from dataclasses import replace

from metronome.observe.records import Rollout, RunRecord, Span, Step
from metronome.periodic.closed_form import periodic_seconds, synchronous_seconds

SLOTS, RATE, TRAINING = 4, 10.0, 0.02
"""Sequences at once, tokens a second of each whatever runs beside, seconds of training a token."""


def arrivals(groups, slots=SLOTS, rate=RATE):
    """Seconds at which each group's last response ends: slots take responses in their order as they get free."""
    free, ends = [0.0] * slots, []
    for group in groups:
        last = 0.0
        for tokens in group:
            slot = free.index(min(free))
            free[slot] += tokens / rate
            last = max(last, free[slot])
        ends.append(last)
    return ends


def made(
    source="synchronous", steps=6, prompts=8, size=4, prompt=20, sigma=0.6, seed=0, single=False, fixed=0.0, **settings
):
    """A local run of ``source`` on one worker, with everything recorded.

    Args:
        single: responses have times of their own; else their group's.
        fixed: seconds of training a group whatever its tokens.
    """
    draw = random.Random(seed)
    records, rollouts, spans = [], [], []
    clock = 0.0
    for number in range(steps):
        groups = [[max(1, round(20 * draw.lognormvariate(0.0, sigma))) for _ in range(size)] for _ in range(prompts)]
        ends = arrivals(groups)
        order = sorted(range(prompts), key=lambda place: (ends[place], place))
        arrived = [ends[place] for place in order]
        work = [fixed + TRAINING * (prompt * size + sum(groups[place])) for place in order]
        closed = periodic_seconds if source == "periodic" else synchronous_seconds
        seconds = closed(arrived, work, 0.5, 0.1)
        records.append(
            Step(
                number=number,
                seconds=seconds,
                generation=max(arrived),
                waiting=seconds - sum(work) - 0.6,
                training=sum(work),
                optimizer=0.5,
                publication=0.1,
                group_size=size,
                prompts=prompts,
                prompt_tokens=float(prompt),
                response_tokens=sum(map(sum, groups)) / prompts / size,
                response_tokens_max=float(max(map(max, groups))),
            )
        )
        begin = clock
        for place, seconds_of in zip(order, work, strict=True):
            ready = ends[place] if source == "periodic" else max(arrived)
            begin = max(begin, clock + ready)
            spans.append(Span("trainer", "train", begin, begin + seconds_of, number))
            begin += seconds_of
            spans.append(Span("worker 0", "generate", clock, clock + ends[place], number))
            rollouts += [
                Rollout(
                    step=number,
                    prompt=str(number * prompts + place),
                    response_tokens=tokens,
                    prompt_tokens=prompt,
                    start=clock + 1e-6 * place,
                    end=clock + ends[place] - (1e-9 * member if single else 0.0),
                    worker="worker 0",
                    reward=float(member % 2),
                    version=number,
                    trained_version=number,
                )
                for member, tokens in enumerate(groups[place])
            ]
        clock += seconds
    known = {"workers": 1, "slots": SLOTS, "trainer_ranks": 1, "staleness": 0, "max_tokens": 10_000, "loss": "ppo"}
    return RunRecord(
        "made", "local", source, tuple(records), tuple(rollouts), tuple(spans),
        {**known, "attention": "host", "group_controller": "fixed", **settings},
    )  # fmt: skip


def made_half(known, fixed=0.0):
    """Seconds of a step of ``known`` with the first two responses of each prompt, from the same speeds."""
    total = 0.0
    for number in range(len(known.steps)):
        groups: dict[int, list[int]] = {}
        for one in known.rollouts:
            if one.step == number:
                groups.setdefault(int(one.prompt), []).append(one.response_tokens)
        firsts = [groups[prompt][:2] for prompt in sorted(groups)]
        work = [fixed + TRAINING * (20 * 2 + sum(group)) for group in firsts]
        total += synchronous_seconds(arrivals(firsts), work, 0.5, 0.1)
    return total / len(known.steps)


def without_times(run):
    """The same run of a host that records no clock times: seconds of steps and lengths alone."""
    bare = [replace(one, start=None, end=None, worker=None) for one in run.rollouts]
    return replace(run, rollouts=tuple(bare), spans=())


def mean_seconds(run):
    """Seconds of a step."""
    return sum(step.seconds for step in run.steps) / len(run.steps)


def row(advice, key):
    """The advice on one technique."""
    return next(one for one in advice.rows if one.key == key)
