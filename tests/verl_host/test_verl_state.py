"""What our trainers save beside verl's checkpoint: written whole, checked when loaded, with the data's position."""

import copy
import json
import os
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="the verl adapter's tests need verl (requirements/verl.txt)")
pytest.importorskip("transfer_queue", reason="verl's V1 trainer needs TransferQueue (requirements/verl.txt)")

import transfer_queue as tq
from omegaconf import OmegaConf
from queue_room import BLOCK, Rows, collate
from test_trainer import SAGC, queue, trainer
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.trainer.ppo.utils import create_rl_sampler
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

import metronome_verl
from metronome.errors import ConfigurationError, PluginError
from metronome.recipes import parse_yaml
from metronome_verl import run, state
from metronome_verl.bounded import BoundedTrainer
from metronome_verl.periodic import PeriodicTrainer
from metronome_verl.trainer import SynchronousTrainer

# --- the file -------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoints(monkeypatch, tmp_path):
    """verl's saving and loading: the data's position, the tracker file, and the step."""

    def save(self):
        folder = Path(self.config.trainer.default_local_dir)
        assert (folder / f"global_step_{self.global_steps}" / "metronome.json").is_file()  # ours is there first
        (folder / f"global_step_{self.global_steps}" / "data.pt").touch()
        (folder / "latest_checkpointed_iteration.txt").write_text(str(self.global_steps))

    def load(self):
        tracker = Path(self.config.trainer.default_local_dir) / "latest_checkpointed_iteration.txt"
        self.global_steps = int(tracker.read_text()) if tracker.is_file() else 0

    monkeypatch.setattr(PPOTrainer, "_save_checkpoint", save)
    monkeypatch.setattr(PPOTrainer, "_load_checkpoint", load)
    monkeypatch.setattr(tq, "kv_list", lambda *_: {})
    return tmp_path


def simple(cls, mode, block, folder, rows=8):
    made = trainer(cls, mode, block, folder)
    made.train_dataset = Rows(rows)
    return made


def observed(made, monkeypatch):
    made.config.actor_rollout_ref.rollout.n = 2
    made._observe(queue(monkeypatch), {}, 0.25)
    return made


MODES = [(SynchronousTrainer, "synchronous"), (PeriodicTrainer, "periodic"), (BoundedTrainer, "bounded")]


@pytest.mark.parametrize(("cls", "mode"), MODES)
def test_controller_and_rollout_source_are_saved_and_loaded(checkpoints, monkeypatch, cls, mode):
    block = SAGC | {"rollout_source": mode}
    made = observed(simple(cls, mode, block, checkpoints), monkeypatch)
    made._save_checkpoint()
    saved = made.controller.state_dict()
    assert json.loads((checkpoints / "global_step_5" / "metronome.json").read_text())["group_controller"] == saved
    other = simple(cls, mode, block, checkpoints)
    assert other.controller.state_dict() != saved
    other._load_checkpoint()
    assert other.global_steps == 5
    assert other.controller.state_dict() == saved


def test_a_checkpoint_is_found_by_its_path(checkpoints, monkeypatch):
    made = observed(simple(PeriodicTrainer, "periodic", SAGC, checkpoints), monkeypatch)
    made._save_checkpoint()
    other = simple(PeriodicTrainer, "periodic", SAGC, checkpoints / "elsewhere")
    other.config.trainer.resume_mode = "resume_path"
    other.config.trainer.resume_from_path = str(checkpoints / "global_step_5")
    monkeypatch.setattr(PPOTrainer, "_load_checkpoint", lambda self: setattr(self, "global_steps", 5))
    other._load_checkpoint()
    assert other.controller.state_dict() == made.controller.state_dict()


def test_a_checkpoint_without_the_controller_s_state_is_refused(checkpoints):
    simple(PeriodicTrainer, "periodic", SAGC, checkpoints)._load_checkpoint()  # from scratch
    made = simple(PeriodicTrainer, "periodic", SAGC, checkpoints)
    made._save_checkpoint()
    (checkpoints / "global_step_5" / "metronome.json").unlink()
    with pytest.raises(ConfigurationError, match="no state of the group controller"):
        made._load_checkpoint()
    made.config.trainer.resume_mode = "disable"
    made._load_checkpoint()
    simple(PeriodicTrainer, "periodic", {}, checkpoints)._load_checkpoint()  # verl's own G


@pytest.mark.parametrize(("cls", "mode"), MODES)
def test_prompts_in_flight_of_verl_s_own_asynchronous_trainers_are_refused(checkpoints, cls, mode):
    made = simple(cls, mode, {"rollout_source": mode}, checkpoints)
    made._save_checkpoint()
    (checkpoints / "global_step_5" / "metronome.json").unlink()
    made._load_checkpoint()
    (checkpoints / "global_step_5" / "transfer_queue").mkdir()
    with pytest.raises(ConfigurationError, match=r"without metronome, whose prompts in flight[^$]*transfer_queue"):
        made._load_checkpoint()


def test_another_controller_than_the_checkpoint_s_starts_anew_and_says_so(checkpoints, capsys):
    simple(PeriodicTrainer, "periodic", {"loss": "ppo"}, checkpoints)._save_checkpoint()
    simple(PeriodicTrainer, "periodic", SAGC | {"loss": "a3po"}, checkpoints)._load_checkpoint()
    told = capsys.readouterr().out
    assert "group controller sagc starts anew: the checkpoint is of fixed" in told
    assert "loss is a3po from here on: the checkpoint is of ppo" in told


