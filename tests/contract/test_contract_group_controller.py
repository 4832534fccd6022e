import pytest

from metronome.sagc.plugin import group_controller
from metronome.testing.group_controller import check_group_controller

OPTIONS = [
    ("fixed", {}),
    ("fixed", {"size": 2}),
    ("sagc", {}),
    ("sagc", {"min_dwell": 1, "delta": 0.4}),
    ("sagc", {"sizes": [2, 3, 5, 9], "neighbours": 3, "utility": "dapo", "min_dwell": 1}),
    ("sagc", {"event": "step_idle", "budget": "fixed_prompts"}),
    ("sagc", {"delta": 0.01, "lambda_start": 10.0, "infeasible_after": 2}),
]


@pytest.mark.parametrize("name, options", OPTIONS)
@pytest.mark.parametrize("fresh", [True, False])
def test_shipped_group_controllers_keep_the_contract(name, options, fresh):
    controller = group_controller(name, options, 1)
    check_group_controller(controller, (lambda: group_controller(name, options, 2)) if fresh else None)


class Good:
    """Alternates between 4 and 8; every breach below changes one method of it."""

    name = "good"

    def __init__(self):
        self.count = 0

    def size(self):
        return 8 if self.count % 2 else 4

    def largest(self):
        return 8

    def prompts(self, rollout_budget, multiple=1):
        return max(multiple, rollout_budget // self.size() // multiple * multiple)

    def observe(self, stats):
        self.count += 1
        return {"count": float(self.count)}

    def explain(self):
        return "it alternates"

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Single(Good):
    def size(self):
        return 1


class TooLarge(Good):
    def largest(self):
        return 4


class Impure(Good):
    def size(self):
        self.count += 1
        return 4 if self.count % 2 else 8


class SilentlyImpure(Good):
    def explain(self):
        self.count += 2
        return "it counts"


class NotAMultiple(Good):
    def prompts(self, rollout_budget, multiple=1):
        return max(multiple, rollout_budget // self.size())


class NoPrompts(Good):
    def prompts(self, rollout_budget, multiple=1):
        return rollout_budget // self.size() // multiple * multiple


class Pads(Good):
    def prompts(self, rollout_budget, multiple=1):
        return max(multiple, -(-rollout_budget // self.size() // multiple) * multiple)


class Falls(Good):
    def prompts(self, rollout_budget, multiple=1):
        return multiple if rollout_budget > 1000 else super().prompts(rollout_budget, multiple)


class NeedsGroups(Good):
    def observe(self, stats):
        self.count += 1
        return {"longest": float(max(max(group.lengths) for group in stats.groups))}


class NotFinite(Good):
    def observe(self, stats):
        self.count += 1
        return {"rate": float("nan")}


class Mute(Good):
    def explain(self):
        return ""


class Forgetful(Good):
    def load_state_dict(self, state):
        self.count = 0


class HiddenState(Good):
    def __init__(self):
        super().__init__()
        self.hidden = 0

    def size(self):
        return 8 if self.hidden // 3 % 2 else 4

    def observe(self, stats):
        self.hidden += 1
        return {}


class NotJson(Good):
    def state_dict(self):
        return {"count": {self.count}}


class Incomplete:
    name = "incomplete"


def test_a_controller_that_keeps_the_contract_passes():
    check_group_controller(Good(), Good)
    check_group_controller(Good())


@pytest.mark.parametrize(
    "broken, sentence",
    [
        (Incomplete, "lacks a method"),
        (Single, "at least 2"),
        (TooLarge, "exceeds largest"),
        (Impure, "stay the same between observes"),
        (SilentlyImpure, "changed the state"),
        (NotAMultiple, "must be a multiple"),
        (NoPrompts, "must be at least"),
        (Pads, "exceed the budget"),
        (Falls, "below the"),
        (NeedsGroups, "must take a step of lengths"),
        (NotFinite, "must be finite"),
        (Mute, "why G is what it is"),
        (Forgetful, "differs from what was loaded"),
        (HiddenState, "the decisions differ"),
        (NotJson, "JSON-able"),
    ],
)
def test_each_breach_of_the_contract_is_found(broken, sentence):
    with pytest.raises(AssertionError, match=sentence):
        check_group_controller(broken(), broken)
