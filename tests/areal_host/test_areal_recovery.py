"""A run that was interrupted goes on from AReaL's recovery checkpoint, or says in one line why it can't."""

import pickle
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("areal", reason="the AReaL adapter's tests need AReaL (requirements/areal.txt)")

import areal_room as room
import torch
from areal.utils import stats_tracker
from areal.utils.recover import RecoverHandler
from torchdata.stateful_dataloader import StatefulDataLoader

from metronome.errors import ConfigurationError
from metronome_areal.config import read
from metronome_areal.cpu.weights import gathered
from metronome_areal.prompts import KEY
from metronome_areal.state import data_of, take

KEPT = {"recover.mode": "on", "recover.freq_steps": 1}
SAGC = {
    "metronome.group_controller": "sagc",
    "metronome.sagc": {"sizes": [2, 4, 8], "min_dwell": 1, "event": "mean_ratio", "tau": 1.3, "eta": 2.0},
    "gconfig.stop_token_ids": list(range(20, 40)),  # responses of all lengths
}
PERIODIC = {"metronome.rollout_source": "periodic", "train_dataset.shuffle": True, **SAGC, **KEPT}
BOUNDED = {
    "metronome.rollout_source": "bounded",
    "metronome.bounded.max_staleness": 2,
    "metronome.loss": "a3po",
    **SAGC,
    **KEPT,
}


class Interrupted(Exception):
    """A machine that went away."""


class Watched(room.PPOTrainer):
    """Goes away after step ``until``'s checkpoint; notes metrics, groups, and how many prompts are out at once."""

    until = None

    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        stats_tracker.export_all()
        self.stats, self.groups, self.most = [], [], 0
        commit, compute = self.stats_logger.commit, self.actor.compute_advantages

        def keeping(epoch, step, global_step, data, *others):
            self.stats.append(data)
            commit(epoch, step, global_step, data, *others)
            if global_step == self.until:
                raise Interrupted

        def noting(groups):
            self.groups += [(self.actor.get_version(), group) for group in groups]
            return compute(groups)

        self.stats_logger.commit, self.actor.compute_advantages = keeping, noting

    def _flow(self):
        flow = super()._flow()
        dispatch = flow.dispatch

        def counting():
            dispatch()
            self.most = max(self.most, len(flow._running) + len(flow._queued) + flow.trained)

        flow.dispatch = counting
        return flow

    def sizes(self):
        return [int(step["metronome/group_controller/size"]) for step in self.stats]

    def prompts(self):
        """Prompts trained in each version, as token ids."""
        found = {}
        for version, group in self.groups:
            start = int(group["loss_mask"][0].nonzero()[0])
            found.setdefault(version, []).append(tuple(group["input_ids"][0, :start].tolist()))
        return found

    def weights(self):
        return {name: value.clone() for name, value in gathered(self.actor).items()}


class Once(Watched):
    until = 2


def run(folder, keys, kind=Watched, steps=6, slow=0.0):
    """A run of ``kind``; the trainer as it was at the end, its weights, and the controller's state."""
    with room.trainer(room.configuration(folder, {**keys, "total_train_steps": steps}), kind) as one:
        one.rollout.generator.least_seconds = slow
        one.begun = (one.actor.get_version(), one.rollout.get_version(), one.weights())
        one.begun_with = one.part.selection.group_controller.state_dict()
        one.held = {name: value.clone() for name, value in one.rollout.generator._model.state_dict().items()}
        try:
            one.train(workflow=room.workflow(one.config))
        except Interrupted:
            assert one.until is not None
        one.ended = one.weights()
        one.ended_with = one.part.selection.group_controller.state_dict()
        return one


def info(folder):
    """Where AReaL keeps the data's position and ours."""
    return Path(RecoverHandler.recover_info_path("room", "t0", str(folder / "runs"))) / "dataloader_info.pkl"


def changed(folder, change):
    """Rewrites that file."""
    states = pickle.loads(info(folder).read_bytes())
    info(folder).write_bytes(pickle.dumps(change(states)))


def taking(folder, keys):
    """What a run of these keys says of the checkpoint before it makes any engine."""
    config = room.configuration(folder, keys)
    part = read(config)
    take(config, part, data_of(config, room.dataset(folder)))
    return part


