"""Every recipe with every overlay is one that verl's own configuration and our trainer accept; bad ones say why."""

import os
import tempfile
from itertools import product
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="the verl adapter's tests need verl (requirements/verl.txt)")

from metronome.errors import ConfigurationError
from metronome.overlays import Machine, parse_layered, typed_settings
from metronome.recipes import override, parse_yaml
from metronome_verl import run as host
from metronome_verl.command import spelt
from metronome_verl.recipe import Recipe, settings_of
from metronome_verl.smoke import machine_keys

FOLDER = Path(__file__).parents[2] / "recipes" / "verl"
RECIPES = sorted(FOLDER.glob("*.yaml"))


def read(name, *overrides):
    path = FOLDER / f"{name}.yaml"
    recipe = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    for one in overrides:
        recipe = override(recipe, one)
    return recipe, str(path)


def composed(name, *overrides, assets=None):
    recipe, where = read(name, *overrides)
    parsed = parse_layered(Recipe, recipe, where, smoke=assets is not None)
    return settings_of(parsed, typed_settings(recipe, where), Machine(machine_keys, assets) if assets else None)


def variants():
    for path in RECIPES:
        overlays = parse_yaml(path.read_text(encoding="utf-8"), str(path))["overlays"]
        for name, smoke in product(["", *overlays], [False, True]):
            yield pytest.param(path.stem, name, smoke, id=f"{path.stem}-{name or 'plain'}{'-smoke' if smoke else ''}")


DEFAULTS = {"output": None, "resume": None, "smoke": False}


def run(name, *overrides, **others):
    recipe, where = read(name, *overrides)
    return host.run(recipe, where=where, **(DEFAULTS | {"dry_run": False} | others))


def dry(name, *overrides, **others):
    return run(name, *overrides, dry_run=True, **others)


