"""Every recipe with every overlay is one that AReaL's own configuration classes accept, and we; bad ones say why."""

import getpass
import json
import os
import shlex
import sys
import tempfile
from itertools import product
from pathlib import Path

import pytest

pytest.importorskip("areal", reason="the AReaL adapter's tests need AReaL (requirements/areal.txt)")

import areal_room  # noqa: F401  (the room, before AReaL chooses its platform)

from metronome.errors import ConfigurationError
from metronome.overlays import Machine, layered, parse_layered, typed_settings
from metronome.recipes import override, parse_yaml
from metronome_areal import run as host
from metronome_areal import script
from metronome_areal.command import CONFIG, SCRIPT, arguments_of, validate
from metronome_areal.recipe import Recipe
from metronome_areal.smoke import FILES, keys

FOLDER = Path(__file__).parents[2] / "recipes" / "areal"
RECIPES = sorted(FOLDER.glob("*.yaml"))


def recipe_of(name, *overrides):
    path = FOLDER / f"{name}.yaml"
    recipe = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    for one in overrides:
        recipe = override(recipe, one)
    return recipe, str(path)


def composed(name, *overrides, assets=None):
    recipe, where = recipe_of(name, *overrides)
    parsed = parse_layered(Recipe, recipe, where, smoke=assets is not None)
    return layered(parsed, typed_settings(recipe, where), Machine(keys, assets) if assets else None)


def variants():
    for path in RECIPES:
        overlays = parse_yaml(path.read_text(encoding="utf-8"), str(path))["overlays"]
        for name, smoke in product(["", *overlays], [False, True]):
            yield pytest.param(path.stem, name, smoke, id=f"{path.stem}-{name or 'plain'}{'-smoke' if smoke else ''}")


DEFAULTS = {"output": None, "resume": None, "smoke": False}


def run(name, *overrides, **others):
    recipe, where = recipe_of(name, *overrides)
    return host.run(recipe, where=where, **(DEFAULTS | {"dry_run": False} | others))


def dry(name, *overrides, **others):
    return run(name, *overrides, dry_run=True, **others)


@pytest.fixture
def started(monkeypatch):
    """What would have been started."""
    calls = []
    monkeypatch.setattr(host, "start", lambda command, environment: calls.append((command, dict(environment))) or 3)
    return calls


def test_every_row_has_its_recipe_and_its_variants():
    names = {path.stem for path in RECIPES}
    assert names == {"sagc", "periodic_qwen3_8b", "a3po_setup1", "a3po_setup2", "long_prompt", "all_four"}
    for name in names:
        recipe, where = recipe_of(name)
        parsed = parse_layered(Recipe, recipe, where, smoke=False)
        assert {"gpu", "npu"} <= parsed.overlays.keys()
        assert any(one.startswith("g") and one[1:].isdigit() for one in parsed.overlays)
        assert "arXiv" in parsed.paper.source
        assert parsed.paper.ours
        assert "not run on an NPU" in parsed.overlays["npu"].note


@pytest.mark.parametrize(("name", "overlay", "smoke"), list(variants()))
def test_areal_s_classes_and_ours_accept_every_variant(name, overlay, smoke, capsys):
    chosen = [f"overlay={overlay}"] if overlay else []
    before = dict(os.environ)
    assert dry(name, *chosen, smoke=smoke) == 0
    assert os.environ == before
    assert "Nothing was started." in capsys.readouterr().out
    args, _ = composed(name, *chosen, assets=Path("/tiny") if smoke else None)
    assert "{assets}" not in str(args)
    assert "~" not in str(args)  # AReaL doesn't expand it
    if smoke:
        assert args["actor.path"] == "/tiny/model"


def test_the_authors_set_up_is_theirs():
    """Figures of the example in AReaL."""
    args, block = composed("a3po_setup1")
    assert (
        args
        | {
            "train_dataset.batch_size": 256,
            "gconfig.n_samples": 4,
            "gconfig.max_new_tokens": 1024,
            "actor.optimizer.lr": 1.7e-5,
            "actor.optimizer.weight_decay": 0.017,
            "actor.eps_clip": 0.4,
            "actor.ppo_n_minibatches": 1,
            "actor.reward_scaling": 10.0,
            "actor.reward_bias": -0.5,
            "actor.adv_norm.mean_level": "batch",
            "actor.reward_norm.mean_level": "group",
            "rollout.backend": "sglang:d4",
            "actor.backend": "fsdp:d4",
            "total_train_epochs": 10,
        }
        == args
    )
    assert block == {
        "rollout_source": "bounded",
        "bounded.max_staleness": 2,
        "loss": "a3po",
        "a3po.cap": 5.0,
        "a3po.cap_mode": "mask",
    }
    args, _ = composed("a3po_setup2")
    sizes = [args[f"{key}"] for key in ("train_dataset.batch_size", "gconfig.n_samples")]
    assert (*sizes, args["actor.eps_clip"], args["actor.eps_clip_higher"]) == (32, 4, 0.4, 0.6)


