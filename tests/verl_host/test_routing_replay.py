"""Routing replay is verl's own where its engines replay routes, and refused where it or a hook would have no effect.

verl 0.9.1 replays in its Megatron and VeOmni engines, which aren't run here: what is shown is that routes and the
flag reach the engine with the rows that they belong to. Beside it, what else prompts can't be shared with.
"""

import asyncio
import logging
import re
from types import SimpleNamespace

import pytest

pytest.importorskip("verl", reason="the verl adapter's tests need verl (requirements/verl.txt)")

import harness
import numpy as np
import test_versions
import torch
import workers
from test_config import POOL, composed
from test_versions import at_once  # noqa: F401  (a fixture)
from verl.utils import tensordict_utils as tu
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from metronome.a3po.options import PpoOptions
from metronome.a3po.ppo import Ppo
from metronome.errors import ConfigurationError
from metronome.shared_prompt.select import SharedPromptAttention
from metronome_verl import engine, fsdp_engine
from metronome_verl.config import arrange
from metronome_verl.limits import refuse_settings, why_separate
from metronome_verl.loss import HostLoss
from metronome_verl.worker import MetronomeWorker

ACTOR = "actor_rollout_ref.actor"
RECORDED = "actor_rollout_ref.rollout.enable_rollout_routing_replay=True"
R2, R3 = (f"{ACTOR}.megatron.router_replay.mode={mode}" for mode in ("R2", "R3"))
PERIODIC = ["+metronome.rollout_source=periodic", *POOL]
BOUNDED = ["+metronome.rollout_source=bounded", *POOL]
LAYERS, TOP = 2, 2


def arranged(*overrides):
    made = composed(*overrides)
    return made, arrange(made)


# --- at the start ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [[], BOUNDED], ids=["synchronous", "bounded"])
@pytest.mark.parametrize("replay", [[R3, RECORDED], [R2]], ids=["R3", "R2"])
def test_verls_own_replay_stays_as_it_is_without_shared_prompts(mode, replay):
    made, _ = arranged("model_engine=megatron", *mode, *replay)
    assert made.actor_rollout_ref.actor.megatron.router_replay.mode in ("R2", "R3")
    assert made.algorithm.rollout_correction.bypass_mode is False


def test_r3_stays_with_a_loss_of_ours_and_r2_whose_recording_pass_it_leaves_out_does_not():
    ours = ["model_engine=megatron", "+metronome.loss=a3po"]
    arranged(*ours, R3, RECORDED)
    with pytest.raises(ConfigurationError, match="bypass mode leaves out") as caught:
        arranged(*ours, R2)
    assert "R3" in caught.value.remedy
    arranged(*ours, R2, "+metronome.a3po.proximal=recompute")  # has that pass


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([*PERIODIC, R3, RECORDED], "over parts of a batch"),
        ([R3, RECORDED, "+metronome.attention=shared_prompt"], "no batch of the run would share a prompt"),
        ([R3], "isn't told to return them"),
    ],
)
def test_replay_that_cannot_be_is_refused_with_the_line_to_add(overrides, words):
    with pytest.raises(ConfigurationError, match=words):
        arranged("model_engine=megatron", *overrides)
    arranged("model_engine=megatron", *(one for one in overrides if one != R3))


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_engines_that_would_ignore_it_are_refused(strategy):
    with pytest.raises(ConfigurationError, match="doesn't replay routes") as caught:
        arranged(f"{ACTOR}.strategy={strategy}", f"+{ACTOR}.fsdp_config.router_replay.mode=R3")
    assert caught.value.where == f"{ACTOR}.fsdp_config.router_replay.mode"
    _, found = arranged(f"{ACTOR}.strategy={strategy}", RECORDED)  # verl has metrics of the routes
    assert any("recorded and not replayed" in note for note in found.notes)


def test_verl_says_yes_to_the_engines_that_replay_and_to_no_other():
    import inspect

    from verl.workers.engine_workers import ActorRolloutRefWorker

    source = inspect.getsource(ActorRolloutRefWorker.__init__)
    assert set(re.findall(r'actor_strategy == "(\w+)"', source)) == {"megatron", "veomni"}
    assert "router_replay" not in inspect.getsource(inspect.getmodule(FSDPEngineWithLMHead))


def test_router_losses_are_refused_in_a_period_only():
    losses = "+actor_rollout_ref.model.override_config.output_router_logits=True"
    with pytest.raises(ConfigurationError, match="router"):
        arranged(*PERIODIC, losses)
    arranged(*BOUNDED, losses)
    arranged(*PERIODIC)


# --- the way of the routes ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made():
    torch.set_num_threads(1)
    return workers.worker(use_dynamic_bsz=False)


def routed(samples):
    """A batch with routes of its own in every row: the row's number."""
    batch = samples.batch(mini_batch_size=4, epochs=1, seed=1, dataloader_kwargs={"shuffle": False})
    lengths = batch["input_ids"].offsets().diff().tolist()
    rows = [torch.full((length, LAYERS, TOP), row, dtype=torch.int16) for row, length in enumerate(lengths)]
    batch["routed_experts"] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    return batch


