"""Runs made by hand for the report's tests: two steps of four seconds, figures to be checked by eye."""

from __future__ import annotations

from dataclasses import replace

from metronome.observe.records import Rollout, RunRecord, Span, Step


def made(name="made", **changes):
    """Steps of 4 s: the worker generates for a second and a half, the trainer waits one, trains two, publishes one.

    Two prompts of four rollouts a step: lengths 10, 10, 10, 21 straggle (2.1), 10, 10, 10, 20 don't (exactly 2).
    """
    steps, rollouts, spans = [], [], []
    for number in range(2):
        start = 4.0 * number
        for prompt, lengths in (("a", (10, 10, 10, 21)), ("b", (10, 10, 10, 20))):
            rollouts += [
                Rollout(
                    step=number,
                    prompt=prompt,
                    response_tokens=length,
                    prompt_tokens=5,
                    start=start + (0.0 if prompt == "a" else 0.5),
                    end=start + (1.0 if prompt == "a" else 1.5),
                    worker="worker 0",
                    reward=float(member == 0),
                    version=0,
                    trained_version=number,
                )
                for member, length in enumerate(lengths)
            ]
        spans += [
            Span("trainer", "train", start + 1, start + 3, number),
            Span("trainer", "publish", start + 3, start + 4, number),
        ]
        steps.append(
            Step(
                number,
                4.0,
                generation=1.5,
                waiting=1.0,
                training=2.0,
                publication=0.5,
                group_size=4,
                reward=0.25 + 0.5 * number,
                metrics={"loss/clipped": 0.125, "tokens_computed": 100.0, "tokens_separate": 250.0},
                fingerprint=f"mark {number}",
            )
        )
    run = RunRecord(
        name,
        "local",
        "periodic",
        tuple(steps),
        tuple(rollouts),
        tuple(spans),
        {"workers": 1, "recipe": {"task": {"kind": "arithmetic"}}},
        ("Single responses have no times.",),
    )
    return replace(run, **changes)


def without_times(run):
    """The same run without a clock time."""
    rollouts = tuple(replace(one, start=None, end=None) for one in run.rollouts)
    return replace(run, spans=(), rollouts=rollouts)


def laid_run():
    """Two steps of 10 s without clock times: 3 s of generation, then 2 s of training; no part names the other 5 s."""
    steps = tuple(Step(number, 10.0, generation=3.0, waiting=3.0, training=2.0) for number in range(2))
    spans = tuple(
        Span(lane, kind, 10.0 * number + start, 10.0 * number + end, number)
        for number in range(2)
        for lane, kind, start, end in (("rollout", "generate", 0.0, 3.0), ("trainer", "train", 3.0, 5.0))
    )
    return RunRecord("laid", "verl", "colocated", steps, spans=spans, laid=True)
