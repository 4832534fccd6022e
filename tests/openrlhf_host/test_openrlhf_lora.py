"""LoRA: engines get weights with their adapters added, under names that they know; what is published has changed."""

import pytest

pytest.importorskip("openrlhf", reason="the OpenRLHF adapter's tests need OpenRLHF (requirements/openrlhf.txt)")

import openrlhf_room  # noqa: F401  # before the imports below

# isort: split

import local_ray
import openrlhf_session
import torch
import workers
from openrlhf.trainer.ray import ppo_actor
from openrlhf_agents import AGENT
from peft import PeftModel
from transformers import AutoModelForCausalLM

from metronome.errors import ConfigurationError, MetronomeError
from metronome_openrlhf.checks import check_received
from metronome_openrlhf.cpu import assets
from metronome_openrlhf.lora import merged

LORA = {"ds__lora__rank": 4, "ds__lora__alpha": 8}
PERIODIC = {"rollout_source": "periodic"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return workers.model(tmp_path_factory.mktemp("assets")).model


def adapted(worker):
    """The worker, whose adapters aren't zero any more."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, one in worker.actor.model.module.named_parameters():
            if "lora_" in name:
                one.copy_(0.1 * torch.randn(one.shape, generator=generator))
    return worker


class Receiver:
    """A rollout engine's end, which has the base model and takes what vLLM would: weights under its own names."""

    def __init__(self, model, dtype=torch.float32):
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        self.asked, self.names = [], []

    def update_weight(self, name, dtype, shape, empty_cache=False):
        self.asked.append((name, dtype, tuple(shape)))

    def broadcast(self, weight, src, stream):
        name, dtype, shape = self.asked.pop()
        assert not self.asked
        assert weight.dtype == dtype
        assert tuple(weight.shape) == shape
        self.names.append(name)
        with torch.no_grad():
            self.model.get_parameter(name).copy_(weight)


def publish(worker, receivers, patch):
    """OpenRLHF's own broadcast to several engines."""
    patch(ppo_actor, "ray", local_ray)
    worker.trainer.vllm_engines = [local_ray.Handle(one) for one in receivers]

    class Group:
        def broadcast(self, weight, src, stream):
            for one in receivers:
                one.broadcast(weight, src, stream)

    worker.trainer._model_update_group = Group()
    worker.trainer.broadcast_to_vllm()


TOKENS = torch.randint(3, 97, (4, 20), generator=torch.Generator().manual_seed(0))


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits.float()


def test_openrlhf_sends_names_that_no_engine_knows(model, monkeypatch):
    worker = workers.stock(workers.arguments(**LORA), model)
    with pytest.raises(AttributeError):
        publish(worker, [Receiver(model)], monkeypatch.setattr)


def test_engines_get_weights_with_the_adapters_added_under_the_base_models_names(model, monkeypatch):
    worker = adapted(workers.policy(workers.arguments(PERIODIC, **LORA), model))
    receivers = [Receiver(model), Receiver(model)]
    publish(worker, receivers, monkeypatch.setattr)
    for one in receivers:
        assert len(one.names) == len(set(one.names)) == 2 * 7  # of each layer q, k, v, o, gate, up, down
        assert "model.layers.1.mlp.down_proj.weight" in one.names
        found, wanted = logits(one.model), logits(worker.actor.model.module)
        assert (found - wanted).abs().max() < 2e-5
        assert (found - logits(Receiver(model).model)).abs().max() > 0.1  # without the adapters
    plain = Receiver(model).model.get_parameter("model.layers.0.self_attn.v_proj.weight")
    layer = worker.actor.model.module.get_base_model().model.layers[0].self_attn.v_proj
    expected = plain + 8 / 4 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    assert torch.allclose(receivers[0].model.get_parameter("model.layers.0.self_attn.v_proj.weight"), expected)


def test_the_trained_model_stays_as_it_was(model, monkeypatch):
    worker = adapted(workers.policy(workers.arguments(PERIODIC, **LORA), model))
    before = {name: one.detach().clone() for name, one in worker.actor.model.module.named_parameters()}
    actor = worker.trainer.actor
    publish(worker, [Receiver(model)], monkeypatch.setattr)
    assert worker.trainer.actor is actor
    for name, one in worker.actor.model.module.named_parameters():
        assert torch.equal(one, before[name])
    monkeypatch.setattr(worker.trainer, "vllm_engines", [])
    monkeypatch.setattr(worker.trainer._model_update_group, "broadcast", None, raising=False)
    with pytest.raises(TypeError):
        worker.trainer.broadcast_to_vllm()
    assert worker.trainer.actor is actor


def test_sums_are_formed_in_float32_and_rounded_once(model, monkeypatch):
    worker = adapted(workers.policy(workers.arguments(PERIODIC, fp32=False, **LORA), model))
    receiver = Receiver(model, torch.bfloat16)
    publish(worker, [receiver], monkeypatch.setattr)
    layer = worker.actor.model.module.get_base_model().model.layers[1].mlp.up_proj
    up, down = layer.lora_B["default"].weight, layer.lora_A["default"].weight
    assert up.dtype == down.dtype == torch.bfloat16
    expected = layer.base_layer.weight.float() + 2 * up.float() @ down.float()
    assert torch.equal(receiver.model.get_parameter("model.layers.1.mlp.up_proj.weight"), expected.bfloat16())


def test_a_step_changes_what_is_published_and_nothing_else_of_the_model(model, monkeypatch):
    worker = workers.policy(workers.arguments(PERIODIC, actor__adam__lr=1e-2, **LORA), model)
    receiver, sums = Receiver(model), []
    for _ in range(3):
        publish(worker, [receiver], monkeypatch.setattr)
        sums.append(float(sum(one.detach().double().abs().sum() for one in receiver.model.parameters())))
        batch = workers.groups()
        worker.metronome_accumulate([workers.together(group) for group in batch], 16, 0.0)
        status = worker.metronome_step(16)
        assert status["metronome/weights/changed"] == 1
    check_received(sums[:1], sums[1:2], True, "step 1")
    check_received(sums[1:2], sums[2:3], True, "step 2")
    with pytest.raises(MetronomeError, match="didn't reach the rollout engines") as found:
        check_received(sums[:1], sums[:1], True, "step 1")
    assert "--ds.lora.rank" in str(found.value)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for name, one in base.named_parameters():
        assert torch.equal(receiver.model.get_parameter(name), one) != (name in receiver.names)


def test_parts_give_openrlhfs_own_gradient_of_the_adapters(model):
    batch = workers.groups((2, 3, 5, 6))
    stock = adapted(workers.stock(workers.arguments(**LORA), model))
    workers.whole_step(stock, batch)
    theirs = workers.moments(stock)
    assert theirs.abs().max() > 0

    def difference(expected):
        worker = adapted(workers.policy(workers.arguments(PERIODIC, **LORA), model))
        for group in batch:
            cut = [workers.together(group[at : at + 2]) for at in range(0, len(group), 2)]
            worker.metronome_accumulate(cut, expected, 0.0)
        worker.metronome_step(16)
        return float((workers.moments(worker) - theirs).norm() / theirs.norm())

    assert difference(16) < 2e-6
    assert difference(32) < 2e-6  # a batch of which half came
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("metronome_openrlhf.update._scaled_step", lambda engine, factor: engine.step())
        assert difference(16) > 0.01


def test_an_adapter_that_cant_be_added_is_refused_before_anything_is_generated(model):
    with pytest.raises(ConfigurationError, match="isn't a plain LoRA of a linear layer") as found:
        workers.policy(workers.arguments(PERIODIC, ds__lora__target_modules=["embed_tokens"], **LORA), model)
    assert found.value.where == "--ds.lora.target_modules"
    worker = workers.policy(workers.arguments(PERIODIC, ds__lora__target_modules=["q_proj"], **LORA), model)
    assert [name for name, _ in merged(worker.actor.model.module)] == [
        f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(2)
    ]


@pytest.mark.parametrize("block", [{}, PERIODIC, {"rollout_source": "bounded"}, {"loss": "a3po"}])
@pytest.mark.parametrize(
    "flags",
    [{"ds__zero_stage": 3}, {"ds__tensor_parallel_size": 2}, {"ds__load_in_4bit": True}],
)
def test_weights_that_no_rank_holds_whole_are_refused_with_lora_in_every_mode(block, flags):
    (flag,) = (f"--{name.replace('__', '.')}" for name in flags)
    with pytest.raises(ConfigurationError, match="adapters added to whole weights") as found:
        workers.arguments({"loss": "ppo", **block}, **LORA, **flags)
    assert found.value.where == flag
    assert flag in found.value.remedy


# --- the whole run --------------------------------------------------------------------------------------


def moved(base, adapters):
    """Mean over random tokens of KL(base, base with adapters)."""
    first = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    a = logits(first).log_softmax(-1)
    b = logits(PeftModel.from_pretrained(first, adapters)).log_softmax(-1)
    return float((a.exp() * (a - b)).sum(-1).mean())


def test_real_vllm_samples_from_the_adapted_policy_in_turns_of_an_agent_over_shared_prompts(tmp_path):
    tiny = assets.make(tmp_path / "assets")
    agent = tmp_path / "agent.py"
    agent.write_text(AGENT)
    flags = [
        *("--train.agent_func_path", str(agent), "--data.max_len", "96", "--data.max_samples", "16"),
        *("--ds.lora.rank", "4", "--actor.adam.lr", "1e-2", "--metronome.rollout_source", "periodic"),
        *("--metronome.loss", "a3po", "--metronome.attention", "shared_prompt"),
    ]
    found = openrlhf_session.run(["--metronome.cpu", *openrlhf_session.stock(tiny, tmp_path), *flags])
    assert found.returncode == 0, found.tail()
    assert [one["step"] for one in found.steps] == [1, 2, 3, 4]
    for one in found.steps:
        assert one["metronome/weights/changed"] == 1
        assert one["turns"] > 2
        assert one["fed"] > 1
        assert one["metronome/periodic/rows"] == 16
        assert one["metronome/periodic/tokens"] == pytest.approx(one["sampled"] * 16)  # what was fed back isn't trained
        assert one["metronome/attention/tokens_fed"] < one["metronome/attention/tokens_separate"]
        assert one["metronome/loss/version_unknown"] == one["metronome/loss/staleness_max"] == 0
        # The engines' policy is the one in training, to bfloat16 in two implementations.
        assert abs(one["metronome/loss/approx_kl"]) < 2e-3
    # A stale engine would show: the policy has moved further than that in four steps.
    assert moved(tiny.model, tmp_path / "trained") > 0.05
