"""The contract of a group controller: call ``check_group_controller`` in the tests of your own."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence

from metronome.contracts import GroupController, GroupStats, StepStats

_BUDGETS = (1, 2, 7, 16, 64, 100, 128, 1000, 1024)
_MULTIPLES = (1, 2, 3, 8)


def check_group_controller(controller: GroupController, make: Callable[[], GroupController] | None = None) -> None:
    """Holds ``controller`` to its contract; raises AssertionError with a sentence for the first breach.

    Checked: 2 <= size() <= largest() at every step; size() changes in observe() only; prompts() is a
    multiple, at least one multiple, never falls as the budget grows; observe() takes truncated, empty and
    missing responses and steps without groups, and returns finite floats; explain() is one line; the state
    survives JSON and gives the same decisions again.

    Args:
        controller: the plug-in's object; about 150 steps are fed to it.
        make: builds a fresh controller with the same options, to load the state into. None loads the state
            back into ``controller`` itself.
    """
    assert isinstance(controller, GroupController), (
        f"{type(controller).__name__} lacks a method of metronome.contracts.GroupController"
    )
    assert isinstance(controller.name, str), "name must be a string"
    chance = random.Random(0)
    seen = [_checked_size(controller)]
    _check_prompts(controller)
    for step, groups in enumerate(_odd_steps(controller.size())):
        _observe(controller, StepStats(step, groups), seen)
    for step in range(50):
        _observe(controller, _step(100 + step, seen, chance), seen)
        _check_prompts(controller)
    _check_round_trip(controller, make, seen)


def _odd_steps(size: int) -> list[list[GroupStats]]:
    """Steps that a host does meet: none, empty, cut, tied, failed and partial groups."""

    def group(lengths: Sequence[int], truncated: bool = False) -> GroupStats:
        n = len(lengths)
        return GroupStats(size, lengths, [truncated] * n, [0.0] * n, 0.0, 1.0)

    return [
        [],
        [group([0] * size)],
        [group([0] * (size - 1) + [50])],
        [group([512] * size, truncated=True)],
        [group([1] * (size - 1) + [100_000])],
        [group([])],
        [group([]), group([10] * size)],
        [group([10] * (size - 1))],
    ]


def _step(step: int, seen: Sequence[int], chance: random.Random) -> StepStats:
    """Six groups of the current size and one of an earlier size, as under bounded staleness."""
    groups = []
    for size in [seen[-1]] * 6 + [seen[-2] if len(seen) > 1 else seen[-1]]:
        lengths = [max(1, round(200 * chance.lognormvariate(0.0, 0.5))) for _ in range(size)]
        rewards = [float(chance.random() < 0.4) for _ in range(size)]
        groups.append(GroupStats(size, lengths, [n > 600 for n in lengths], rewards, 0.0, max(lengths) / 100))
    return StepStats(step, groups, bubble=chance.random() if step % 2 else None)


def _observe(controller: GroupController, stats: StepStats, seen: list[int]) -> None:
    before = _frozen(controller)
    for _ in range(2):
        _checked_size(controller)
        controller.prompts(64)
        controller.explain()
    assert _frozen(controller) == before, (
        "size(), prompts() or explain() changed the state: only observe() and load_state_dict() may"
    )
    try:
        metrics = controller.observe(stats)
    except Exception as error:
        lengths = [list(group.lengths) for group in stats.groups]
        raise AssertionError(
            f"observe() must take a step of lengths {lengths}, raised {type(error).__name__}: {error}"
        ) from error
    assert isinstance(metrics, Mapping), f"observe() must return a mapping, found {type(metrics).__name__}"
    for name, value in metrics.items():
        assert isinstance(name, str), f"metric names must be strings, found {name!r}"
        assert isinstance(value, (int, float)), f"metric {name!r} must be a number, found {value!r}"
        assert math.isfinite(value), f"metric {name!r} must be finite, found {value!r}"
    text = controller.explain()
    assert isinstance(text, str), f"explain() must return a string, found {text!r}"
    assert text, "explain() must say why G is what it is, found an empty string"
    assert "\n" not in text, f"explain() must be one line, found {text!r}"
    size = _checked_size(controller)
    if size != seen[-1]:
        seen.append(size)


def _checked_size(controller: GroupController) -> int:
    size, largest = controller.size(), controller.largest()
    assert type(size) is int, f"size() must be a plain int (it is broadcast and logged), found {size!r}"
    assert size >= 2, f"size() must be at least 2: a group of {size} has no group-relative advantage"
    assert size <= largest, f"size() {size} exceeds largest() {largest}"
    again = controller.size()
    assert again == size, f"size() must stay the same between observes, found {size} then {again}"
    return size


def _check_prompts(controller: GroupController) -> None:
    for multiple in _MULTIPLES:
        last = 0
        for budget in _BUDGETS:
            count = controller.prompts(budget, multiple)
            call = f"prompts({budget}, multiple={multiple})"
            assert type(count) is int, f"{call} must be a plain int, found {count!r}"
            assert count % multiple == 0, f"{call} must be a multiple of {multiple}, found {count}"
            assert count >= multiple, f"{call} must be at least {multiple}, found {count}"
            assert count >= last, f"{call} = {count} is below the {last} of a smaller budget"
            assert count == multiple or count * controller.size() <= budget, (
                f"{call} = {count} groups of {controller.size()} exceed the budget"
            )
            last = count


def _check_round_trip(controller: GroupController, make: Callable[[], GroupController] | None, seen: list[int]) -> None:
    saved = _frozen(controller)
    first = _decisions(controller, list(seen))
    other = controller if make is None else make()
    other.load_state_dict(json.loads(saved))
    assert _frozen(other) == saved, "state_dict() after load_state_dict() differs from what was loaded"
    second = _decisions(other, list(seen))
    assert first == second, f"after load_state_dict() the decisions differ: {first} then {second}"


def _decisions(controller: GroupController, seen: list[int]) -> list[int]:
    chance = random.Random(1)
    sizes = []
    for step in range(100):
        _observe(controller, _step(1000 + step, seen, chance), seen)
        sizes.append(controller.size())
    return sizes


def _frozen(controller: GroupController) -> str:
    state = controller.state_dict()
    try:
        return json.dumps(state, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise AssertionError(f"state_dict() must be JSON-able: {error}") from None
