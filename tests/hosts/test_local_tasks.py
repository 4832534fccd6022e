"""Tasks give fixed prompts and never train on what is held out."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import tiny_local

from metronome.errors import ConfigurationError
from metronome_local.importing import from_folder, function_at
from metronome_local.recipe import Arithmetic, Dataset, ReasoningGym
from metronome_local.scoring import Scorer
from metronome_local.tasks import ArithmeticTask, DatasetTask, encode, load_task

TOKENIZER = tiny_local.tokenizer()
HERE = Path()


def arithmetic(seed: int = 0, **options: Any) -> ArithmeticTask:
    return ArithmeticTask(Arithmetic(**options), TOKENIZER, seed)


def numbers_of(prompt: Any) -> tuple[int, ...]:
    """The terms of the question that a prompt asks at its end."""
    return tuple(int(word) for word in re.findall(r"\d+", prompt.content[-1]["content"]))


# --- arithmetic -----------------------------------------------------------------------------------


def test_an_index_gives_the_same_problem_in_any_order_and_another_seed_gives_others() -> None:
    first, second, other = arithmetic(), arithmetic(), arithmetic(seed=1)
    forwards = [first.prompt(index) for index in range(30)]
    assert forwards == [second.prompt(index) for index in reversed(range(30))][::-1]
    assert [p.content for p in forwards] != [other.prompt(index).content for index in range(30)]


@pytest.mark.parametrize("digits", [1, 2])
@pytest.mark.parametrize("terms", [2, 3])
def test_no_order_of_a_held_out_problem_is_trained_or_shown(digits: int, terms: int) -> None:
    task = arithmetic(digits=digits, terms=terms)
    held = {tuple(sorted(numbers_of(prompt))) for prompt in task.held_out()}
    assert len(held) == 24
    trained = {tuple(sorted(numbers_of(task.prompt(index)))) for index in range(3000)}
    assert not held & trained
    assert len(trained) > 20  # of 45 - 24 for single digits: nearly every problem that may be trained
    shown = {
        tuple(sorted(int(n) for n in re.findall(r"\d+", m["content"])))
        for m in task.prompt(0).content[:-1]
        if m["role"] == "user"
    }
    assert len(shown) >= 3
    assert not held & shown


def test_the_held_out_set_follows_neither_seed_nor_run() -> None:
    assert [p.content[-1] for p in arithmetic().held_out()] == [p.content[-1] for p in arithmetic(seed=7).held_out()]


def test_both_orders_of_a_held_out_pair_are_asked() -> None:
    asked = {numbers_of(prompt) for prompt in arithmetic().held_out()}
    assert asked == {order for pair in asked for order in itertools.permutations(pair)}
    assert {prompt.index for prompt in arithmetic().held_out()} == set(range(-len(asked), 0))


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("7", 1.0),
        (" 7\n", 1.0),
        ("8", 0.1 + 0.4 * (1 - 1 / 6)),
        ("4", 0.1 + 0.4 * (1 - 3 / 6)),
        ("13", 0.1),
        ("9999", 0.1),
        ("7.", 0.0),
        ("7 or so", 0.0),
        ("", 0.0),
    ],
)
def test_the_shaped_reward_is_one_for_the_sum_and_less_than_half_for_a_number_near_it(text: str, reward: float) -> None:
    task = arithmetic()
    prompt = task._prompt(0, (3, 4))
    assert task.rewards([prompt], [text]) == [pytest.approx(reward)]
    assert task.accuracy(prompt, text, reward) == float(reward == 1.0)


def test_a_large_answer_is_near_within_a_tenth_of_it() -> None:
    task = arithmetic(digits=2)
    prompt = task._prompt(0, (60, 40))
    assert task.rewards([prompt, prompt], ["95", "110"]) == [pytest.approx(0.1 + 0.4 * 0.5), pytest.approx(0.1)]


def test_the_exact_reward_gives_nothing_for_nearness() -> None:
    task = arithmetic(reward="exact")
    prompt = task._prompt(0, (3, 4))
    assert task.rewards([prompt] * 3, ["7", "8", "x"]) == [1.0, 0.0, 0.0]


def test_more_held_out_problems_than_a_task_has_are_refused() -> None:
    assert len({tuple(sorted(numbers_of(p))) for p in arithmetic(held_out=39).held_out()}) == 39
    with pytest.raises(ConfigurationError, match="at most 39"):
        arithmetic(held_out=40)
    with pytest.raises(ConfigurationError, match="at most 643"):  # 1287 sums of five digits, found by drawing
        arithmetic(terms=5, held_out=1000)
    assert len(arithmetic(terms=5, held_out=643).held_out()) == 643


# --- reasoning-gym --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gym() -> Any:
    pytest.importorskip("reasoning_gym")
    settings = ReasoningGym(kind="reasoning_gym", name="leg_counting", held_out=8)
    return load_task(settings, TOKENIZER, 0, HERE)


def test_a_reasoning_gym_task_has_no_end_and_fixed_prompts(gym: Any) -> None:
    far = gym.prompt(1_000_000)
    assert gym.prompt(3) == gym.prompt(3)
    assert gym.prompt(3).content != gym.prompt(4).content
    assert gym.prompt(1_000_000) == far
    assert far.ids == encode(TOKENIZER, far.content)


def test_held_out_questions_of_reasoning_gym_are_not_trained(gym: Any) -> None:
    held = {prompt.content[-1]["content"] for prompt in gym.held_out()}
    assert len(held) == 8
    assert not held & {gym.prompt(index).content[-1]["content"] for index in range(600)}


def test_a_question_that_is_held_out_is_replaced_by_a_later_one(gym: Any) -> None:
    before = gym.prompt(5)
    gym._held_questions.add(before.content[-1]["content"])
    after = gym.prompt(5)
    gym._held_questions.remove(before.content[-1]["content"])
    assert after.content[-1] != before.content[-1]
    assert after.index == 5
    assert gym.prompt(5) == before


def test_a_task_without_questions_left_ends_in_an_error(gym: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Everything:
        def __contains__(self, _: object) -> bool:
            return True

    monkeypatch.setattr(gym, "_held_questions", Everything())
    monkeypatch.setattr(gym, "_dataset", lambda seed, size: [{"question": "the same"}] * size)
    with pytest.raises(ConfigurationError, match="nearly every question"):
        gym.prompt(0)


def test_the_reward_is_reasoning_gyms_own_score(gym: Any) -> None:
    prompt = gym.prompt(0)
    answer = prompt.columns["entry"]["answer"]
    right, wrong = gym.rewards([prompt, prompt], [f" {answer}\n", "none"])
    assert right == 1.0
    assert wrong < 1.0
    assert (gym.accuracy(prompt, answer, right), gym.accuracy(prompt, "none", wrong)) == (1.0, 0.0)


def test_a_scorer_of_reasoning_gym_that_raises_is_a_zero(gym: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = gym.prompt(0)
    answer = prompt.columns["entry"]["answer"]

    class Strict:
        def score_answer(self, answer: str, entry: Any) -> float:
            return float(int(answer) == int(entry["answer"]))

    monkeypatch.setattr(gym, "_chunks", {0: Strict()})
    scorer = Scorer(gym, TOKENIZER, patience=1)  # a wrong answer, and no fault that stops a run
    assert scorer._rewards([prompt] * 2, [answer, "four legs"]) == [1.0, 0.0]
    assert scorer.raised == 0


# --- data sets ------------------------------------------------------------------------------------

RECORDS = [{"prompt": f"number {n}", "answer": str(n)} for n in range(20)]
CHATS = [{"prompt": [{"role": "user", "content": f"number {n}"}], "answer": str(n)} for n in range(20)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rewards.py").write_text(
        "seen = []\n"
        "def score(prompts, completions, **columns):\n"
        "    seen.append((prompts, completions, columns))\n"
        "    return [1.0] * len(completions)\n"
    )
    return tmp_path


def dataset(folder: Path, records: list[dict[str, Any]], seed: int = 0, **options: Any) -> DatasetTask:
    name = options.pop("name", "data.jsonl")
    if name.endswith("parquet"):
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(records), folder / name)
    else:
        (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    settings = Dataset(kind="dataset", path=name, reward="rewards.py:score", **options)
    task = load_task(settings, TOKENIZER, seed, folder)
    assert isinstance(task, DatasetTask)
    return task


@pytest.mark.parametrize("name", ["data.jsonl", "data.parquet"])
@pytest.mark.parametrize("records", [RECORDS, CHATS], ids=["text", "chat"])
def test_a_file_gives_its_prompts_and_columns(name: str, records: list[dict[str, Any]], folder: Path) -> None:
    task = dataset(folder, records, name=name, held_out=0.0)
    prompts = [task.prompt(index) for index in range(20)]
    found = sorted(({"prompt": p.content, **p.columns} for p in prompts), key=lambda one: int(one["answer"]))
    assert found == records
    text = TOKENIZER.decode(prompts[0].ids)
    assert f"number {prompts[0].columns['answer']}" in text
    assert text.startswith("u:") == isinstance(records[0]["prompt"], list)


def test_each_epoch_gives_every_record_once_in_an_order_of_its_own(folder: Path) -> None:
    task = dataset(folder, RECORDS, held_out=0.0)
    epochs = [[task.prompt(20 * epoch + place).content for place in range(20)] for epoch in range(3)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    again, other = dataset(folder, RECORDS, held_out=0.0), dataset(folder, RECORDS, seed=1, held_out=0.0)
    assert [again.prompt(index).content for index in (45, 3)] == [epochs[2][5], epochs[0][3]]
    assert [other.prompt(place).content for place in range(20)] != epochs[0]


def test_the_held_out_part_is_never_trained_and_the_same_for_every_seed(folder: Path) -> None:
    tasks = [dataset(folder, RECORDS, seed=seed, held_out=0.25) for seed in (0, 1)]
    held = [{prompt.content for prompt in task.held_out()} for task in tasks]
    assert held[0] == held[1]
    assert len(held[0]) == 5
    trained = {tasks[0].prompt(index).content for index in range(40)}
    assert trained | held[0] == {record["prompt"] for record in RECORDS}
    assert not trained & held[0]


def test_a_system_message_turns_text_into_a_conversation(folder: Path) -> None:
    prompt = dataset(folder, RECORDS, system="be brief").prompt(0)
    assert [message["role"] for message in prompt.content] == ["system", "user"]
    assert TOKENIZER.decode(prompt.ids).startswith("s:be brief\nu:number ")


def test_columns_reach_the_reward_function_as_lists_in_the_form_of_trl(folder: Path) -> None:
    for records in (RECORDS, CHATS):
        task = dataset(folder, records, held_out=0.0)
        prompts = [task.prompt(index) for index in (0, 0, 1)]
        assert task.rewards(prompts, ["a", "b", "c"]) == [1.0] * 3
        seen_prompts, completions, columns = task._reward.__globals__["seen"][-1]
        assert seen_prompts == [prompt.content for prompt in prompts]
        assert columns == {"answer": [prompt.columns["answer"] for prompt in prompts]}
    assert completions == [[{"role": "assistant", "content": text}] for text in "abc"]
    assert task._reward.__globals__["seen"][0][1] == ["a", "b", "c"]


def test_a_column_that_some_records_lack_is_none_there(folder: Path) -> None:
    task = dataset(folder, [{"prompt": "one", "hint": "x"}, {"prompt": "two"}], held_out=0.0)
    prompts = sorted((task.prompt(index) for index in (0, 1)), key=lambda one: one.content)
    task.rewards(prompts, ["a", "b"])
    assert task._reward.__globals__["seen"][-1][2] == {"hint": ["x", None]}


# --- encoding and import paths --------------------------------------------------------------------


def test_an_empty_system_message_is_left_out_where_a_template_refuses_it() -> None:
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": "hello"}]
    strict = tiny_local.tokenizer()
    strict.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        + tiny_local.TEMPLATE
    )
    assert strict.decode(encode(strict, messages)) == "u:hello\na:"
    assert TOKENIZER.decode(encode(TOKENIZER, messages)) == "s:\nu:hello\na:"
    with pytest.raises(ConfigurationError, match="no system role"):
        encode(strict, [{"role": "system", "content": "be brief"}, *messages[1:]])


def test_a_tokenizer_without_a_template_gets_the_contents_line_by_line() -> None:
    plain = tiny_local.tokenizer()
    plain.chat_template = None
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": "hello"}]
    assert plain.decode(encode(plain, messages)) == "hello\n"


def test_a_function_is_found_in_a_module_or_in_a_file(folder: Path) -> None:
    assert function_at("json:dumps", "task.reward") is json.dumps
    path = from_folder("rewards.py:score", folder)
    assert path == f"{folder / 'rewards.py'}:score"
    assert function_at(path, "task.reward")([], []) == []
    assert function_at(path, "task.reward") is function_at(path, "task.reward")  # the file is run once
    assert from_folder("json:dumps", folder) == "json:dumps"


@pytest.mark.parametrize("path", ["score", ":score", "json:", "json:no_such", "no_such_module:score", "none.py:score"])
def test_an_import_path_that_leads_nowhere_is_refused_with_its_place(path: str) -> None:
    with pytest.raises(ConfigurationError, match=r"in task\.reward") as error:
        function_at(path, "task.reward")
    assert error.value.remedy