def actor(made, replays):
    """verl's actor worker in our class, around a training worker of ours."""
    outer = object.__new__(MetronomeWorker)
    outer.actor, outer.enable_routing_replay = made, replays
    return outer


@pytest.mark.parametrize("replays", [True, False])
@pytest.mark.parametrize("ours", [True, False], ids=["our loss", "verl's loss"])
def test_routes_and_flag_reach_the_engine_with_their_rows(made, monkeypatch, ours, replays):
    samples = workers.Samples()
    config = workers.actor_config()
    made.set_loss_fn(HostLoss(config, Ppo(PpoOptions())) if ours else workers.stock_loss(config))
    seen = []
    stock = made.engine.forward_backward_batch

    def watched(data, loss_function, forward_only=False):
        seen.append(data)
        return stock(data, loss_function, forward_only)

    monkeypatch.setattr(made.engine, "forward_backward_batch", watched)
    batch = routed(samples)
    with workers.restored(made):
        actor(made, replays).update_actor(batch)
    assert len(seen) == 2  # mini-batches
    whole = [torch.cat(pair) for pair in zip(samples.prompts, samples.responses, strict=True)]
    rows = []
    for data in seen:
        assert tu.get_non_tensor_data(data, "enable_routing_replay", False) is replays
        for ids, routes in zip(data["input_ids"].unbind(), data["routed_experts"].unbind(), strict=True):
            (row,) = routes.unique().tolist()
            assert torch.equal(ids, whole[row])
            assert routes.shape == (len(ids), LAYERS, TOP)
            rows.append(row)
    assert sorted(rows) == list(range(8))


def test_our_resuming_client_keeps_routes_over_an_interruption():
    server = test_versions.Server((3, 2, "aborted"), (4, 3, "completed"))
    answer = server.generate.remote

    async def with_routes(**request):
        output = await answer(**request)
        length = len(request["prompt_ids"]) + len(output.token_ids)
        version = output.extra_fields["global_steps"]
        output.routed_experts = np.full((length, LAYERS, TOP), version, dtype=np.int16)
        return output

    server.generate = SimpleNamespace(remote=with_routes)
    output = asyncio.run(test_versions.generate(test_versions.client(server)))
    assert output.routed_experts[:, 0, 0].tolist() == [3] * 4 + [4] * 3  # prompt of 2, then who sampled


# --- prompts that can't be shared -----------------------------------------------------------------


@pytest.mark.parametrize("way", ["images", "distillation_use_topk", "distillation_only", "enable_routing_replay"])
def test_a_batch_that_needs_separate_rows_takes_verls_own_path_and_is_named(tmp_path, monkeypatch, caplog, way):
    model = harness.save_model(tmp_path)
    with engine.building(SharedPromptAttention()):
        shared = harness.worker(model)
    batch = harness.Batch(sizes=(2,), prompt_lens=(9,))
    data = batch.data(compute_loss=False)
    if way == "images":
        data["multi_modal_inputs"] = harness.NonTensorStack({"pixel_values": torch.ones(1)}, {})
    else:
        tu.assign_non_tensor_data(data, way, True)
    reached = []

    def stock(self, data, loss_function, forward_only=False):
        reached.append((self._own_path, data))
        return {}

    monkeypatch.setattr(FSDPEngineWithLMHead, "forward_backward_batch", stock)
    with caplog.at_level(logging.WARNING, "metronome_verl.fsdp_engine"):
        for _ in range(2):
            assert shared.engine.forward_backward_batch(data, None, forward_only=True) == {}
    assert [own for own, _ in reached] == [True, True]
    assert reached[0][1] is data
    (warning,) = [one.getMessage() for one in caplog.records if one.name == "metronome_verl.fsdp_engine"]
    assert why_separate(data) in warning
    assert {"images": "multi-modal", "enable_routing_replay": "routing replay"}.get(way, "distillation") in warning
    shared.engine.forward_backward_batch(batch.data(), None, forward_only=True)
    assert reached[-1][0] is False


def vision(rotary):
    from transformers import Qwen2VLConfig

    text = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 97}
    return Qwen2VLConfig(text_config={**text, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default", **rotary}})


def test_a_model_whose_rows_all_have_positions_of_several_dimensions_is_refused_at_the_start():
    settings = SimpleNamespace(ulysses_sequence_parallel_size=1)
    model = SimpleNamespace(use_fused_kernels=False, hf_config=vision({"mrope_section": [1, 1, 2]}))
    with pytest.raises(ConfigurationError, match="several dimensions") as caught:
        refuse_settings(model, settings)
    assert caught.value.found == "qwen2_vl"
    model.hf_config = vision({})
    assert fsdp_engine.refuse_settings is refuse_settings
    refuse_settings(model, settings)  # text rows of such a model can share