def test_a_periodic_run_that_was_interrupted_is_the_run_that_was_not(tmp_path_factory):
    whole = run(tmp_path_factory.mktemp("whole"), PERIODIC)
    folder = tmp_path_factory.mktemp("halves")
    first = run(folder, PERIODIC, Once)
    assert len(first.stats) == 3
    second = run(folder, PERIODIC)
    assert second.begun[:2] == (3, 3)
    assert second.begun_with == first.ended_with
    for name, value in first.ended.items():
        assert second.begun[2][name].equal(value)
        assert second.held[name].equal(value)
    assert first.sizes() + second.sizes() == whole.sizes()
    assert len(set(whole.sizes())) > 1
    halves = first.prompts() | second.prompts()
    assert {step: sorted(prompts) for step, prompts in halves.items()} == {
        step: sorted(prompts) for step, prompts in whole.prompts().items()
    }
    assert second.ended_with == whole.ended_with
    for name, value in whole.ended.items():
        torch.testing.assert_close(second.ended[name], value, atol=1e-4, rtol=0)
    assert any((second.ended[name] - first.ended[name]).abs().max() > 1e-2 for name in whole.ended)


@pytest.fixture(scope="module")
def bounded(tmp_path_factory):
    """A bounded run with a moving G that went away after its third step, and its folder."""
    folder = tmp_path_factory.mktemp("bounded")
    return folder, run(folder, BOUNDED, Once, slow=0.005)