@pytest.mark.parametrize("other", ["synchronous", "periodic", "a bound of 2"])
def test_a_checkpoint_of_another_rollout_source_is_refused_before_anything_is_loaded(checkpoints, other):
    simple(BoundedTrainer, "bounded", BLOCK, checkpoints)._save_checkpoint()
    blocks = {"a bound of 2": BLOCK | {"bounded": {"max_staleness": 2}}}
    mode = "bounded" if other in blocks else other
    made = simple(dict(map(reversed, MODES))[mode], mode, blocks.get(other, {"rollout_source": mode}), checkpoints)
    made.global_steps = "untouched"
    with pytest.raises(ConfigurationError, match="written with another rollout source"):
        made._load_checkpoint()
    assert made.global_steps == "untouched"


DAMAGES = {
    "half of it": lambda text: text[: len(text) // 2],
    "bytes": lambda text: "\ufffd",
    "a list": lambda text: "[]",
    "a part less": lambda text: json.dumps({k: v for k, v in json.loads(text).items() if k != "in_flight"}),
    "a part of another kind": lambda text: json.dumps(json.loads(text) | {"data": None}),
    "another step": lambda text: json.dumps(json.loads(text) | {"step": 4}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_state_is_refused_with_its_path_and_what_to_resume_from(checkpoints, damage):
    made = simple(SynchronousTrainer, "synchronous", {}, checkpoints)
    made._save_checkpoint()
    made._load_checkpoint()
    file = checkpoints / "global_step_5" / "metronome.json"
    file.write_text(
        DAMAGES[damage](file.read_text()), encoding="latin-1" if damage == "bytes" else None, errors="replace"
    )
    with pytest.raises(
        ConfigurationError, match=r"can't be read[^$]*global_step_5/metronome.json[^$]*resume_from_path"
    ):
        made._load_checkpoint()


def test_metronome_run_refuses_to_resume_from_a_damaged_state_before_verl_starts(checkpoints, monkeypatch):
    made = simple(SynchronousTrainer, "synchronous", {}, checkpoints)
    made._save_checkpoint()
    started = []
    monkeypatch.setattr(run, "start", lambda *_: started.append("verl") or 0)
    path = Path(metronome_verl.__file__).parents[2] / "recipes" / "verl" / "sagc.yaml"
    recipe = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    options = {"where": str(path), "output": None, "resume": str(checkpoints), "dry_run": False, "smoke": False}
    assert run.run(recipe, **options) == 0
    (checkpoints / "global_step_5" / "metronome.json").write_text("{")
    with pytest.raises(ConfigurationError, match="can't be read"):
        run.run(recipe, **options)
    assert started == ["verl"]


def test_a_controller_s_state_that_its_owner_can_t_load_is_refused(checkpoints, monkeypatch):
    made = observed(simple(PeriodicTrainer, "periodic", SAGC, checkpoints), monkeypatch)
    made._save_checkpoint()
    monkeypatch.setattr(type(made.controller), "load_state_dict", lambda self, state: state["nothing"])
    with pytest.raises(PluginError, match=r"'sagc' raised in load_state_dict\(\): KeyError"):
        made._load_checkpoint()


def test_a_write_that_is_cut_short_leaves_the_state_that_was_there(tmp_path, monkeypatch):
    state.write(tmp_path, {"step": 1})

    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(state.os, "fsync", stopped)
    with pytest.raises(KeyboardInterrupt):
        state.write(tmp_path, {"step": 2})
    assert json.loads((tmp_path / "metronome.json").read_text()) == {"step": 1}
    monkeypatch.undo()
    with pytest.raises(PluginError, match=r"isn't JSON: TypeError"):
        state.write(tmp_path, {"step": {3}})
    state.write(tmp_path, {"step": 4})
    assert json.loads((tmp_path / "metronome.json").read_text()) == {"step": 4}
    assert os.listdir(tmp_path) == ["metronome.json"]


# --- the data -------------------------------------------------------------------------------------------


def test_a_position_in_other_data_is_refused_and_a_missing_one_is_told(checkpoints, capsys):
    simple(SynchronousTrainer, "synchronous", {}, checkpoints)._save_checkpoint()
    for change in ("rows", "shuffle"):
        made = simple(SynchronousTrainer, "synchronous", {}, checkpoints, rows=9 if change == "rows" else 8)
        made.config.data.shuffle = change != "shuffle"
        with pytest.raises(ConfigurationError, match=r"position is one in other data[^$]*'rows': 8[^$]*remove data.pt"):
            made._load_checkpoint()
    (checkpoints / "global_step_5" / "data.pt").unlink()
    made._load_checkpoint()
    assert "no data.pt: the data begins anew" in capsys.readouterr().out


@pytest.mark.parametrize("shuffle", [True, False])
def test_prompts_come_once_an_epoch_when_their_number_a_step_changes(monkeypatch, shuffle):
    """As ``fixed_rollouts`` does to synchronous steps, over epochs and resumes, through verl's own sampler."""

    def make(saved=None):
        made = trainer(SynchronousTrainer, "synchronous", SAGC)
        data = OmegaConf.create({"shuffle": shuffle, "seed": 3})
        made.train_dataloader_it = None
        made.train_dataloader = StatefulDataLoader(
            Rows(7), 1, drop_last=True, sampler=create_rl_sampler(data, Rows(7)), collate_fn=collate
        )
        if saved is not None:
            made.train_dataloader.load_state_dict(saved)
        return made

    made, seen = make(), []
    for prompts in (2, 5, 4, 4, 2, 3, 1):  # 7: an epoch's end between two steps; 21: three epochs
        seen += [int(index) for index in made._next_train_batch(prompts)["index"]]
        made = make(copy.deepcopy(made.train_dataloader.state_dict()))
    epochs = [seen[place : place + 7] for place in (0, 7, 14)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(7))] * 3
    assert (epochs[0] != epochs[1]) == shuffle