@pytest.mark.parametrize("name", ["a3po_setup1", "a3po_setup2"])
def test_the_overlays_of_areal_itself_have_nothing_of_ours(name):
    for overlay in ("areal_synchronous", "areal_recompute", "areal_loglinear"):
        args, block = composed(name, f"overlay={overlay}")
        assert block == {}
        assert args["rollout.max_head_offpolicyness"] == (0 if overlay == "areal_synchronous" else 2)
        if overlay != "areal_synchronous":
            assert args["actor.prox_logp_method"] == overlay.removeprefix("areal_")
            assert args["actor.rejection_sampling.upper"] == 5.0  # without it AReaL drops the importance weight


def test_a_dry_run_prints_the_command_and_starts_nothing(capsys, started, tmp_path):
    assert dry("all_four", smoke=True, output=str(tmp_path / "out")) == 0
    said = capsys.readouterr().out
    for part in (
        f"python -m metronome_areal {SCRIPT} \\\n  --config \\\n  {CONFIG}",
        "++metronome.cpu=true \\\n",
        "++metronome.loss=a3po",
        "'++metronome.sagc.sizes=[2,4]'",
        f"++cluster.fileroot={tmp_path / 'out'} \\\n",
        f"data: python -m metronome_areal.cpu.assets {tmp_path / 'out' / 'smoke'}",
        "metronome: rollout.max_head_offpolicyness=",  # what our trainer will set besides
        "Nothing was started.",
    ):
        assert part in said
    assert "load_dataset" not in said  # the recipe's own data aren't needed
    assert not started
    assert not (tmp_path / "out").exists()


def test_the_printed_command_is_one_that_a_shell_reads_back(capsys, started):
    dry("a3po_setup1")
    printed = capsys.readouterr().out.partition("python -m metronome_areal")[2].partition("Nothing was")[0]
    run("a3po_setup1")
    assert shlex.split(printed.replace("\\\n", " ")) == started[0][0][3:]


def test_an_overlay_says_what_lacks(capsys):
    dry("all_four", "overlay=npu")
    assert "metronome: npu: not run on an NPU" in capsys.readouterr().out
    dry("all_four", "overlay=gpu")
    assert "NPU" not in capsys.readouterr().out


def test_without_areal_a_dry_run_says_that_nothing_was_validated_and_a_run_is_refused(capsys, monkeypatch):
    monkeypatch.setattr(host, "installed", lambda: False)
    assert dry("sagc") == 0
    assert "not validated" in capsys.readouterr().out
    with pytest.raises(ConfigurationError, match=r"metronome-rl\[areal\]"):
        run("sagc")


def test_the_command_line_has_the_last_word_over_overlays():
    args, block = composed("sagc", "overlay=g8", "metronome.fixed.size=6", "args.train_dataset.batch_size=32")
    assert block == {"group_controller": "fixed", "fixed.size": 6}
    assert args["train_dataset.batch_size"] == 32
    args, _ = composed("sagc", "args.actor.mb_spec.max_tokens_per_mb=512", assets=Path("/tiny"))
    assert args["actor.mb_spec.max_tokens_per_mb"] == 512


def test_settings_are_written_in_hydra_s_grammar_and_read_back(tmp_path):
    from areal.api.cli_args import parse_cli_args

    args = {
        "script.reward": "/a folder/r.py:reward",
        "actor.backend": "fsdp:d4",
        "actor.optimizer.lr": 1.7e-5,
        "actor.eps_clip_higher": None,
        "actor.use_lora": True,
        "actor.target_modules": ["q_proj", "a b"],
        "gconfig.stop": [],
        "trial_name": "true",
        "experiment_name": 'it"s',
        "actor.rejection_sampling": {"upper": 5.0, "level": "token"},
    }
    found, _ = parse_cli_args(arguments_of(args, {"sagc.sizes": [2, 4], "loss": "a3po"}))
    assert found.script.reward == args["script.reward"]
    assert found.actor.backend == "fsdp:d4"
    assert found.actor.optimizer.lr == 1.7e-5
    assert found.actor.eps_clip_higher is None
    assert found.actor.use_lora is True
    assert list(found.actor.target_modules) == ["q_proj", "a b"]
    assert list(found.gconfig.stop) == []
    assert found.trial_name == "true"
    assert found.experiment_name == 'it"s'
    assert dict(found.actor.rejection_sampling) == {"upper": 5.0, "level": "token"}
    assert found.metronome == {"sagc": {"sizes": [2, 4]}, "loss": "a3po"}


