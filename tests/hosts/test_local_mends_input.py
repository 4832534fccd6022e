"""Faults of input that reviewers found in the local host: each is one line on stderr and exit code 2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import test_local_bad_input as bad
import tiny_local
import yaml

from metronome.cli import main
from metronome.errors import ConfigurationError
from metronome_local import pool
from metronome_local.checkpoint import load_state
from metronome_local.recipe import Dataset, ReasoningGym
from metronome_local.rollouts import Group, Row
from metronome_local.scoring import Scorer
from metronome_local.tasks import load_task

pytestmark = pytest.mark.timeout(120)
worker_threads, no_model, no_worker = bad.worker_threads, bad.no_model, bad.no_worker

# --- rollout functions ----------------------------------------------------------------------------

ROLLOUTS = """
from metronome_local.rollouts import Request, Row

def yields_a_lambda(prompt, tokenizer):
    yield lambda: None

def yields_ids_beyond(prompt, tokenizer):
    yield Request([*prompt.ids, 5000])

def yields_negative_ids(prompt, tokenizer):
    yield Request([-1])

def yields_text(prompt, tokenizer):
    yield Request("say one")

def returns_a_generator(prompt, tokenizer):
    row = Row(list(prompt.ids))
    row.add_sampled((yield Request(prompt.ids)))
    return (one for one in [row])

def returns_ids_beyond(prompt, tokenizer):
    row = Row(list(prompt.ids))
    row.add_sampled((yield Request(prompt.ids)))
    row.add_tool([5000])
    return [row]

def returns_text(prompt, tokenizer):
    row = Row("say one")
    row.add_sampled((yield Request(prompt.ids)))
    return [row]

def returns_a_tuple(prompt, tokenizer):
    row = Row(prompt.ids)
    row.add_sampled((yield Request(prompt.ids)))
    return [row]
"""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("yields_a_lambda", ("must yield a Request", "'function'")),
        ("yields_ids_beyond", ("must yield a Request", "all in the vocabulary")),
        ("yields_negative_ids", ("must yield a Request", "all in the vocabulary")),
        ("yields_text", ("must yield a Request", "all in the vocabulary")),
        ("returns_a_generator", ("must return rows", "'generator'")),
        ("returns_ids_beyond", ("must return rows", "all in the vocabulary")),
        ("returns_text", ("must return rows", "row = Row(list(prompt.ids))")),
        ("returns_a_tuple", ("must return rows", "row = Row(list(prompt.ids))")),
    ],
)
def test_a_rollout_function_with_a_fault_is_told_so_at_once_and_no_worker_is_restarted(
    name: str,
    words: tuple[str, ...],
    tiny_recipe: Any,
    tmp_path: Path,
    monkeypatch: Any,
    capsys: Any,
    worker_threads: None,
) -> None:
    replaced: list[int] = []
    monkeypatch.setattr(pool.RolloutPool, "_replace", lambda self, worker: replaced.append(worker.number))
    changes = {"sampling": {"rollout": f"rollouts.py:{name}"}, "machine": {"timeout": 10}}
    case = bad.Case(name, (f"rollouts.py:{name}", *words), changes, files={"rollouts.py": ROLLOUTS})
    bad.outcome(case, tiny_recipe, tmp_path, monkeypatch, capsys)
    assert not replaced


# --- plug-ins, as the host calls them -------------------------------------------------------------

LOSS = """
import torch
from metronome.a3po.ppo import Ppo
from metronome.contracts import Offer, TokenLoss
from metronome.hookspecs import hookimpl

class Faulty(Ppo):
    name = "faulty"

    def __call__(self, batch):
        loss = super().__call__(batch).loss
        {body}

@hookimpl
def describe():
    return [Offer("policy_loss", "faulty", "a faulty loss")]

@hookimpl
def policy_loss(name, settings):
    return Faulty() if name == "faulty" else None
"""
CONTROLLER = """
from metronome.contracts import Offer
from metronome.hookspecs import hookimpl
from metronome.sagc.fixed import Fixed, FixedOptions

class Faulty(Fixed):
    name = "faulty"

    {body}

