"""LoRA: only the adapter is trained, and what a rollout pool gets holds it; on verl's real workers, without Ray."""

import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("verl", reason="the verl adapter's tests need verl (requirements/verl.txt)")
pytest.importorskip("transfer_queue", reason="verl's V1 trainer needs TransferQueue (requirements/verl.txt)")

import torch
import workers
from omegaconf import OmegaConf
from test_config import POOL, arranged
from test_cpu_transport import Local, Stored
from test_worker import SPLITS, close, stock, streamed
from transformers import AutoModelForCausalLM
from verl.workers.config import RolloutConfig

from metronome.errors import ConfigurationError, MetronomeError, WorkerFailed
from metronome_verl import cpu
from metronome_verl import worker as module
from metronome_verl.config import WorkerPart
from metronome_verl.cpu import transport
from metronome_verl.cpu.replica import ServerAdapter
from metronome_verl.cpu.server import HFServer
from metronome_verl.weights import Movement, Publication
from metronome_verl.worker import MetronomeWorker

PROMPT, RESPONSE = [5, 6, 7, 8], [40, 41, 42, 43, 44]


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def store(monkeypatch):
    """Ray's object store in this process."""
    monkeypatch.setattr(transport.ray, "put", Stored)


def actor(monkeypatch, merge, part=None, **options):
    """Our actor worker around a fresh training worker with an adapter whose B isn't zero, and a rollout server."""
    made = object.__new__(MetronomeWorker)
    made.config = OmegaConf.create(
        {
            "actor": {"strategy": "fsdp2"},
            "rollout": {"response_length": 16, "checkpoint_engine": {"backend": cpu.TRANSPORT}},
        }
    )
    made.role, made.distillation_enabled, made.actor = "actor", False, None

    def init_model(self):
        self.actor = workers.worker(model_options={**workers.LORA, "lora": {"merge": merge}}, **options)
        self.actor.set_loss_fn(workers.stock_loss(workers.actor_config()))

    monkeypatch.setattr(module.DetachActorWorker, "init_model", init_model)
    monkeypatch.setattr(module, "worker_part", lambda _: part or WorkerPart("periodic", None, None))
    made.init_model()
    workers.fill(made.actor, 0.3)
    return made


def trained(made):
    """One step of a period; returns its metrics."""
    made.actor.accumulate(workers.Samples().batch())
    return made.actor.step()


def a_server():
    config = RolloutConfig(name=cpu.ROLLOUT, tensor_model_parallel_size=1, prompt_length=64, response_length=12)
    return HFServer(config, OmegaConf.create({"path": workers.model_folder()}))


def publish(made, version, server=None):
    """verl's own publication: the worker's ``update_weights``, our transport, our adapter, the server if there is one.

    Returns the sender's metrics and the names that arrived.
    """
    sender, receiver = (transport.RayTransport(1 << 20, master) for master in (True, False))
    board = Local(transport.WeightBoard())
    for end in (sender, receiver):
        end.init_process_group(board)
    made.checkpoint_engine = sender
    adapter, arrived = object.__new__(ServerAdapter), []
    adapter._server = Local(server)

    async def received():
        async for name, tensor in receiver.receive_weights(version):
            arrived.append(name)
            yield name, tensor

    async def drained():
        return [name async for name, _ in received()]

    async def both():
        taken = drained() if server is None else adapter.update_weights(received(), global_steps=version)
        ends = await asyncio.gather(made.update_weights(global_steps=version), taken, return_exceptions=True)
        for end in ends:
            if isinstance(end, BaseException):
                raise end
        return ends[0], arrived

    return asyncio.run(asyncio.wait_for(both(), 60))


def log_probs(model):
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([PROMPT + RESPONSE])).logits[0]
    picked = torch.log_softmax(logits.float()[len(PROMPT) - 1 : -1], -1)
    return picked.gather(-1, torch.tensor(RESPONSE)[:, None])[:, 0]


def trainer_log_probs(made):
    """The trainer's own, by verl's ``infer_batch``."""
    samples = workers.Samples()
    samples.prompts, samples.responses = [torch.tensor(PROMPT)], [torch.tensor(RESPONSE)]
    for name in ("masks", "advantages", "behavior", "old", "reference"):
        setattr(samples, name, [torch.ones(len(RESPONSE), dtype=torch.long if name == "masks" else torch.float)])
    out = made.actor.infer_batch(samples.batch([0], compute_loss=False))
    return out["log_probs"].unbind()[0][len(PROMPT) - 1 : -1]


def merged(made):
    """Base plus adapter, rounded as verl rounds what it publishes, in a model of its own."""
    model = AutoModelForCausalLM.from_pretrained(workers.model_folder(), dtype=torch.float32)
    model.load_state_dict({name: value.bfloat16() for name, value in workers.merged(made.actor).items()})
    return model


def test_the_server_computes_with_the_adapter_that_was_published(monkeypatch, store):
    made, server = actor(monkeypatch, merge=True), a_server()
    plain = log_probs(server._model)
    for version in (0, 1):
        if version:
            assert trained(made)["metronome/weights/changed"] == 1
        metrics, arrived = publish(made, version, server)
        assert sorted(arrived) == sorted(server._model.state_dict())
        assert metrics["metronome_ray/tensors"] == len(arrived)
        assert server._version == version
        found = log_probs(server._model)
        torch.testing.assert_close(found, log_probs(merged(made)), rtol=0, atol=1e-5)
        # The trainer computes in float32 with adapter apart; verl rounds the sum to bfloat16 on its way.
        rounded = float((found - trainer_log_probs(made)).abs().max())
        assert rounded < 0.03
        assert float((found - plain).abs().max()) > 10 * rounded  # without the adapter, or of the version before
        plain = found