def test_of_a_section_and_a_key_in_it_the_later_one_stays():
    def flags(args):
        return arguments_of(args, {})[2:]

    assert flags({"actor.rejection_sampling.upper": 5.0, "actor.rejection_sampling": None}) == [
        "++actor.rejection_sampling=null"
    ]
    assert flags({"actor.rejection_sampling": None, "actor.rejection_sampling.upper": 5.0}) == [
        "++actor.rejection_sampling.upper=5.0"
    ]
    assert len(flags({"actor.eps_clip": 0.1, "actor.eps_clip_higher": 0.2})) == 2


def test_a_run_starts_our_launcher_and_returns_its_exit_code(started):
    assert run("a3po_setup1") == 3
    [(command, environment)] = started
    assert command[:6] == [sys.executable, "-m", "metronome_areal", str(SCRIPT), "--config", str(CONFIG)]
    assert "++actor.eps_clip=0.4" in command
    assert not [one for one in command if "metronome.cpu" in one]
    assert environment == dict(os.environ)


def test_a_smoke_run_makes_its_model_and_data_and_writes_beside_them(started, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert run("all_four", "overlay=bounded", smoke=True) == 3
    [folder] = tmp_path.glob("metronome-smoke-*")
    assert {one.name for one in folder.iterdir()} == {*FILES}
    assert str(folder) in capsys.readouterr().out
    [(command, environment)] = started
    assert f"++actor.path={folder}/model" in command
    assert f"++cluster.fileroot={folder}" in command
    assert {"++metronome.cpu=true", "++metronome.rollout_source=bounded"} <= {*command}
    assert environment["HF_HUB_OFFLINE"] == "1"


def test_a_smoke_run_takes_the_user_s_model_and_data_and_names_a_part_that_lacks(started, tmp_path):
    for name in FILES:
        (tmp_path / name).touch()
    assert run("sagc", f"assets={tmp_path}", smoke=True, output=str(tmp_path / "out")) == 3
    assert f"++train_dataset.path={tmp_path / 'prompts.jsonl'}" in started[0][0]
    assert not (tmp_path / "out").exists()  # nothing was made
    (tmp_path / "tiny_reward.py").unlink()
    with pytest.raises(ConfigurationError, match=r"no tiny_reward\.py"):
        run("sagc", f"assets={tmp_path}", smoke=True)
    with pytest.raises(ConfigurationError, match="--smoke"):
        run("sagc", f"assets={tmp_path}")
    assert len(started) == 1


def save(folder, name, trial="trial0", user=None):
    """What AReaL's recovery leaves, as far as the door looks."""
    saved = folder / "checkpoints" / (user or getpass.getuser()) / name / trial / "recover_info"
    saved.mkdir(parents=True)
    (saved / "step_info.json").write_text("{}")


def test_a_checkpoint_of_another_experiment_trial_or_user_is_refused_and_left_alone(started, tmp_path):
    save(tmp_path, "all-four")
    save(tmp_path, "sagc", trial="trial1")
    save(tmp_path, "sagc", user="another")
    with pytest.raises(ConfigurationError, match="of another experiment") as refused:
        run("sagc", resume=str(tmp_path))
    me = getpass.getuser()
    assert f"this recipe's would be {me}/sagc/trial0" in refused.value.what
    assert {f"{me}/all-four/trial0", f"{me}/sagc/trial1", "another/sagc/trial0"} == {*refused.value.found.split(", ")}
    assert "args.trial_name" in refused.value.remedy
    assert not started
    assert run("sagc", "args.trial_name=trial1", resume=str(tmp_path)) == 3  # as the remedy says
    assert run("all_four", resume=str(tmp_path)) == 3
    assert run("sagc", output=str(tmp_path)) == 3
    assert len(started) == 3


def test_a_smoke_run_leaves_a_checkpoint_to_go_on_from():
    args, _ = composed("sagc", assets=Path("/tiny"))
    assert args["recover.freq_steps"] < args["total_train_steps"]


def test_a_run_goes_on_in_the_folder_that_it_wrote(started, tmp_path):
    assert run("sagc", output=str(tmp_path)) == 3
    written = started[0][0]
    assert {f"++cluster.fileroot={tmp_path}", "++recover.mode=on"} <= {*written}
    with pytest.raises(ConfigurationError, match="recover_info"):
        run("sagc", resume=str(tmp_path))
    save(tmp_path, "sagc")
    assert run("sagc", resume=str(tmp_path)) == 3
    assert started[1][0] == written
    with pytest.raises(ConfigurationError, match="there is a run in this folder"):
        run("sagc", output=str(tmp_path))
    with pytest.raises(ConfigurationError, match="leave --output out"):
        run("sagc", output="a", resume="b")
    assert len(started) == 2


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["overlay=nppu"], "npu"),
        (["overlay=smoke"], "--smoke"),
        (["argz.a=1"], "did you mean 'args'|args"),
        (["paper.rows=1"], "row"),
        (["args.train_dataset.batch_sise=4"], r"no such key.*train_dataset\.batch_sise.*use 'batch_size'"),
        (["args.actr.eps_clip=4"], "no such key.*use 'actor'"),
        (["args.gconfig.n_samples=many"], r"gconfig\.n_samples"),
        (["args.actor.reward_norm.mean_level=all"], "mean_level must be"),
        (["args.actor.backend=d4"], r"backend prefix.*actor\.backend"),
        (["args.train_dataset.path=''"], "no prompts"),
        (["args.scriptt.keep=x"], "use 'script'"),
        (["metronome.group_controler=fixed"], "group_controller"),
        (["overlay=g8", "metronome.sagc.tau=3.0"], "isn't selected"),
        (["args.actor.backend=megatron:d4"], r"actor\.backend"),
        (["metronome.rollout_source=periodic", "args.actor.adv_norm.mean_level=batch"], r"actor\.adv_norm"),
    ],
)
def test_a_bad_recipe_is_refused_in_one_line_that_names_the_key(overrides, words):
    with pytest.raises(ConfigurationError, match=words) as refused:
        dry("sagc", *overrides)
    assert refused.value.exit_code == 2
    assert "\n" not in str(refused.value)


