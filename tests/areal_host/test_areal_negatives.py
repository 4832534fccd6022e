"""What can't be right stops the run: a line with exit code 2 before anything is made, or an error in the first step."""

import json

import pytest

pytest.importorskip("areal", reason="the AReaL adapter's tests need AReaL (requirements/areal.txt)")

import areal_room as room
import torch
import torch.distributed as dist
from areal.trainer.rl_trainer import PPOTrainer as HostTrainer
from areal_engines import ours
from transformers import AutoConfig, AutoModelForCausalLM

from metronome.errors import ConfigurationError, MetronomeError
from metronome_areal import host
from metronome_areal.config import PPOConfig
from metronome_areal.passes import Sharing

PERIODIC = {"metronome.rollout_source": "periodic"}
BOUNDED = {"metronome.rollout_source": "bounded"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("negatives")


# What a user may write that can't be, and what the one line says.
WRONG = {
    "misspelt key": ({"metronome.los": "a3po"}, "use 'loss'"),
    "misspelt option": ({"metronome.loss": "a3po", "metronome.a3po.capp": 2}, "use 'cap'"),
    "no such loss": ({"metronome.loss": "a3p"}, "use 'a3po'"),
    "no such source": ({"metronome.rollout_source": "streaming"}, "metronome.rollout_source"),
    "no such attention": ({"metronome.attention": "shared"}, "use 'shared_prompt'"),
    "no such controller": ({"metronome.group_controller": "sag"}, "use 'sagc'"),
    "option of a loss that isn't selected": ({"metronome.a3po.cap": 2}, "isn't selected"),
    "option of a source that isn't selected": (PERIODIC | {"metronome.bounded.max_staleness": 1}, "isn't selected"),
    "option of a controller that isn't selected": ({"metronome.sagc.sizes": [4, 8]}, "isn't selected"),
    "negative cap": ({"metronome.loss": "a3po", "metronome.a3po.cap": -1}, "metronome.a3po.cap"),
    "AReaL's clip out of range": ({"metronome.loss": "a3po", "actor.eps_clip": 1.5}, "metronome.a3po.clip_low"),
    "negative bound": (BOUNDED | {"metronome.bounded.max_staleness": -1}, "metronome.bounded.max_staleness"),
    "bound that is no number": (BOUNDED | {"metronome.bounded.max_staleness": "x"}, "a whole number"),
    "G of one": ({"metronome.group_controller": "sagc", "metronome.sagc.sizes": [1, 4]}, "metronome.sagc.sizes"),
    "backend": ({"metronome.loss": "a3po", "actor.backend": "megatron:d1"}, "actor.backend"),
    "no such folder": ({"tokenizer_path": "/nowhere"}, "tokenizer_path"),
    "v2": ({"actor._version": "v2"}, "_version"),
}


def watched(monkeypatch):
    """Fills up when AReaL's trainer would be made."""
    made = []

    def __init__(self, config, train_dataset=None, valid_dataset=None):
        made.append(config)

    monkeypatch.setattr(HostTrainer, "__init__", __init__)
    return made


@pytest.mark.parametrize("name", WRONG)
def test_it_is_one_line_with_exit_code_two_before_anything_is_made(folder, name, monkeypatch):
    keys, words = WRONG[name]
    made = watched(monkeypatch)
    config = room.configuration(folder, keys)  # AReaL writes it down as it reads it
    before = sorted(folder.rglob("*"))
    with pytest.raises(MetronomeError) as refused:
        room.PPOTrainer(config, train_dataset=room.dataset(folder))
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)
    assert refused.value.exit_code == 2
    assert made == []
    assert not dist.is_initialized()
    assert sorted(folder.rglob("*")) == before


def test_a_controller_without_a_scheduler_is_told_of_the_cpu_room(folder, monkeypatch):
    made = watched(monkeypatch)
    config = room.configuration(folder, {"metronome.cpu": False, "scheduler.type": None})
    monkeypatch.setenv("AREAL_SPMD_MODE", "0")
    with pytest.raises(ConfigurationError, match=r"metronome\.cpu=true.*torchrun") as refused:
        room.PPOTrainer(config, train_dataset=room.dataset(folder))
    assert refused.value.where == "scheduler.type"
    assert made == []


def test_the_same_trainer_without_a_mistake_is_made(folder, monkeypatch):
    made = watched(monkeypatch)
    monkeypatch.setattr(HostTrainer, "weight_update_meta", type("Meta", (), {"lora_keep_versions": 0}), raising=False)
    room.PPOTrainer(room.configuration(folder, PERIODIC), train_dataset=room.dataset(folder))
    assert len(made) == 1


@pytest.mark.parametrize(("module", "name"), [one[:2] for one in host._EXPECTED], ids=lambda one: one.split(".")[-1])
def test_every_method_that_we_rely_on_is_checked_by_its_arguments(module, name, monkeypatch):
    host.check_host()
    found = host._arguments
    for answer, said in ((("self", "another"), "self, another"), (None, "missing")):
        monkeypatch.setattr(
            host, "_arguments", lambda *one, answer=answer: answer if one == (module, name) else found(*one)
        )
        with pytest.raises(ConfigurationError) as refused:
            host.check_host()
        assert name in refused.value.what
        assert module in refused.value.where
        assert refused.value.found == said


def test_arguments_are_read_off_areals_methods():
    assert host._arguments("areal.trainer.rl_trainer", "PPOTrainer.train")[1] == "workflow"
    assert host._arguments("areal.trainer.rl_trainer", "PPOTrainer.nothing") is None
    assert host._arguments("areal.no_such_module", "PPOTrainer") is None