def test_a_publication_that_leaves_the_adapter_out_stops_the_run(monkeypatch, store):
    """What verl 0.9.1 does where a rollout pool of its own meets lora.merge=False."""
    made = actor(monkeypatch, merge=False)
    _, arrived = publish(made, 0)
    assert not any("lora" in name for name in arrived)
    assert trained(made)["metronome/weights/changed"] == 1  # the trainer's own weights did move
    with pytest.raises(MetronomeError, match=r"published is what was published before[^$]*merge=True"):
        publish(made, 1)
    with pytest.raises(WorkerFailed, match=r"don't fit the model[^$]*merge=True"):
        publish(actor(monkeypatch, merge=False), 0, a_server())  # the CPU room says it at once


def test_a_step_too_small_for_bfloat16_stops_the_run(monkeypatch, store):
    made = actor(monkeypatch, merge=True, lr=1e-9)
    workers.fill(made.actor, 1e-7)
    publish(made, 0)
    assert trained(made)["metronome/weights/changed"] == 1
    with pytest.raises(MetronomeError, match=r"published is what was published before[^$]*rounds"):
        publish(made, 1)


def test_publishing_twice_without_a_step_is_fine_and_each_kind_is_held_against_its_own():
    movement = Movement()
    weights = {"a": torch.arange(4.0)}
    publication = Publication(lambda base_sync_done=False: (iter(weights.items()), None), movement)

    def send(**options):
        return [name for name, _ in publication(**options)[0]]

    assert send() == send() == ["a"]
    movement.moves += 1
    assert send(base_sync_done=True) == ["a"]
    with pytest.raises(MetronomeError, match="1 tensors, every one bit for bit"):
        send()
    weights["a"] = weights["a"] + 1
    movement.moves += 1
    assert send() == ["a"]


def test_movement_looks_at_the_adapter_alone(monkeypatch):
    made = actor(monkeypatch, merge=True)
    parameters = dict(made.actor.engine.module.named_parameters())
    assert {name for name, p in parameters.items() if p.requires_grad} == {n for n in parameters if "lora_" in n}
    assert trained(made)["metronome/weights/changed"] == 1

    def base_only(*_, **__):
        with torch.no_grad():
            next(p for n, p in parameters.items() if "lora_" not in n).add_(1.0)

    monkeypatch.setattr(made.actor.engine.optimizer, "step", base_only)
    assert trained(made)["metronome/weights/changed"] == 0


def test_publishing_leaves_the_trained_weights_and_a_half_done_period_as_they_were(monkeypatch, store):
    made = actor(monkeypatch, merge=True)
    before = workers.weights(made.actor)
    made.actor.accumulate(workers.Samples().batch())
    raw = workers.gradient(made.actor)
    publish(made, 0)
    assert torch.equal(workers.weights(made.actor), before)
    assert torch.equal(workers.gradient(made.actor), raw)


def test_parts_with_an_adapter_and_shared_prompts_have_the_stock_gradient(monkeypatch):
    from metronome.shared_prompt.reference import ReferenceBackend

    samples = workers.Samples()
    for first, other in ((0, 1), (2, 3), (4, 5), (6, 7)):
        samples.prompts[other] = samples.prompts[first]
    loss = workers.stock_loss(workers.actor_config(entropy_coeff=0.05, use_kl_loss=True, kl_loss_coef=0.1))
    made = actor(monkeypatch, merge=True, part=WorkerPart("periodic", None, ReferenceBackend()))
    apart = workers.worker(model_options={**workers.LORA, "lora": {"merge": True}})
    with torch.no_grad():
        for theirs, ours in zip(apart.engine.module.parameters(), made.actor.engine.module.parameters(), strict=True):
            theirs.copy_(ours)
    wanted, theirs, _ = stock(apart, samples, loss)
    gradient, found, _ = streamed(made.actor, samples, loss, [[4, 5], [0, 1, 6, 7], [2, 3]])
    assert close(gradient, wanted, 1e-5)
    assert found["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
    assert found["metronome/attention/tokens_fed"] < found["metronome/attention/tokens_separate"]
    workers.fill(made.actor, 0.0)
    assert not close(streamed(made.actor, samples, loss, SPLITS[1])[0], wanted, 0.1)  # the adapter is in it


# --- configuration ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["periodic", "bounded"])
@pytest.mark.parametrize("key", ["lora_rank=4", "lora.rank=4"])
def test_a_rollout_pool_of_its_own_gets_merged_weights_and_that_is_said(mode, key):
    ours = [f"+metronome.rollout_source={mode}", *POOL]
    config, found = arranged(*ours, f"actor_rollout_ref.model.{key}")
    assert config.actor_rollout_ref.model.lora.merge is True
    assert any("lora.merge=True" in note and "without the adapter" in note for note in found.notes)
    config, found = arranged(*ours)
    assert config.actor_rollout_ref.model.lora.merge is False


def test_where_verl_hands_the_adapter_over_itself_it_stays_apart():
    config, _ = arranged("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.rollout.name=vllm")
    assert config.actor_rollout_ref.model.lora.merge is False
    config, found = arranged("actor_rollout_ref.model.lora_rank=4", f"actor_rollout_ref.rollout.name={cpu.ROLLOUT}")
    assert config.actor_rollout_ref.model.lora.merge is True
    assert any("takes merged weights" in note for note in found.notes)


def test_the_cpu_room_refuses_an_adapter_apart():
    adapter = object.__new__(ServerAdapter)
    with pytest.raises(ConfigurationError, match=r"takes merged weights[^$]*lora\.merge=True"):
        asyncio.run(adapter.update_weights(iter([]), peft_config=SimpleNamespace(r=4)))