@hookimpl
def describe():
    return [Offer("group_controller", "faulty", "a faulty controller")]

@hookimpl
def group_controller(name, settings, seed):
    return Faulty(FixedOptions(size=4)) if name == "faulty" else None
"""
LOSSES = [
    ("scalar", "return TokenLoss(loss.sum())", ("must return a loss of shape", "found []")),
    ("tensor", "return loss", ("returned no TokenLoss", "'Tensor'")),
    ("detached", "return TokenLoss(loss.detach())", ("without a gradient", "detach")),
    ("raises", "raise LookupError('no luck')", ("raised: LookupError", "no luck")),
]
CONTROLLERS = [
    ("one", "def size(self): return 1", ("size()", "at least 2", "found 1")),
    (
        "raises",
        "def observe(self, stats): raise LookupError('no luck')",
        ("raised in observe()", "LookupError"),
    ),
    (
        "nan",
        "def observe(self, stats): return {'idle': float('nan')}",
        ("finite floats", "'idle'", "found nan"),
    ),
]


@pytest.mark.parametrize(
    ("kind", "name", "body", "words"),
    [("loss", *one) for one in LOSSES] + [("group_controller", *one) for one in CONTROLLERS],
    ids=[f"loss-{one[0]}" for one in LOSSES] + [f"controller-{one[0]}" for one in CONTROLLERS],
)
def test_a_plug_in_that_breaks_its_contract_in_a_run_is_named(
    kind: str,
    name: str,
    body: str,
    words: tuple[str, ...],
    tiny_recipe: Any,
    tmp_path: Path,
    monkeypatch: Any,
    capsys: Any,
    worker_threads: None,
) -> None:
    source, spoken = (LOSS, "policy loss") if kind == "loss" else (CONTROLLER, "group controller")
    module = f"mends_{kind}_{name}"

    def prepare(folder: Path, patch: pytest.MonkeyPatch) -> None:
        bad.plugin(module, source.format(body=body))(folder, patch)
        if kind == "group_controller":
            bad.without(folder, "metronome", "fixed")

    case = bad.Case(module, (f"{spoken} 'faulty'", *words), {"metronome": {kind: "faulty"}}, prepare=prepare)
    bad.outcome(case, tiny_recipe, tmp_path, monkeypatch, capsys)
    assert (tmp_path / bad.OUTPUT / "metrics.jsonl").read_text() == ""


# --- folders and dry runs -------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["run", "compare"])
@pytest.mark.parametrize("output", ["x" * 300, "/proc/self/run"], ids=["a name too long", "no folder to write in"])
def test_an_output_folder_that_cannot_be_made_is_one_line(
    output: str,
    command: str,
    tiny_recipe: Any,
    tmp_path: Path,
    monkeypatch: Any,
    capsys: Any,
    no_worker: None,
) -> None:
    if not Path("/proc/self").is_dir():
        pytest.skip("no /proc here")
    vary = ("--vary", "training.lr=0.1,0.2") if command == "compare" else ()
    arguments = (*vary, "--output", output)
    case = bad.Case("unmade", ("--output",), arguments=arguments, command=command, output=False)
    bad.outcome(case, tiny_recipe, tmp_path, monkeypatch, capsys)


DRY: dict[str, Any] = {"arguments": ("--dry-run",), "output": False}
DRY_RUNS = [
    bad.Case("a model that isn't there", ("no Hugging Face model", "'nowhere'"), {"model": {"name": "nowhere"}}, **DRY),
    bad.Case("data that isn't there", ("no such file", "none.jsonl"), {"task": {"path": "none.jsonl"}}, **DRY),
    bad.Case("data that isn't JSON", ("line 1 isn't JSON",), {"task": {"path": "a.jsonl"}},
             files={"a.jsonl": "{"}, **DRY),
    bad.Case("a reward that isn't there", ("task.reward", "none.py"), {"task": {"reward": "none.py:score"}}, **DRY),
    bad.Case("no such function", ("task.reward", "'score'"), {"task": {"reward": "a.py:score"}},
             files={"a.py": ""}, **DRY),
    bad.Case("no such rollout", ("sampling.rollout", "none.py"), {"sampling": {"rollout": "none.py:play"}}, **DRY),
    bad.Case("no run to resume", ("no such run folder",), arguments=("--dry-run", "--resume", "gone"), output=False),
    bad.Case("another recipe's run", ("can't change training.lr",), arguments=("--dry-run", "--resume", "old"),
             output=False, prepare=bad.checkpoint(training={"lr": 0.5})),
]  # fmt: skip


@pytest.mark.parametrize("case", DRY_RUNS, ids=lambda case: case.name)
def test_a_dry_run_looks_at_every_file_that_it_can(
    case: Any, tiny_recipe: Any, tmp_path: Path, monkeypatch: Any, capsys: Any, no_model: None
) -> None:
    bad.outcome(case, tiny_recipe, tmp_path, monkeypatch, capsys)
    assert bad.nothing_left(tmp_path)


def test_a_dry_run_of_a_recipe_without_faults_starts_nothing(
    tiny_recipe: Any, tmp_path: Path, monkeypatch: Any, capsys: Any, no_model: None
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tiny_recipe()))
    bad.checkpoint()(tmp_path, monkeypatch)
    assert main(["run", "recipe.yaml", "--dry-run", "--resume", "old"]) == 0
    assert "Nothing was started" in capsys.readouterr().out
    assert bad.nothing_left(tmp_path)


@pytest.mark.parametrize("key", ["period", "version", "stream", "controller", "random", "accuracies"])
def test_a_state_without_one_of_its_keys_is_refused(key: str, tmp_path: Path) -> None:
    place = tmp_path / "checkpoints" / "000001"
    place.mkdir(parents=True)
    whole = {"period": 1, "version": 1, "stream": {}, "controller": {}, "random": [], "accuracies": []}
    (place / "state.json").write_text(json.dumps(whole))
    assert load_state(tmp_path)["period"] == 1
    del whole[key]
    (place / "state.json").write_text(json.dumps(whole))
    with pytest.raises(ConfigurationError, match=r"can't be read: state\.json isn't whole.*remove its folder"):
        load_state(tmp_path)


# --- tasks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("records", "fraction", "held"), [(5, 0.1, 1), (5, 0.0, 0), (5, 0.5, 2), (1, 0.9, 0)])
def test_a_small_data_set_holds_one_out_and_keeps_one_to_train(
    records: int, fraction: float, held: int, tmp_path: Path, tiny_model: Path
) -> None:
    (tmp_path / "data.jsonl").write_text("".join(f'{{"prompt": "say {n}"}}\n' for n in range(records)))
    reward = f"{tiny_model / 'rewards.py'}:early"
    settings = Dataset(kind="dataset", path="data.jsonl", reward=reward, held_out=fraction)
    task = load_task(settings, tiny_local.tokenizer(), 0, tmp_path)
    out = {prompt.content for prompt in task.held_out()}
    trained = {task.prompt(index).content for index in range(2 * records)}
    assert len(out) == held
    assert len(trained) == records - held
    assert not out & trained


def test_answers_that_reasoning_gym_cannot_parse_are_zeros_also_for_prime_factorization(
    tmp_path: Path,
) -> None:
    pytest.importorskip("reasoning_gym")
    tokenizer = tiny_local.tokenizer()
    task: Any = load_task(ReasoningGym(kind="reasoning_gym", name="prime_factorization"), tokenizer, 0, tmp_path)
    prompt = task.prompt(0)
    texts = [str(prompt.columns["entry"]["answer"]), "2 x three", "", "a prime"]
    (dataset,) = task._chunks.values()
    with pytest.raises(Exception, match="invalid literal"):
        dataset.score_answer(answer=texts[1], entry=prompt.columns["entry"])
    rows = [[Row(list(prompt.ids), tokenizer.encode(text, add_special_tokens=False))] for text in texts]
    scorer = Scorer(task, tokenizer, patience=1)
    group = scorer.score(Group(prompt, 4, rows, 0.0, 1.0, 0))
    assert group.rewards[0] == 1.0
    assert all(reward < 1.0 for reward in group.rewards[1:])
    assert scorer.raised == 0
