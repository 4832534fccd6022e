"""A group controller called by an adapter: what a stranger's controller gets wrong is one PluginError that names it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NoReturn, TypeVar

from metronome.contracts import GroupController, StepStats
from metronome.errors import PluginError, guarded

T = TypeVar("T")


def checked_size(controller: GroupController, where: str) -> int:
    """G of the next step: an int of at least 2 and at most ``largest()``.

    Args:
        controller: the selected controller.
        where: the place shown in errors, such as ``period 7``.

    Raises PluginError, as every function here, for a breach and for whatever the controller raises.
    """
    size = _call(controller, "size()", controller.size, where)
    largest = _call(controller, "largest()", controller.largest, where)
    for name, value in (("size()", size), ("largest()", largest)):
        if type(value) is not int or value < 2:
            _breach(controller, f"{name} must be an int of at least 2", value, where)
    if size > largest:
        _breach(controller, f"size() must not exceed largest(), {largest}", size, where)
    return size


def checked_prompts(controller: GroupController, budget: int, multiple: int) -> int:
    """Prompt groups of the next step under ``budget`` rollouts: an int, ``multiple`` or a multiple of it."""
    call = f"prompts({budget}, {multiple})"
    count = _call(controller, call, lambda: controller.prompts(budget, multiple))
    if type(count) is not int or count < 1 or count % multiple:
        _breach(controller, f"{call} must be an int of at least 1 and a multiple of {multiple}", count)
    return count


def checked_metrics(controller: GroupController, stats: StepStats) -> dict[str, float]:
    """``controller.observe(stats)``: a mapping of names to finite floats; None is a breach, ``{}`` is no metrics."""
    metrics = _call(controller, "observe()", lambda: controller.observe(stats))
    if not isinstance(metrics, Mapping):
        _breach(controller, "observe() must return a mapping of metrics, {} for none", metrics)
    for name, value in metrics.items():
        if not isinstance(name, str):
            _breach(controller, "observe() must name its metrics by strings", name)
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            _breach(controller, f"observe() must return finite floats, metric {name!r}", value)
    return {name: float(value) for name, value in metrics.items()}


def explained(controller: GroupController) -> str:
    """``controller.explain()``: one sentence on one line."""
    text = _call(controller, "explain()", controller.explain)
    if not isinstance(text, str) or not text.strip():
        _breach(controller, "explain() must be a sentence", text)
    return " ".join(text.split())


def _call(controller: GroupController, call: str, function: Callable[[], T], where: str | None = None) -> T:
    return guarded(function, f"group controller {controller.name!r} raised in {call}", where=_place(where))


def _breach(controller: GroupController, what: str, found: object, where: str | None = None) -> NoReturn:
    raise PluginError(
        f"group controller {controller.name!r} breaks its contract: {what}",
        found=repr(found) if found is None else found,
        where=_place(where),
        remedy="metronome.testing.group_controller.check_group_controller tests the whole contract",
    )


def _place(where: str | None) -> str:
    return "metronome.group_controller" if where is None else where