@pytest.fixture
def started(monkeypatch):
    """What would have been started; no Ray is named by the environment."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    calls = []
    monkeypatch.setattr(host, "start", lambda command, environment: calls.append((command, environment)) or 3)
    return calls


def test_every_row_has_its_recipe_and_its_variants():
    names = {path.stem for path in RECIPES}
    assert names == {
        "periodic_qwen3_8b",
        "periodic_r1_distill_32b",
        "a3po_setup1",
        "a3po_setup2",
        "sagc",
        "long_prompt",
        "all_four",
    }
    for name in names:
        recipe, where = read(name)
        parsed = parse_layered(Recipe, recipe, where, smoke=False)
        assert {"gpu", "npu"} <= parsed.overlays.keys()
        assert any(one.startswith("g") and one[1:].isdigit() for one in parsed.overlays)
        assert "arXiv" in parsed.paper.source
        assert parsed.paper.ours


@pytest.mark.parametrize(("name", "overlay", "smoke"), list(variants()))
def test_verl_s_configuration_and_our_trainer_accept_every_variant(name, overlay, smoke, capsys):
    chosen = [f"overlay={overlay}"] if overlay else []
    assert dry(name, *chosen, smoke=smoke) == 0
    assert "Nothing was started." in capsys.readouterr().out
    args, block = composed(name, *chosen, assets=Path("/tiny") if smoke else None)
    assert "{assets}" not in str(args)
    assert "~" not in str(args)  # verl doesn't expand it
    if smoke:
        assert args["trainer.device"] == "cpu"
        assert args["actor_rollout_ref.model.path"] == "/tiny/model"
        assert args["actor_rollout_ref.rollout.nnodes"] == (block.get("rollout_source", "synchronous") != "synchronous")


def test_a_dry_run_prints_the_command_and_starts_nothing(capsys, started, tmp_path):
    assert dry("all_four", smoke=True, output=str(tmp_path / "out")) == 0
    said = capsys.readouterr().out
    assert "VERL_PLATFORM=cpu OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 python -m verl.trainer.main_ppo" in said
    for part in ("trainer.v1.trainer_mode=metronome", "+metronome.loss=a3po", "+metronome.sagc.sizes=[2,4]"):
        assert part in said
    assert f"trainer.default_local_dir={tmp_path / 'out'}" in said
    assert f"data: python -m metronome_verl.cpu.assets {tmp_path / 'out' / 'smoke'}" in said
    assert "gsm8k.py" not in said  # the recipe's own data aren't needed
    assert "hybrid_engine=False" in said  # what our trainer will set besides
    assert "Nothing was started." in said
    assert not started
    assert not (tmp_path / "out").exists()


def test_without_verl_a_dry_run_says_that_nothing_was_validated_and_a_run_is_refused(capsys, monkeypatch):
    monkeypatch.setattr(host, "verl_config_folder", lambda: None)
    assert dry("sagc") == 0
    assert "not validated" in capsys.readouterr().out
    with pytest.raises(ConfigurationError, match=r"metronome-rl\[verl\]"):
        run("sagc")


def test_the_command_line_has_the_last_word_over_overlays():
    args, block = composed(
        "sagc", "overlay=g8", "metronome.fixed.size=6", "args.data.train_batch_size=24", "args.trainer.device=cpu"
    )
    assert block == {"group_controller": "fixed", "fixed.size": 6}
    assert args["data.train_batch_size"] == 24
    args, _ = composed("long_prompt", "overlay=g16", "args.actor_rollout_ref.rollout.n=8")  # the recipe's own value
    assert args["actor_rollout_ref.rollout.n"] == 8


def test_a_run_starts_verl_s_main_and_returns_its_exit_code(started):
    assert run("a3po_setup1") == 3
    [(command, environment)] = started
    assert command[1:3] == ["-m", "verl.trainer.main_ppo"]
    assert "+metronome.a3po.clip_low=0.4" in command
    assert not [one for one in command if "ray_kwargs" in one]
    assert environment == dict(os.environ)


def test_a_smoke_run_makes_its_model_and_data_and_starts_a_ray_of_its_own(started, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # Ray would refuse to pretend more
    monkeypatch.setenv("RAY_worker_register_timeout_seconds", "7")
    assert run("all_four", "overlay=bounded", smoke=True) == 3
    [folder] = tmp_path.iterdir()
    assert {one.name for one in folder.iterdir()} == {"model", "train.parquet", "validation.parquet", "reward.py"}
    assert str(folder) in capsys.readouterr().out
    [(command, environment)] = started
    assert f"actor_rollout_ref.model.path={folder / 'model'}" in command
    assert f"hydra.run.dir={folder / 'hydra'}" in command  # not below the folder where the user stands
    assert "+metronome.rollout_source=bounded" in command
    assert {"+ray_kwargs.ray_init.address=local", "+ray_kwargs.ray_init.num_gpus=2"} <= {*command}
    assert environment["VERL_PLATFORM"] == "cpu"
    assert environment["RAY_agent_register_timeout_ms"] == "300000"
    assert environment["RAY_worker_register_timeout_seconds"] == "7"  # the user's own
    assert "CUDA_VISIBLE_DEVICES" not in environment


@pytest.mark.parametrize("by_key", [False, True])
def test_a_smoke_run_takes_a_running_ray_and_tells_its_workers_about_the_cpu(by_key, started, tmp_path, monkeypatch):
    named = ["args.+ray_kwargs.ray_init.address=127.0.0.1:6379"] if by_key else []
    if not by_key:
        monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    run("long_prompt", *named, smoke=True, output=str(tmp_path))
    [(command, environment)] = started
    of_ray = [one for one in command if "ray_init" in one and "runtime_env" not in one]
    # Ray refuses numbers of devices beside an address
    assert of_ray == (["+ray_kwargs.ray_init.address='127.0.0.1:6379'"] if by_key else [])
    assert "+ray_kwargs.ray_init.runtime_env.env_vars.VERL_PLATFORM=cpu" in command
    assert "RAY_AUTH_MODE" not in {*environment} - {*os.environ}


def test_a_smoke_run_takes_the_user_s_model_and_data_and_names_a_part_that_lacks(started, tmp_path):
    for name in ("model", "train.parquet", "validation.parquet", "reward.py"):
        (tmp_path / name).touch()
    assert run("sagc", f"assets={tmp_path}", smoke=True, output=str(tmp_path / "out")) == 3
    assert f"data.train_files={tmp_path / 'train.parquet'}" in started[0][0]
    assert not (tmp_path / "out").exists()  # nothing was made
    (tmp_path / "reward.py").unlink()
    with pytest.raises(ConfigurationError, match=r"no reward\.py"):
        run("sagc", f"assets={tmp_path}", smoke=True)
    with pytest.raises(ConfigurationError, match="--smoke"):
        run("sagc", f"assets={tmp_path}")
    assert len(started) == 1


def test_a_folder_that_can_t_be_written_is_one_clear_error(started, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"can't be written.*--output FOLDER"):
        run("sagc", smoke=True, output=str(tmp_path / "file" / "below"))
    assert not started


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["overlay=nppu"], "npu"),
        (["overlay=smoke"], "--smoke"),
        (["argz.a=1"], "did you mean 'args'|args"),
        (["paper.rows=1"], "row"),
        (["args.data.train_batch_sise=4"], "train_batch_sise"),
        (["args.model_engine=fspd"], "fspd"),
        (["metronome.group_controler=fixed"], "group_controller"),
        (["overlay=g8", "metronome.sagc.tau=3.0"], "isn't selected"),
        (["metronome.rollout_source=periodic"], "rollout.nnodes"),
    ],
)
def test_a_bad_recipe_is_refused_in_one_line_that_names_the_key(overrides, words):
    with pytest.raises(ConfigurationError, match=words) as refused:
        dry("sagc", *overrides)
    assert refused.value.exit_code == 2
    assert "\n" not in str(refused.value)


def test_batches_that_verl_s_separate_trainer_would_stop_at_are_refused_before():
    with pytest.raises(ConfigurationError, match="ppo_mini_batch_size=128"):
        dry("a3po_setup1", "args.data.train_batch_size=128")


def test_folders_that_contradict_and_checkpoints_that_are_not_there_are_refused(tmp_path, started):
    with pytest.raises(ConfigurationError, match="leave --output out"):
        dry("sagc", output="a", resume="b")
    with pytest.raises(ConfigurationError, match="global_step_N"):
        run("sagc", resume=str(tmp_path))
    (tmp_path / "global_step_3").mkdir()
    with pytest.raises(ConfigurationError, match="latest_checkpointed_iteration"):  # verl would begin anew
        run("sagc", resume=str(tmp_path))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    with pytest.raises(ConfigurationError, match="latest_checkpointed_iteration"):
        run("sagc", resume=str(tmp_path))
    assert not started


def test_compare_is_refused_with_the_reason():
    recipe, where = read("sagc")
    with pytest.raises(ConfigurationError, match=r"once per value of metronome\.loss"):
        host.compare(recipe, ("metronome.loss", ["ppo", "a3po"]), where=where, output=None)


def test_values_keep_their_type_on_verl_s_command_line():
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser = OverridesParser.create()
    for value in (None, True, 3, 1.7e-5, "true", "~/a b/it's", "1e-6", "", "a\\", ["a,b", 2, "x"], {"k": "null"}, []):
        assert parser.parse_override(f"key={spelt(value)}").value() == value, value


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("args.trainer.v1.trainer_mode=sync", "reads no key under metronome"),
        ("args.trainer.use_v1=false", "reads no key under metronome"),
        ("args.data.train_batch_size=abc", "isn't of its kind"),
        ("args.actor_rollout_ref.actor.ppo_epochs=two", "isn't of its kind"),
        ("args.trainer=null", "refuses the recipe|lacks a part"),
        ("args.actor_rollout_ref.rollout.nnodes=one", "isn't of its kind|refuses"),
    ],
)
def test_what_would_end_in_a_traceback_or_in_another_trainer_is_one_clear_error(override, words):
    with pytest.raises(ConfigurationError, match=words):
        dry("all_four", override)