# ---- hooks and masks, in the first step ----------------------------------------------------------------------------


def test_shared_prompts_that_are_set_and_see_no_layer_stop_the_run(folder, monkeypatch):
    keys = {"metronome.attention": "shared_prompt", "metronome.shared_prompt.self_check": False}
    with ours(room.configuration(folder, keys)) as engine:
        groups = engine.compute_advantages(room.random_groups([4, 4]))
        prepare = type(engine)._prepare_mb_list

        def bypassing(self, input_):
            monkeypatch.setattr(self._sharing, "apart", True)
            return prepare(self, input_)

        monkeypatch.setattr(type(engine), "_prepare_mb_list", bypassing)
        with pytest.raises(MetronomeError, match=r"metronome\.attention is set and wasn't called"):
            engine.ppo_update(groups)


def test_a_layer_that_goes_round_the_layout_stops_the_pass(folder, monkeypatch):
    keys = {"metronome.attention": "shared_prompt", "metronome.shared_prompt.self_check": False}
    with ours(room.configuration(folder, keys)) as engine:
        inputs = Sharing.inputs

        def dropping(self, mb_item):
            found, ctx = inputs(self, mb_item)
            call = self.call
            monkeypatch.setattr(call, "layers", _Deaf())
            return found, ctx

        monkeypatch.setattr(Sharing, "inputs", dropping)
        with pytest.raises(ConfigurationError, match="went through the attention interface"):
            engine.compute_logp(room.random_groups([4, 4]))


class _Deaf(list):
    def append(self, one):
        pass


KINDS = {
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32, "num_attention_heads": 4, "max_position_embeddings": 256},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "qwen3_next": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "head_dim": 8,
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_whose_packed_rows_see_each_other_is_refused_by_name(folder, tmp_path, kind):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    named = {"vocab_size": 99, "pad_token_id": 0, "eos_token_id": 1, **sizes, **KINDS[kind]}
    config = room.configuration(tmp_path, {"actor.attn_impl": "eager"})
    for weights in (tmp_path / "model").glob("*.safetensors"):
        weights.unlink()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **named), dtype=torch.float32)
    model.save_pretrained(tmp_path / "model")
    with ours(config) as engine, pytest.raises(ConfigurationError) as refused:
        engine.compute_logp(room.random_groups([2, 2]))
    assert f"{kind}'s packed rows see each other" in str(refused.value)
    assert refused.value.where == "actor.attn_impl"


def test_packed_rows_are_looked_at_once_and_change_no_random_number(folder, monkeypatch):
    with ours(room.configuration(folder)) as engine:
        passes, model = [], engine.model.forward
        monkeypatch.setattr(
            engine.model, "forward", lambda *a, **k: passes.append(k["input_ids"].shape) or model(*a, **k)
        )
        state, training = torch.get_rng_state(), engine.model.training
        engine.compute_logp(room.random_groups([2]))
        assert passes[:2] == [(1, 16), (1, 16)]
        assert len(passes) == 3
        engine.compute_logp(room.random_groups([2]))
        assert len(passes) == 4
        assert torch.equal(torch.get_rng_state(), state)
        assert engine.model.training in (training, False)


# ---- publication, and what comes back ------------------------------------------------------------------------------


class NoVersions(room.Direct):
    async def arun_episode(self, engine, data):
        found = await super().arun_episode(engine, data)
        del found["versions"]
        return found


@pytest.mark.parametrize("mode", ["periodic", "bounded", "synchronous"])
def test_a_workflow_without_versions_is_one_error(folder, mode):
    config = room.configuration(folder, {"metronome.rollout_source": mode, "total_train_steps": 1})
    with room.trainer(config) as one, pytest.raises(ConfigurationError, match="no versions beside") as refused:
        one.train(workflow=room.workflow(config, NoVersions))
    assert refused.value.exit_code == 2


@pytest.mark.parametrize("mode", ["periodic", "bounded", None])
def test_weights_that_never_reach_the_engine_stop_the_run(folder, mode, monkeypatch):
    config = room.configuration(folder, {"metronome.rollout_source": mode} if mode else {"metronome.loss": "a3po"})
    with room.trainer(config) as one:
        monkeypatch.setattr("metronome_areal.cpu.generator.replace_weights", lambda *args, **named: None)
        with pytest.raises(MetronomeError, match="didn't reach the rollout engine"):
            one.train(workflow=room.workflow(config))


def test_a_sample_of_another_version_stops_a_period(folder):
    class Older(room.Direct):
        async def arun_episode(self, engine, data):
            found = await super().arun_episode(engine, data)
            return {**found, "versions": found["versions"] + 1}

    config = room.configuration(folder, PERIODIC)
    with room.trainer(config) as one, pytest.raises(MetronomeError, match="version"):
        one.train(workflow=room.workflow(config, Older))


def test_a_reward_that_isnt_a_number_is_one_error_under_our_loss(folder):
    config = room.configuration(folder, PERIODIC | {"metronome.loss": "a3po"})

    def nothing(*args, **named):
        return float("nan")

    with room.trainer(config) as one, pytest.raises(MetronomeError, match=r"advantages of .* isn't finite"):
        one.train(workflow=room.workflow(config, reward_fn=nothing))


def test_a_users_own_class_is_refused_as_ours_are(folder):
    with pytest.raises(ConfigurationError, match="use 'loss'"):
        room.PPOTrainer(room.configuration(folder, {"metronome.los": "ppo"}, kind=PPOConfig), train_dataset=[])
    assert json.loads((folder / "model" / "config.json").read_text())["model_type"] == "qwen2"
