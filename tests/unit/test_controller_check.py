"""A stranger's group controller, as a host calls it: every breach is one PluginError that names it."""

from __future__ import annotations

import math

import pytest

from metronome.contracts import StepStats
from metronome.controller_check import checked_metrics, checked_prompts, checked_size, explained
from metronome.errors import ConfigurationError, PluginError
from metronome.sagc.plugin import group_controller

STATS = StepStats(0, [])


class Controller:
    """Answers each method with what a test gives, raises it if it's an exception."""

    name = "strange"

    def __init__(self, **answers):
        self.answers = {"size": 4, "largest": 8, "prompts": 6, "observe": {"rate": 1}, "explain": "because", **answers}

    def _answer(self, method):
        answer = self.answers[method]
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def size(self):
        return self._answer("size")

    def largest(self):
        return self._answer("largest")

    def prompts(self, rollout_budget, multiple=1):
        return self._answer("prompts")

    def observe(self, stats):
        return self._answer("observe")

    def explain(self):
        return self._answer("explain")


CALLS = {
    "size": lambda controller: checked_size(controller, "period 7"),
    "largest": lambda controller: checked_size(controller, "period 7"),
    "prompts": lambda controller: checked_prompts(controller, 24, 3),
    "observe": lambda controller: checked_metrics(controller, STATS),
    "explain": explained,
}


def breach(method, answer):
    with pytest.raises(PluginError) as error:
        CALLS[method](Controller(**{method: answer}))
    text = str(error.value)
    assert "group controller 'strange'" in text
    assert f"{method}(" in text
    assert "\n" not in text
    assert ("period 7" in text) == (method in ("size", "largest"))
    return text


@pytest.mark.parametrize(
    "method, answer",
    [
        *(("size", wrong) for wrong in (1, 0, -4, True, 4.0, "4", None, 9)),
        *(("largest", wrong) for wrong in (3, 1, 8.0, None, math.inf)),
        *(("prompts", wrong) for wrong in (0, -3, 4, 6.0, None, True)),
        *(("observe", wrong) for wrong in (None, [("rate", 1.0)], {1: 1.0}, {"rate": math.nan}, {"rate": math.inf})),
        *(("observe", wrong) for wrong in ({"rate": "high"}, {"rate": None}, 3)),
        *(("explain", wrong) for wrong in ("", " ", None, 4)),
    ],
)
def test_a_breach_is_one_line_that_names_the_controller(method, answer):
    breach(method, answer)


@pytest.mark.parametrize("method", CALLS)
@pytest.mark.parametrize("wrong", [ValueError("lost\nhere"), SystemExit(0)], ids=repr)
def test_what_a_controller_raises_is_one_line_that_names_it(method, wrong):
    assert f"raised in {method}(" in breach(method, wrong)


@pytest.mark.parametrize("method", CALLS)
@pytest.mark.parametrize("wrong", [ConfigurationError("own words"), KeyboardInterrupt()], ids=repr)
def test_its_own_configuration_error_and_ctrl_c_go_through(method, wrong):
    with pytest.raises(type(wrong)) as error:
        CALLS[method](Controller(**{method: wrong}))
    assert error.value is wrong


def test_sound_answers_are_handed_on():
    controller = Controller(explain="two\nlines")
    assert checked_size(controller, "period 7") == 4
    assert checked_prompts(controller, 24, 3) == 6
    metrics = checked_metrics(controller, STATS)
    assert metrics == {"rate": 1.0}
    assert type(metrics["rate"]) is float
    assert checked_metrics(Controller(observe={}), STATS) == {}
    assert explained(controller) == "two lines"


@pytest.mark.parametrize("name", ["sagc", "fixed"])
def test_the_shipped_controllers_pass(name):
    controller = group_controller(name, {}, 0)
    assert checked_size(controller, "start") == controller.size()
    assert checked_prompts(controller, 64, 2) == controller.prompts(64, 2)
    assert checked_metrics(controller, STATS)["group_size"] == controller.size()
    assert explained(controller) == controller.explain()
