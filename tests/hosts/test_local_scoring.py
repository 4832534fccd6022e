"""A reward function's fault costs the sample that it meets, and rewards become advantages by their formulas."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import tiny_local

from metronome.errors import ConfigurationError
from metronome_local.recipe import Dataset
from metronome_local.rollouts import Group, Prompt, Row, Sampled
from metronome_local.scoring import Scorer, ScorerWarning, advantages, degenerate
from metronome_local.tasks import DatasetTask

TOKENIZER = tiny_local.tokenizer()


def task(reward: Callable[..., Any], tmp_path: Any) -> DatasetTask:
    (tmp_path / "data.jsonl").write_text('{"prompt": "say"}\n')
    made = DatasetTask(Dataset(kind="dataset", path="data.jsonl", reward="json:dumps"), TOKENIZER, 0, tmp_path)
    made._reward = reward
    return made


def group(*texts: str, content: Any = "say") -> Group:
    """A group whose members said ``texts``, each ended by the end-of-sequence token."""
    prompt = Prompt(0, (5,), content, {"answer": "a"})
    rollouts = []
    for text in texts:
        ids = [*TOKENIZER.encode(text), TOKENIZER.eos_token_id]
        row = Row([5])
        row.add_sampled(Sampled(ids, [-1.0] * len(ids), [0] * len(ids), False))
        rollouts.append([row])
    return Group(prompt, len(texts), rollouts, 0.0, 1.0, 0)


def picky(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    if any("!" in text for text in completions):
        raise ValueError("no exclamations")
    return [float(len(text)) for text in completions]


def test_texts_are_decoded_without_special_tokens(tmp_path: Any) -> None:
    scored = Scorer(task(picky, tmp_path), TOKENIZER).score(group("a b", "", "c\n"))
    assert scored.texts == ["a b", "", "c\n"]
    assert scored.rewards == [3.0, 0.0, 2.0]


def test_a_scorer_that_raises_costs_only_the_samples_it_raises_on(tmp_path: Any) -> None:
    scorer = Scorer(task(picky, tmp_path), TOKENIZER)
    with pytest.warns(ScorerWarning, match=r"ValueError: no exclamations; the sample counts as 0"):
        assert scorer.score(group("one", "two!", "three")).rewards == [3.0, 0.0, 5.0]
    assert scorer.raised == 1


def test_the_warning_comes_once_and_the_count_goes_on(tmp_path: Any) -> None:
    scorer = Scorer(task(picky, tmp_path), TOKENIZER)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(20):
            scorer.score(group("one", "two!", "three!"))
    assert len([one for one in caught if one.category is ScorerWarning]) == 1
    assert scorer.raised == 40


@pytest.mark.parametrize("size", [2, 5, 16, 40])
def test_a_scorer_that_always_raises_stops_the_run_after_its_first_samples(size: int, tmp_path: Any) -> None:
    scorer = Scorer(task(picky, tmp_path), TOKENIZER, patience=16)

    def run() -> None:
        for _ in range(16):
            scorer.score(group(*["no!"] * size))

    with (
        pytest.warns(ScorerWarning),
        pytest.raises(ConfigurationError, match="each of the first 16 samples: ValueError"),
    ):
        run()
    assert scorer.raised == 16


def test_one_sample_that_was_scored_is_enough_to_go_on(tmp_path: Any) -> None:
    scorer = Scorer(task(picky, tmp_path), TOKENIZER, patience=16)
    with pytest.warns(ScorerWarning):
        scorer.score(group("fine", *["no!"] * 8))
    for _ in range(4):
        scorer.score(group(*["no!"] * 8))
    assert scorer.raised == 40


@pytest.mark.parametrize(
    "bad",
    [math.nan, math.inf, None, "1.0", [1.0], 10**400, 1j],
    ids=["nan", "inf", "None", "text", "list", "too large", "complex"],
)
def test_a_reward_that_is_no_finite_number_is_refused_with_its_sample(bad: object, tmp_path: Any) -> None:
    scorer = Scorer(task(lambda *_, **__: [0.5, bad], tmp_path), TOKENIZER)
    with pytest.raises(ConfigurationError, match=r"the reward of 'the second' isn't a finite number"):
        scorer.score(group("the first", "the second"))


def test_numbers_of_any_kind_are_rewards(tmp_path: Any) -> None:
    import numpy
    import torch

    kinds = [True, 1, 0.5, numpy.float32(0.25), numpy.ones(1)[0], torch.tensor(0.125)]
    rewards = Scorer(task(lambda *_, **__: kinds, tmp_path), TOKENIZER).score(group(*"abcdef")).rewards
    assert rewards == [1.0, 1.0, 0.5, 0.25, 1.0, 0.125]
    assert all(type(reward) is float for reward in rewards)


@pytest.mark.parametrize("bad", [[1.0], [1.0] * 3, 1.0, None, {}], ids=["short", "long", "number", "None", "mapping"])
def test_another_number_of_rewards_than_of_samples_is_refused(bad: object, tmp_path: Any) -> None:
    scorer = Scorer(task(lambda *_, **__: bad, tmp_path), TOKENIZER)
    with pytest.raises(ConfigurationError, match="must return 2 rewards"):
        scorer.score(group("one", "two"))


@pytest.mark.parametrize("chat", [False, True])
def test_chat_prompts_get_chat_completions(chat: bool, tmp_path: Any) -> None:
    seen: list[Any] = []

    def reward(prompts: Any, completions: Any, answer: Any) -> list[float]:
        seen.append((prompts, completions, answer))
        return [0.0] * len(completions)

    content = [{"role": "user", "content": "say"}] if chat else "say"
    Scorer(task(reward, tmp_path), TOKENIZER).score(group("a", "b", content=content))
    expected = (
        [[{"role": "assistant", "content": "a"}], [{"role": "assistant", "content": "b"}]] if chat else ["a", "b"]
    )
    assert seen == [([content, content], expected, ["a", "a"])]


def test_the_scorer_is_called_once_for_a_group_that_it_can_score(tmp_path: Any) -> None:
    calls: list[int] = []
    reward = lambda prompts, completions, **_: calls.append(len(completions)) or [1.0] * len(completions)  # noqa: E731
    made = task(reward, tmp_path)
    scored = Scorer(made, TOKENIZER).score(group(*"abcd"))
    accuracies = [
        made.accuracy(scored.prompt, text, reward) for text, reward in zip(scored.texts, scored.rewards, strict=True)
    ]
    assert accuracies == scored.rewards
    assert calls == [4]


# --- advantages -----------------------------------------------------------------------------------


def test_group_std_divides_by_the_sample_deviation() -> None:
    rewards = [0.0, 1.0, 1.0, 0.5]
    deviation = math.sqrt(sum((r - 0.625) ** 2 for r in rewards) / 3)
    assert advantages(rewards, "group-std") == pytest.approx([(r - 0.625) / (deviation + 1e-4) for r in rewards])
    biased = math.sqrt(sum((r - 0.625) ** 2 for r in rewards) / 4)
    assert advantages(rewards, "group-std") != pytest.approx([(r - 0.625) / (biased + 1e-4) for r in rewards])


@pytest.mark.parametrize("kind", ["group-mean", "batch"])
def test_group_mean_only_centres(kind: str) -> None:
    assert advantages([0.0, 1.0, 1.0, 0.5], kind) == pytest.approx([-0.625, 0.375, 0.375, -0.125])


@pytest.mark.parametrize("kind", ["group-std", "group-mean", "batch"])
def test_advantages_of_a_group_sum_to_zero_and_vanish_without_differences(kind: str) -> None:
    assert sum(advantages([0.3, 0.9, 0.1], kind)) == pytest.approx(0.0, abs=1e-9)
    assert advantages([0.25] * 4, kind) == [0.0] * 4


def test_a_group_is_degenerate_only_where_every_reward_is_the_same() -> None:
    assert degenerate([0.5, 0.5, 0.5])
    assert degenerate([0.0, 1e-12])
    assert not degenerate([0.5, 0.5, 0.500001])
