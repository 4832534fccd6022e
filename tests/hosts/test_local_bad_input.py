"""Bad input of any kind is one line on stderr and exit code 2, before anything is half done."""

from __future__ import annotations

import json
import os
import re
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import pytest
import tiny_local
import torch
import transformers
import yaml

import metronome_local.build
import metronome_local.worker
from metronome import plugins
from metronome.cli import main
from metronome_local.recipe import parse_recipe

OUTPUT = "run"


@dataclass(frozen=True)
class Case:
    """A recipe with something wrong in it, and words that the one line must hold.

    ``task`` replaces the task if it names a kind, every other section is merged over the tiny recipe. ``files``
    are written into the working folder, ``prepare`` does what a table can't say.
    """

    name: str
    words: tuple[str, ...]
    changes: dict[str, Any] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    files: dict[str, str | bytes] = field(default_factory=dict)
    prepare: Callable[[Path, pytest.MonkeyPatch], None] | None = None
    text: str | None = None
    command: str = "run"
    output: bool = True


def outcome(
    case: Case, tiny_recipe: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """Runs the case and returns its one line, after checking that it is the only one and that the exit code is 2."""
    monkeypatch.chdir(folder)
    for name, content in case.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    recipe = tiny_recipe(**{key: value for key, value in case.changes.items() if key != "task"})
    task = case.changes.get("task", {})
    recipe["task"] = task if "kind" in task else {**recipe["task"], **task}
    (folder / "recipe.yaml").write_text(case.text or yaml.safe_dump(recipe))
    if case.prepare is not None:
        case.prepare(folder, monkeypatch)
    capsys.readouterr()  # what the preparation printed
    arguments = [case.command, "recipe.yaml", *case.arguments]
    code = main([*arguments, "--output", OUTPUT] if case.output else arguments)
    printed = capsys.readouterr().err
    assert code == 2, printed
    assert printed.startswith("metronome: error: "), printed
    assert printed.count("\n") == 1
    assert printed.endswith("\n")
    assert "Traceback" not in printed
    for word in case.words:
        assert word in printed
    return printed


def nothing_left(folder: Path) -> bool:
    return not (folder / OUTPUT).exists() and not (folder / "runs").exists()


@pytest.fixture
def no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal that comes too late fails here, before it costs a process."""

    def started(*_: object, **__: object) -> None:
        pytest.fail("rollout workers were started")

    monkeypatch.setattr(metronome_local.build, "RolloutPool", started)


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch, no_worker: None) -> None:
    """What the recipe alone tells is refused before a model or a tokenizer is read."""

    def read(*_: object, **__: object) -> None:
        pytest.fail("a model or tokenizer was read")

    monkeypatch.setattr(metronome_local.build, "policy_model", read)
    monkeypatch.setattr(metronome_local.build, "load_tokenizer", read)


# --- plug-ins with faults -------------------------------------------------------------------------

PLUGIN = """
from metronome.contracts import Offer
from metronome.hookspecs import hookimpl

@hookimpl
def describe():
    return [Offer("policy_loss", "{name}", "a faulty loss")]

@hookimpl
def policy_loss(name, settings):
    {body}
"""


def plugin(name: str, source: str) -> Callable[[Path, pytest.MonkeyPatch], None]:
    """Installs a plug-in called ``stranger`` for the time of a test."""

    def prepare(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (folder / f"{name}.py").write_text(source)
        monkeypatch.syspath_prepend(str(folder))
        points = [*entry_points(group="metronome"), EntryPoint("stranger", name, "metronome")]
        monkeypatch.setattr(plugins, "entry_points", lambda group: points)

    return prepare


RECIPE = [
    Case("not YAML", ("not valid YAML", "line"), text="training: [1\nhost: local"),
    Case("a repeated key", ("stands twice", "'host'"), text="host: local\nhost: local"),
    Case("not a mapping", ("must be a mapping", "'list'"), text="- host: local"),
    Case("no host", ("must name its host", "host: ", "local"), text="training: {periods: 1}"),
    Case("unknown host", ("no such host", "'locl'", "use 'local'"), arguments=("host=locl",)),
    Case(
        "missing recipe",
        ("no such recipe", "recipe.yaml"),
        prepare=lambda folder, _: (folder / "recipe.yaml").unlink(),
    ),
    Case("override without =", ("key=value", "'training.periods'"), arguments=("training.periods",)),
    Case("unknown section", ("unknown key", "'trainig'", "use 'training'"), {"trainig": {}}),
    Case("unknown nested key", ("unknown key", "'promts'", "use 'prompts'"), {"training": {"promts": 4}}),
    Case("unknown task key", ("unknown key", "use 'digits'"), {"task": {"kind": "arithmetic", "digit": 1}}),
    Case("unknown task", ("task", "'sums'", "arithmetic"), {"task": {"kind": "sums"}}),
    Case("missing key of a task", ("required key", "task.dataset.path"), {
        "task": {"kind": "dataset", "reward": "a:b"},
    }),
    Case("wrong type", ("training.periods", "'ten'", "periods: a whole number"), arguments=("training.periods=ten",)),
    Case("a section that is a list", ("training", "[1]"), arguments=("training=[1]",)),
    Case("below the range", ("training.prompts", "prompts: 1 or more"), arguments=("training.prompts=0",)),
    Case("an infinite weight", ("training.kl", "finite"), arguments=("training.kl=.inf",)),
    Case("NaN entropy weight", ("training.entropy", "finite"), arguments=("training.entropy=.nan",)),
    Case("betas above 1", ("training.betas", "betas: below 1"), arguments=("training.betas=[0.9, 1.5]",)),
    Case("a negative seed", ("training.seed", "-1"), arguments=("training.seed=-1",)),
    Case("lengths over the limit", ("fixed_lengths", "max_tokens"), arguments=("sampling.fixed_lengths=[5, 9]",)),
    Case("more mini-batches than prompts", ("mini_batches", "at most 4"), {
        "training": {"mini_batches": 5}, "metronome": {"rollout_source": "synchronous"},
    }),
    Case("LoRA and trained_layers", ("exclude one another", "trained_layers"), {
        "model": {"lora": {"rank": 2}, "trained_layers": 1},
    }),
    Case("unknown loss", ("no plug-in offers", "'a3p'", "use 'a3po'"), {"metronome": {"loss": "a3p"}}),
    Case("selector that is no name", ("plug-in's name", "metronome.loss"), {"metronome": {"loss": 3}}),
    Case("options of an unselected plug-in", ("isn't selected", "'sagc'"), {"metronome": {"sagc": {"delta": 0.2}}}),
    Case("unknown plug-in option", ("unknown key", "'sise'", "use 'size'"), {"metronome": {"fixed": {"sise": 4}}}),
    Case("G = 1", ("size", "at least 2 rollouts"), {"metronome": {"fixed": {"size": 1}}}),
    Case("SAGC with size 1", ("metronome.sagc.sizes", "at least 2 rollouts"), {
        "metronome": {"group_controller": "sagc", "sagc": {"sizes": [1, 4]}},
    }, prepare=lambda folder, _: without(folder, "metronome", "fixed")),
    Case("periodic with two mini-batches", ("periodic promises", "training.mini_batches: 1"), {
        "training": {"mini_batches": 2},
    }),
    Case("aborting", ("periodic promises", "training.in_flight: finish"), {"training": {"in_flight": "abort"}}),
    Case("batch advantages with A-3PO", ("batch-whitened", "advantage: group"), {
        "training": {"advantage": "batch"}, "metronome": {"loss": "a3po", "rollout_source": "synchronous"},
    }),
    Case("batch advantages off policy", ("batch-whitened", "training.advantage: group-std"), {
        "training": {"advantage": "batch"}, "metronome": {"rollout_source": "bounded"},
    }),
    Case("plug-in that raises at import", ("'stranger' raised at import", "ZeroDivisionError"),
         prepare=plugin("stranger_import", "1 / 0")),
    Case("plug-in that raises in its hook", ("'stranger' raised in policy_loss", "no luck"),
         {"metronome": {"loss": "faulty"}},
         prepare=plugin("stranger_hook", PLUGIN.format(name="faulty", body="raise ValueError('no luck')"))),
    Case("plug-in that returns no loss", ("'stranger' returned no PolicyLoss", "'int'"),
         {"metronome": {"loss": "faulty"}},
         prepare=plugin("stranger_type", PLUGIN.format(name="faulty", body="return 3"))),
    Case("two plug-ins of one name", ("offered twice", "'ppo'", "METRONOME_DISABLE_PLUGINS=stranger"),
         prepare=plugin("stranger_twice", PLUGIN.format(name="ppo", body="return None"))),
    Case("plug-in switched off that isn't there", ("no such plug-in", "'a3p'", "use 'a3po'"),
         prepare=lambda _, patch: patch.setenv("METRONOME_DISABLE_PLUGINS", "a3p")),
    Case("resume of no folder", ("no such run folder", "nowhere"), arguments=("--resume", "nowhere"), output=False),
    Case("resume without a checkpoint", ("holds no checkpoint", "checkpoints.every"),
         arguments=("--resume", "old"), files={"old/metrics.jsonl": ""}, output=False),
    Case("resume with an output folder", ("its own folder", "leave --output out"), arguments=("--resume", "old")),
    Case("compare of one value", ("two different values",), command="compare",
         arguments=("--vary", "metronome.loss=ppo")),
    Case("compare with a value that isn't offered", ("no plug-in offers", "'perodic'", "use 'periodic'"),
         command="compare", arguments=("--vary", "metronome.rollout_source=synchronous,perodic")),
]  # fmt: skip


def without(folder: Path, section: str, key: str) -> None:
    """Removes a key of the tiny recipe."""
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    del recipe[section][key]
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))


@pytest.mark.parametrize("case", RECIPE, ids=lambda case: case.name)
def test_a_recipe_that_cannot_be_true_is_refused_before_anything_is_read(
    case: Case, tiny_recipe: Any, tmp_path: Path, monkeypatch: Any, capsys: Any, no_model: None
) -> None:
    outcome(case, tiny_recipe, tmp_path, monkeypatch, capsys)
    assert nothing_left(tmp_path)


@pytest.mark.parametrize("command", ["run", "compare"])
@pytest.mark.parametrize(
    ("place", "words"),
    [("run/metrics.jsonl", "isn't empty"), ("run", "is a file")],
    ids=["a folder with files", "a file"],
)
def test_an_output_folder_that_is_taken_is_left_as_it_is(
    place: str,
    words: str,
    command: str,
    tiny_recipe: Any,
    tmp_path: Path,
    monkeypatch: Any,
    capsys: Any,
    no_model: None,
) -> None:
    vary = ("--vary", "metronome.loss=ppo,a3po") if command == "compare" else ()
    case = Case("taken", (words, "--output"), files={place: "mine\n"}, arguments=vary, command=command)
    outcome(case, tiny_recipe, tmp_path, monkeypatch, capsys)
    assert (tmp_path / place).read_text() == "mine\n"
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 2  # the recipe beside it


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a CUDA device here")
def test_a_device_that_torch_does_not_see_is_refused(
    tiny_recipe: Any, tmp_path: Path, monkeypatch: Any, capsys: Any, no_model: None
) -> None:
    case = Case("no device", ("doesn't see this device", "'cuda'"), arguments=("machine.device=cuda",))
    outcome(case, tiny_recipe, tmp_path, monkeypatch, capsys)


# --- files: a model, a tokenizer, a data set, functions -------------------------------------------


def model_in(name: str, **changes: Any) -> Callable[[Path, pytest.MonkeyPatch], None]:
    """Saves a tiny model of its own kind as the folder ``name``."""

    def prepare(folder: Path, _: pytest.MonkeyPatch) -> None:
        kind = changes.pop("kind", "llama")
        tiny_local.model(kind, **changes).save_pretrained(folder / name)
        tiny_local.tokenizer().save_pretrained(folder / name)

    return prepare


def weights_cut_short(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_in("short")(folder, monkeypatch)
    weights = folder / "short" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def other_template(folder: Path, _: pytest.MonkeyPatch) -> None:
    tiny_local.model().save_pretrained(folder / "strict")
    made = tiny_local.tokenizer()
    made.chat_template = "{{ raise_exception('roles must alternate') }}"
    made.save_pretrained(folder / "strict")


def checkpoint(state: str = "", tensors: bytes | None = None, **changes: Any) -> Callable[..., None]:
    """A run folder ``old`` with a checkpoint of the recipe as it stood before ``changes``."""

    def prepare(folder: Path, _: pytest.MonkeyPatch) -> None:
        recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
        written = parse_recipe(recipe, "recipe.yaml").model_dump(mode="json")
        for section, values in changes.items():
            written[section] |= values
        place = folder / "old" / "checkpoints" / "000001"
        place.mkdir(parents=True)
        (folder / "old" / "recipe.yaml").write_text(yaml.safe_dump(written))
        whole = {"period": 1, "version": 1, "stream": {}, "controller": {}, "random": [], "accuracies": []}
        (place / "state.json").write_text(state or json.dumps(whole))
        if tensors is not None:
            (place / "trainer.pt").write_bytes(tensors)

    return prepare


def unreadable_recipe(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint()(folder, monkeypatch)
    (folder / "old" / "recipe.yaml").unlink()


def data(content: str | bytes, name: str = "data.jsonl", **task: Any) -> dict[str, Any]:
    return {"changes": {"task": {"path": name, **task}}, "files": {name: content}}


ONE = '{"prompt": "say one"}\n'
RESUME: dict[str, Any] = {"arguments": ("--resume", "old"), "output": False}
FILES = [
    Case("missing model", ("no Hugging Face model", "config.json"), {"model": {"name": "nowhere"}}),
    Case("folder without config.json", ("config.json is missing", "'empty'"),
         {"model": {"name": "empty"}}, files={"empty/README.md": "no model"}),
    Case("config.json that isn't JSON", ("can't be loaded", "model.name"),
         {"model": {"name": "broken"}}, files={"broken/config.json": "{"}),
    Case("model without a tokenizer", ("tokenizer can't be loaded",), {"model": {"name": "mute"}},
         prepare=lambda folder, _: tiny_local.model().save_pretrained(folder / "mute")),
    Case("weights cut short", ("model can't be loaded",), {"model": {"name": "short"}},
         prepare=weights_cut_short),
    Case("no such data", ("no such file", "none.jsonl"), {"task": {"path": "none.jsonl"}}),
    Case("empty data", ("holds no records", "data.jsonl"), **data("\n\n")),
    Case("a broken line", ("line 2 isn't JSON", "data.jsonl"), **data(ONE + "{prompt}\n")),
    Case("a record without a prompt", ("record 1 has no usable prompt", "`prompt`"),
         **data(ONE + '{"question": "two"}\n')),
    Case("a record that is a number", ("record 0 has no usable prompt",), **data("3\n")),
    Case("chat without content", ("record 0 has no usable prompt",), **data('{"prompt": [{"role": "user"}]}\n')),
    Case("data in another encoding", ("can't be read", "UTF-8"), **data('{"prompt": "é"}\n'.encode("latin-1"))),
    Case("a Parquet file that isn't one", ("not a Parquet file",), **data("no parquet", "data.parquet")),
    Case("a column that hides an argument", ("argument of the reward function", "'completions'"),
         **data('{"prompt": "one", "completions": 1}\n')),
    Case("a template that refuses the roles", ("chat template refuses", "roles must alternate"),
         {"model": {"name": "strict"}, "task": {"path": "chat.jsonl"}}, prepare=other_template,
         files={"chat.jsonl": '{"prompt": [{"role": "assistant", "content": "one"}]}\n'}),
    Case("reward that isn't a path", ("not an import path", "'score'"), {"task": {"reward": "score"}}),
    Case("reward of no module", ("can't be imported", "no_such_module"), {"task": {"reward": "no_such_module:score"}}),
    Case("reward of no file", ("can't be imported", "no file", "none.py"), {"task": {"reward": "none.py:score"}}),
    Case("reward file that raises", ("can't be imported", "NameError"),
         {"task": {"reward": "raises.py:score"}}, files={"raises.py": "undefined\n"}),
    Case("reward function that isn't there", ("has no function 'score'",),
         {"task": {"reward": "other.py:score"}}, files={"other.py": "score = 3\n"}),
    Case("rollout that can't be imported", ("can't be imported", "sampling.rollout"),
         {"sampling": {"rollout": "none.py:play"}}),
    Case("prompt over the limit", ("more tokens than the limit", "max_prompt_tokens"),
         arguments=("sampling.max_prompt_tokens=3",)),
    Case("prompt and response over the context", ("model's context", "found 300", "at most 256"),
         arguments=("sampling.max_prompt_tokens=294",)),
    Case("unknown reasoning-gym task", ("no such task", "'leg_countin'", "use 'leg_counting'"),
         {"task": {"kind": "reasoning_gym", "name": "leg_countin"}}),
    Case("reasoning-gym option that isn't one", ("refuses this configuration", "legs"),
         {"task": {"kind": "reasoning_gym", "name": "leg_counting", "config": {"legs": 4}}}),
    Case("everything held out", ("too few problems (45)", "at most 39"),
         {"task": {"kind": "arithmetic", "held_out": 44}}),
    Case("LoRA targets that don't exist", ("peft refuses", "model.lora.targets"),
         {"model": {"lora": {"targets": ["q_prj"]}}}),
    Case("LoRA without targets", ("peft refuses", "model.lora.targets"), {"model": {"lora": {"targets": []}}}),
    Case("more layers than there are", ("fewer layers", "at most 2"), {"model": {"trained_layers": 3}}),
    Case("dropout modules in training mode", ("dropout acts", "gradient_checkpointing: false"),
         {"model": {"name": "gpt2", "gradient_checkpointing": True}, "metronome": {"attention": "host"}},
         prepare=model_in("gpt2", kind="gpt2", n_layer=2, n_head=4, n_embd=32, n_positions=256, attn_pdrop=0.0)),
    Case("attention dropout in training mode", ("dropout acts", "attention_dropout"),
         {"model": {"name": "drop", "gradient_checkpointing": True}, "metronome": {"attention": "host"}},
         prepare=model_in("drop", attention_dropout=0.1)),
    Case("resume with another recipe", ("can't change training.lr", "0.01"), **RESUME,
         prepare=checkpoint(training={"lr": 0.5})),
    Case("resume without its recipe", ("recipe can't be read", "recipe.yaml"), **RESUME, prepare=unreadable_recipe),
    Case("state cut short", ("checkpoint can't be read",), **RESUME, prepare=checkpoint('{"period": 1')),
    Case("state that isn't whole", ("checkpoint can't be read", "isn't whole"), **RESUME, prepare=checkpoint("{}")),
    Case("checkpoint without tensors", ("checkpoint doesn't fit",), **RESUME, prepare=checkpoint()),
    Case("tensors that aren't", ("checkpoint doesn't fit",), **RESUME, prepare=checkpoint(tensors=b"not tensors")),
]  # fmt: skip


@pytest.mark.parametrize("case", FILES, ids=lambda case: case.name)
def test_files_that_cannot_be_used_are_refused_before_a_worker_starts(
    case: Case, tiny_recipe: Any, tmp_path: Path, monkeypatch: Any, capsys: Any, no_worker: None
) -> None:
    if "reasoning_gym" in str(case.changes):
        pytest.importorskip("reasoning_gym")
    if "lora" in str(case.changes):
        pytest.importorskip("peft")
    transformers.logging.set_verbosity_error()
    outcome(case, tiny_recipe, tmp_path, monkeypatch, capsys)
    assert nothing_left(tmp_path)


# --- functions that misbehave in the run ----------------------------------------------------------

SCORES = """
def raises(prompts, completions, **columns):
    raise KeyError("no answer")

def nan(prompts, completions, **columns):
    return [float("nan")] * len(completions)

def short(prompts, completions, **columns):
    return [0.5] * (len(completions) - 1)

def number(prompts, completions, **columns):
    return 0.5

def words(prompts, completions, **columns):
    return ["good"] * len(completions)

def arrays(prompts, completions, **columns):
    import numpy
    return [numpy.ones(2)] * len(completions)

def narrow(prompts, completions):
    return [0.5] * len(completions)
"""
ROLLOUTS = """
from metronome_local.rollouts import Request, Row

def nothing(prompt, tokenizer):
    yield Request(prompt.ids)

def no_rows(prompt, tokenizer):
    yield Request(prompt.ids)
    return []

def empty(prompt, tokenizer):
    yield Request(prompt.ids)
    return [Row(list(prompt.ids))]

def no_prompt(prompt, tokenizer):
    row = Row([])
    row.add_sampled((yield Request(prompt.ids)))
    return [row]

def uneven(prompt, tokenizer):
    row = Row(list(prompt.ids))
    row.add_sampled((yield Request(prompt.ids)))
    row.response.append(5)
    return [row]

def raises(prompt, tokenizer):
    yield Request(prompt.ids)
    raise LookupError("no tool")

def tokens(prompt, tokenizer):
    yield list(prompt.ids)

def silent(prompt, tokenizer):
    yield Request([])

def narrow(prompt):
    yield Request(prompt.ids)

def plain(prompt, tokenizer):
    return [Row(list(prompt.ids))]
"""


def reward(name: str, *words: str, **more: Any) -> Case:
    changes = {"task": {"reward": f"scores.py:{name}", **more}}
    return Case(f"reward {name}", ("task.reward", *words), changes, files={"scores.py": SCORES})


def rollout(name: str, *words: str) -> Case:
    changes = {"sampling": {"rollout": f"rollouts.py:{name}"}}
    return Case(f"rollout {name}", (f"rollouts.py:{name}", *words), changes, files={"rollouts.py": ROLLOUTS})


LATER = "".join(json.dumps({"prompt": "x" * (70 if place else 5)}) + "\n" for place in range(2))
RUNNING = [
    reward("raises", "raised on each of the first 16 samples", "KeyError", "no answer"),
    reward("nan", "isn't a finite number", "found nan"),
    reward("short", "must return 4 rewards", "3 rewards"),
    reward("number", "must return 4 rewards", "0.5"),
    reward("words", "isn't a finite number", "'good'"),
    reward("arrays", "isn't a finite number", "array"),
    reward("narrow", "raised on each of the first 16", "unexpected keyword argument 'answer'", path="extra.jsonl"),
    rollout("nothing", "must return rows", "row.add_sampled(sampled)"),
    rollout("no_rows", "must return rows", "0 rows"),
    rollout("empty", "at least one sampled token", "prompt index"),
    rollout("no_prompt", "rows with a prompt"),
    rollout("uneven", "must return rows"),
    rollout("raises", "rollout function raised LookupError", "no tool"),
    rollout("tokens", "must yield a Request"),
    rollout("silent", "must yield a Request with at least one token"),
    rollout("narrow", "rollout function raised TypeError"),
    rollout("plain", "rollout function raised AttributeError"),
    Case("a later prompt over the limit", ("more tokens than the limit", "found 70", "limit of 64"),
         {"task": {"path": "later.jsonl", "held_out": 0.0}}, files={"later.jsonl": LATER},
         arguments=("training.prompts=2", "training.seed=0")),
]  # fmt: skip


class _Thread:
    """A worker in a thread, with what the pool asks of a process."""

    pid, exitcode = 0, 0

    def __init__(self, run: Callable[[], None]) -> None:
        self.sentinel, self._ended = os.pipe()
        self._thread = threading.Thread(target=self._main, args=(run,), daemon=True)
        self._thread.start()

    def _main(self, run: Callable[[], None]) -> None:
        run()
        os.write(self._ended, b"x")

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, timeout: float) -> None:
        self._thread.join(timeout)

    def kill(self) -> None:
        pytest.fail("the worker didn't stop")


@pytest.fixture
def worker_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers as threads of this process: the same code and messages without ten seconds of imports each."""
    pool, worker = metronome_local.pool, metronome_local.worker
    quiet = types.SimpleNamespace(
        signal=lambda *_: None, pthread_sigmask=lambda *_: None, SIGINT=2, SIG_IGN=None, SIG_UNBLOCK=None
    )
    monkeypatch.setattr(worker, "signal", quiet)

    def spawn(self: Any, number: int) -> Any:
        ours, theirs = self._context.Pipe()
        process = _Thread(lambda: worker.run_worker(theirs, self._weights, self._configs[number]))
        return pool._Worker(number, process, ours)

    monkeypatch.setattr(pool.RolloutPool, "_spawn", spawn)


@pytest.mark.filterwarnings("ignore::metronome_local.scoring.ScorerWarning")
@pytest.mark.parametrize("case", RUNNING, ids=lambda case: case.name)
def test_a_function_that_misbehaves_ends_the_run_with_its_own_fault(
    case: Case, tiny_recipe: Any, tmp_path: Path, monkeypatch: Any, capsys: Any, worker_threads: None
) -> None:
    (tmp_path / "extra.jsonl").write_text('{"prompt": "one", "answer": 1}\n')
    outcome(case, tiny_recipe, tmp_path, monkeypatch, capsys)
    metrics = (tmp_path / OUTPUT / "metrics.jsonl").read_text()
    assert metrics == "", "a period was trained"
    assert not (tmp_path / OUTPUT / "checkpoints").exists()


def test_a_fault_in_a_worker_process_reaches_the_command_line(
    tiny_recipe: Any, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    outcome(rollout("raises", "LookupError", "no tool"), tiny_recipe, tmp_path, monkeypatch, capsys)


def test_the_recipe_under_all_these_faults_runs(
    tiny_recipe: Any, tmp_path: Path, monkeypatch: Any, capsys: Any, worker_threads: None
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tiny_recipe(training={"periods": 1})))
    assert main(["run", "recipe.yaml", "--output", OUTPUT]) == 0
    assert len((tmp_path / OUTPUT / "metrics.jsonl").read_text().splitlines()) == 1
    captured = capsys.readouterr()
    assert captured.err == ""
    assert re.search(r"1/1 +reward", captured.out)


def test_names_of_cases_are_distinct_and_many() -> None:
    names = [case.name for case in (*RECIPE, *FILES, *RUNNING)]
    assert len(set(names)) == len(names) >= 24