@pytest.fixture
def checkpoint(bounded, tmp_path):
    """A copy of its folder; AReaL's paths are ``tmp_path``'s."""
    shutil.copytree(bounded[0], tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_a_bounded_run_goes_on_with_the_prompts_that_were_out(bounded, checkpoint):
    first = bounded[1]
    state = pickle.loads(info(checkpoint).read_bytes())
    (state,) = state if isinstance(state, list) else [state]
    out = state[KEY]["prompts"]
    assert out
    second = run(checkpoint, BOUNDED, steps=7, slow=0.005)
    assert second.begun[:2] == (3, 3)
    assert second.begun_with == first.ended_with
    assert all(second.begun[2][name].equal(value) for name, value in first.ended.items())
    assert second.stats[0]["metronome/bounded/staleness_max"] == 0.0  # generated anew
    assert max(step["metronome/bounded/staleness_max"] for step in first.stats + second.stats) <= 2
    trained = Counter(one for found in (first.prompts(), second.prompts()) for step in found.values() for one in step)
    assert set(trained.values()) == {1}
    # No burst: never more than the window of the smallest G, whatever the version.
    largest = max(len(step) for found in (first.prompts(), second.prompts()) for step in found.values())
    assert second.most <= 3 * largest


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"metronome.group_controller": "fixed"}, "another group controller.*sagc, now fixed"),
        ({"metronome.sagc": {"sizes": [2, 4]}}, "other sizes"),
        ({"metronome.bounded.max_staleness": 3}, "another rollout source"),
        ({"metronome.rollout_source": "periodic"}, "prompts were out at the checkpoint.*bounded, now periodic"),
        ({"metronome.rollout_source": "synchronous"}, "prompts were out at the checkpoint"),
        ({"train_dataset.batch_size": 2}, "prompts would come twice or never"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused_in_one_line(checkpoint, keys, match):
    settings = {**BOUNDED, **keys}
    if keys.get("metronome.group_controller"):
        del settings["metronome.sagc"]
    if keys.get("metronome.rollout_source"):
        del settings["metronome.bounded.max_staleness"]
    with pytest.raises(ConfigurationError, match=match) as found:
        taking(checkpoint, settings)
    assert len(str(found.value).splitlines()) == 1
    taking(checkpoint, {**settings, "recover.mode": "off"})  # a new run
    taking(checkpoint, {**settings, "recover.trial_name": "another", "trial_name": "another"})


def test_it_is_refused_before_any_engine_is_made_and_accepted_as_it_was(checkpoint):
    without = {key: value for key, value in BOUNDED.items() if "sagc" not in key and "controller" not in key}
    config = room.configuration(checkpoint, without)
    with pytest.raises(ConfigurationError, match="another group controller") as refused, room.trainer(config):
        pass
    for way in ("recover.mode=off", "metronome run: args.trial_name=NAME with --output"):  # as each launcher takes it
        assert way in refused.value.remedy
    assert not torch.distributed.is_initialized()
    with pytest.raises(ConfigurationError, match=r"sagc, now AReaL's own"):
        taking(checkpoint, KEPT)  # AReaL's loop would lose what is out
    part = taking(checkpoint, BOUNDED)
    assert part.selection.group_controller.state_dict()["step"] == 2


def test_a_controller_and_a_source_that_are_areals_own_lose_nothing_silently(tmp_path):
    keys = {"metronome.rollout_source": "bounded", **KEPT}
    run(tmp_path, keys, Once, slow=0.005)
    with pytest.raises(ConfigurationError, match="only the source that sent them trains them"):
        taking(tmp_path, KEPT)
    with pytest.raises(ConfigurationError, match=r"AReaL's own, now sagc"):
        taking(tmp_path, {**keys, **SAGC})


def test_a_checkpoint_of_areals_own_trainer_starts_the_source_anew_and_has_no_controllers_state(tmp_path, capsys):
    run(tmp_path, KEPT, Once)
    changed(tmp_path, lambda states: [{name: value for name, value in one.items() if name != KEY} for one in states])
    keys = {**KEPT, "metronome.rollout_source": "bounded"}
    with pytest.raises(ConfigurationError, match="no state of the group controller"):
        taking(tmp_path, {**keys, **SAGC})
    capsys.readouterr()
    one = run(tmp_path, keys, steps=5)
    assert "rollout source bounded starts anew: the checkpoint is of AReaL's own trainer" in capsys.readouterr().out
    assert one.begun[:2] == (3, 3)
    assert sorted(one.prompts()) == [3, 4]


def test_a_source_without_prompts_out_may_be_left_for_another(tmp_path, capsys):
    keys = {"metronome.rollout_source": "periodic", **KEPT}
    run(tmp_path, keys, Once)
    one = run(tmp_path, {**KEPT, "metronome.rollout_source": "bounded"}, steps=4)
    assert "rollout source bounded starts anew: the checkpoint is of periodic" in capsys.readouterr().out
    assert sorted(one.prompts()) == [3]


@pytest.mark.parametrize("damage", ["ranks", "bytes"])
def test_a_checkpoint_that_areal_would_pass_over_is_refused(checkpoint, damage):
    if damage == "ranks":
        changed(checkpoint, lambda states: [*states, *states])
    else:
        info(checkpoint).write_bytes(info(checkpoint).read_bytes()[:100])
    with pytest.raises(ConfigurationError, match="AReaL can't go on from the checkpoint that is there") as found:
        taking(checkpoint, BOUNDED)
    assert "2 ranks, now 1" in str(found.value) or damage == "bytes"
    taking(checkpoint, KEPT)  # without a block AReaL decides


def test_areals_own_dataloader_reads_a_checkpoint_of_ours(checkpoint):
    (state,) = pickle.loads(info(checkpoint).read_bytes())
    loader = StatefulDataLoader(list(range(64)), batch_size=4, drop_last=True, collate_fn=list)
    loader.load_state_dict(state)
    assert len(next(iter(loader))) == 4


@pytest.mark.parametrize(
    ("step", "epochs", "most", "words"),
    [
        (3, None, 4, "step 4 of 4"),
        (3, None, 6, None),
        (15, None, None, "step 16 of 16"),
        (15, 2, None, None),
        (31, 2, 99, "step 32 of 32"),
        (None, None, 4, None),
    ],
)
def test_a_finished_run_says_so(capsys, step, epochs, most, words):
    info = None if step is None else SimpleNamespace(last_step_info=SimpleNamespace(global_step=step))
    config = SimpleNamespace(total_train_epochs=1, total_train_steps=most)
    one = SimpleNamespace(recover_info=info, config=config, train_dataloader=range(16))
    room.PPOTrainer._tell_finished(one, epochs)
    said = capsys.readouterr().out
    assert said == ("" if words is None else said)
    assert (words or "") in said
    assert said.count("the run is finished") == (words is not None)