def test_a_key_that_areal_refuses_names_the_recipe():
    arguments = arguments_of({"train_dataset.path": "x.jsonl", "actor.eps_clp": 1}, {})
    with pytest.raises(ConfigurationError, match=r"in some\.yaml: args"):
        validate(arguments, "some.yaml")


def test_compare_is_refused_with_the_reason():
    recipe, where = recipe_of("sagc")
    with pytest.raises(ConfigurationError, match=r"once per value of metronome\.loss"):
        host.compare(recipe, ("metronome.loss", ["ppo", "a3po"]), where=where, output=None)


# ---- the script ------------------------------------------------------------------------------------------------------


class Letters:
    def encode(self, text):
        return list(text)


def test_prompts_are_rows_of_a_file_up_to_a_length(tmp_path):
    from areal.api.cli_args import TrainDatasetConfig

    path = tmp_path / "p.jsonl"
    long, short = (
        json.dumps({"messages": [{"role": "user", "content": text}], "answer": "1"}) for text in ("1+0=?", "1")
    )
    path.write_text(f"{long}\n\n{short}\n")

    def rows(**named):
        return script.prompts(TrainDatasetConfig(path=str(path), type="rl", **named), Letters())

    assert [one["messages"][0]["content"] for one in rows()] == ["1+0=?", "1"]
    assert [one["messages"][0]["content"] for one in rows(max_length=3)] == ["1"]
    path.write_text('{"prompt": "1"}\n')
    with pytest.raises(ConfigurationError, match=r"messages.*prompt"):
        rows()
    path.unlink()
    with pytest.raises(ConfigurationError, match="no such file"):
        rows()


def test_a_reward_is_a_path_of_a_module_or_of_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "my_reward.py").write_text("def f(*_):\n    return 1.0\n")
    assert script.importable("a.b.c") == "a.b.c"
    assert script.importable(f"{tmp_path / 'my_reward.py'}:f") == "my_reward.f"
    assert sys.path[0] == str(tmp_path)
    with pytest.raises(ConfigurationError, match=r"script\.reward"):
        script.importable(f"{tmp_path / 'other.py'}:f")


def test_groups_whose_rewards_are_alike_are_left_out():
    import torch

    assert script.mixed({"rewards": torch.tensor([0.0, 1.0])})
    assert not script.mixed({"rewards": torch.tensor([1.0, 1.0])})
