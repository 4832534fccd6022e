"""The CPU room: AReaL's own loop over an engine in its process."""

import asyncio
import copy
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("areal", reason="the AReaL adapter's tests need AReaL (requirements/areal.txt)")

import areal_room as room
import torch
from areal.api import ModelRequest
from areal.api.cli_args import GenerationHyperparameters
from areal.infra.utils.concurrent import get_executor
from areal.utils import name_resolve, names
from safetensors.torch import load_file

from metronome.decoding.batch import Row
from metronome.decoding.sampling import Sampling
from metronome.errors import ConfigurationError, MetronomeError, WorkerFailed
from metronome_areal.cpu import assets, prepare
from metronome_areal.cpu.arguments import arrange
from metronome_areal.cpu.generator import Generator
from metronome_areal.cpu.weights import gathered, merged


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("room")
    assets.make(found)
    return found


@pytest.fixture(scope="module")
def held(folder):
    """A trainer between its steps. Tests with a trainer of their own come before it, as a process has one at a time."""
    with room.trainer(room.configuration(folder)) as one:
        yield one


def request(prompt, **named):
    sampling = {"max_new_tokens": 12, "stop_token_ids": list(room.ENDS), **named}
    return ModelRequest(input_ids=list(prompt), gconfig=GenerationHyperparameters(**sampling))


def ask(engine, *requests):
    async def all_of_them():
        return await asyncio.gather(*(engine.agenerate(one) for one in requests))

    return asyncio.run(all_of_them())


def afresh(engine):
    """Forgets which prompts were seen, so that they are sampled as the first time."""
    engine._seen.clear()


@torch.no_grad()
def log_probs(model, prompt, response):
    logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(response)[:, None])[:, 0]


PROMPT = [5, 6, 7]
SAMPLING = Sampling(1.0, -1, 1.0, 12, frozenset())


class Watched(room.PPOTrainer):
    """Notes every batch with the actor's log-probs of it, before and after the update."""

    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        self.seen, self.stats = [], []
        prepare_batch, commit = self.actor.prepare_batch, self.stats_logger.commit

        def noted(*args, **named):
            batch = prepare_batch(*args, **named)
            self.seen.append((batch, self.actor.compute_logp(batch), self.rollout.get_version()))
            return batch

        def kept(*args):
            self.stats.append(args[-1])
            commit(*args)

        self.actor.prepare_batch, self.stats_logger.commit = noted, kept


def worst(batch, actors):
    """The largest difference of the engine's log-probs from the actor's, which stand a token earlier."""
    found = []
    for group, theirs in zip(batch, actors, strict=True):
        mask = group["loss_mask"][:, 1:].bool()
        found.append((group["logprobs"][:, 1:] - theirs[:, :-1])[mask].abs().max())
    return float(max(found))


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"tie": True},
        {"actor.use_lora": True, "actor.lora_rank": 4, "actor.lora_alpha": 8, "rollout.use_lora": True},
    ],
    ids=["own head", "tied embeddings", "lora"],
)
def test_areals_own_loop_trains_and_each_publication_reaches_the_engine(tmp_path, keys):
    keys = dict(keys)
    assets.make(tmp_path, tie=keys.pop("tie", False))
    with room.trainer(room.configuration(tmp_path, keys), Watched) as one:
        one.train(workflow=room.workflow(one.config))
        assert [version for _, _, version in one.seen] == [0, 1]
        for version, (batch, theirs, _) in enumerate(one.seen):
            assert len(batch) == 4
            assert all((group["versions"][group["loss_mask"].bool()] == version).all() for group in batch)
            assert worst(batch, theirs) < 1e-5
        assert all(stats["ppo_actor/update/grad_norm"] > 0 for stats in one.stats)
        first, *_ = one.seen[0]
        assert worst(first, one.actor.compute_logp(first)) > 1e-3  # other weights, other log-probs
        assert one.rollout.get_version() == one.eval_rollout.get_version() == one.rollout.generator.version == 2


def test_a_paused_response_goes_on_under_the_next_version(folder):
    keys = {"gconfig.max_new_tokens": 16, "gconfig.min_new_tokens": 16}
    with room.trainer(room.configuration(folder, keys)) as one:
        engine, generator = one.rollout, one.rollout.generator
        before = copy.deepcopy(generator._model)
        generator.least_seconds = 0.03
        data = room.dataset(folder)[0]
        engine.submit(data, room.workflow(one.config), group_size=2)
        while not generator._batch.rows or len(generator._batch.rows[0].tokens) < 5:
            time.sleep(0.01)
        engine.pause()
        with torch.no_grad():
            for parameter in one.actor.model.parameters():
                parameter.mul_(1.1)
        one.actor.update_weights(one.weight_update_meta.with_version(1))
        engine.set_version(1)
        engine.resume()
        (group,) = engine.wait(1, timeout=30)
        for row in range(2):
            length = int((~group["loss_mask"][row].bool()).sum())
            ids = group["input_ids"][row].tolist()
            versions = group["versions"][row, length:]
            fresh = versions == 1
            assert len(versions) == 16
            assert 0 < (versions == 0).sum() < 16
            assert fresh[-1]
            assert (fresh[1:] >= fresh[:-1]).all()
            noted = group["logprobs"][row, length:]
            # min_new_tokens takes the end tokens out of the distribution that was sampled from.
            old, new = (without_ends(model, ids[:length], ids[length:]) for model in (before, generator._model))
            torch.testing.assert_close(noted, torch.where(fresh, new, old), atol=1e-5, rtol=0)
            assert (noted - old)[fresh].abs().max() > 1e-2


@torch.no_grad()
def without_ends(model, prompt, response):
    logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
    logits[:, list(room.ENDS)] = -torch.inf
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(response)[:, None])[:, 0]


def test_a_pause_without_new_weights_changes_no_response(held):
    requests = [request(PROMPT, max_new_tokens=10, min_new_tokens=10) for _ in range(3)]
    afresh(held.rollout)
    whole = ask(held.rollout, *requests)
    afresh(held.rollout)
    generator, passes = held.rollout.generator, []

    async def interrupted():
        tasks = [asyncio.create_task(held.rollout.agenerate(one)) for one in requests]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0.02)
            await asyncio.to_thread(held.rollout.pause_generation)
            passes.append(len(generator._batch.rows))
            held.rollout.continue_generation()
        return [task.result() for task in tasks]

    generator.least_seconds = 0.01
    found = asyncio.run(interrupted())
    generator.least_seconds = 0.0
    assert len(passes) > 2
    assert not any(passes)
    for one, other in zip(found, whole, strict=True):
        assert one.output_tokens == other.output_tokens
        assert one.output_logprobs == pytest.approx(other.output_logprobs, abs=1e-5)


def test_members_differ_and_neighbours_and_arrival_dont_matter(held):
    prompts = [PROMPT, PROMPT, [9], [30, 31, 32, 33, 34, 35]]
    afresh(held.rollout)
    together = ask(held.rollout, *map(request, prompts))
    afresh(held.rollout)
    alone = {number: ask(held.rollout, request(prompts[number]))[0] for number in (3, 0, 2, 1)}
    assert [one.output_tokens for one in together] == [alone[number].output_tokens for number in range(4)]
    assert together[0].output_tokens != together[1].output_tokens
    for one in together:
        theirs = log_probs(held.rollout.generator._model, one.input_tokens, one.output_tokens)
        assert one.output_logprobs == pytest.approx(theirs.tolist(), abs=1e-5)


def test_temperature_is_in_the_log_probs_that_come_back(held):
    (found,) = ask(held.rollout, request(PROMPT, temperature=0.5))
    model = held.rollout.generator._model
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPT, *found.output_tokens]])).logits[0, 2:-1]
    ids = torch.tensor(found.output_tokens)[:, None]
    sharper = torch.log_softmax(logits / 0.5, -1).gather(1, ids)[:, 0].tolist()
    plain = torch.log_softmax(logits, -1).gather(1, ids)[:, 0].tolist()
    assert found.output_logprobs == pytest.approx(sharper, abs=1e-5)
    assert found.output_logprobs != pytest.approx(plain, abs=1e-2)


def test_responses_end_where_areal_says(held):
    (free,) = ask(held.rollout, request(PROMPT, greedy=True, stop_token_ids=[]))
    tokens = free.output_tokens
    theirs = held.rollout.generator._model.generate(
        torch.tensor([PROMPT]), attention_mask=torch.ones(1, 3), do_sample=False, max_new_tokens=12
    )
    assert tokens == theirs[0, 3:].tolist()
    assert len(tokens) == 12
    assert free.stop_reason == "length"
    stop = next(token for token in tokens if token != tokens[0])
    place = tokens.index(stop)
    (stopped,) = ask(held.rollout, request(PROMPT, greedy=True, stop_token_ids=[stop]))
    assert stopped.output_tokens == tokens[: place + 1]
    assert stopped.stop_reason == "stop"
    least = place + 3
    (longer,) = ask(held.rollout, request(PROMPT, greedy=True, stop_token_ids=[stop], min_new_tokens=least))
    assert longer.output_len >= least
    assert stop not in longer.output_tokens[:least]
    (short,) = ask(held.rollout, request(PROMPT, max_tokens=len(PROMPT) + 2, min_new_tokens=2))
    assert short.output_len == 2
    assert short.stop_reason == "length"


def test_the_evaluations_engine_shares_the_weights_and_goes_on_while_the_other_is_paused(held):
    evaluation, training = held.eval_rollout, held.rollout
    assert evaluation.generator is training.generator
    afresh(training)
    afresh(evaluation)
    ours, theirs = ask(training, request(PROMPT)), ask(evaluation, request(PROMPT))
    assert ours[0].output_tokens != theirs[0].output_tokens  # numbers of its own: training's stay as they are
    training.pause()
    data = room.dataset(Path(held.config.actor.path).parent)[1]
    evaluation.submit(data, room.workflow(held.config), group_size=2, is_eval=True)
    (group,) = evaluation.wait(1, timeout=30)
    assert group["input_ids"].shape[0] == 2
    training.resume()
    evaluation.export_stats()
    evaluation.save_perf_tracer(step=0)


def test_requests_that_the_room_cant_honour_are_refused(held):
    for named in ({"stop": ["x"]}, {"frequency_penalty": 0.5}, {"use_beam_search": True}, {"n_samples": 2}):
        with pytest.raises(ConfigurationError, match=next(iter(named))):
            ask(held.rollout, request(PROMPT, **named))
    with pytest.raises(ConfigurationError, match="no room"):
        ask(held.rollout, request(PROMPT, max_tokens=3))


def test_a_failing_model_fails_its_requests_and_not_the_engine(held, monkeypatch):
    generator = held.rollout.generator
    monkeypatch.setattr(generator._batch, "advance", lambda *_: 1 / 0)
    with pytest.raises(WorkerFailed, match="division"):
        ask(held.rollout, request(PROMPT))
    monkeypatch.undo()
    assert ask(held.rollout, request(PROMPT))[0].output_len


def test_weights_that_dont_fit_are_refused_and_none_is_taken(held):
    generator = held.rollout.generator
    before = {name: value.clone() for name, value in generator._model.state_dict().items()}
    named = {name: value + 1 for name, value in before.items()}
    named.popitem()
    with pytest.raises(WorkerFailed, match="missing"):
        generator.replace(named, 9)
    assert generator.version != 9
    torch.testing.assert_close(generator._model.state_dict(), before, atol=0, rtol=0)


class Server:
    """What the trainer sees of an inference server: it loads what AReaL saved, once AReaL says so."""

    def __init__(self, config, version):
        self.name = names.update_weights_from_disk(config.experiment_name, config.trial_name, version)
        self.calls = []

    def update_weights_from_disk(self, meta):
        self.calls.append("update")
        return get_executor().submit(self.load, meta)

    def load(self, meta):
        name_resolve.wait(self.name, timeout=30)
        self.weights = load_file(Path(meta.path) / "model.safetensors")

    def pause_generation(self):
        self.calls.append("pause")

    def continue_generation(self):
        self.calls.append("continue")


def test_a_server_gets_its_weights_as_areal_sends_them(held):
    server = Server(held.config, held.actor.get_version())
    meta = held.weight_update_meta.with_version(1)
    held.actor.connect_engine(server, meta)
    held.actor.update_weights(meta)
    held.actor.connect_engine(held.rollout, meta)
    assert server.calls == ["pause", "update", "continue"]
    for name, value in gathered(held.actor).items():
        torch.testing.assert_close(server.weights[name], value, atol=0, rtol=0)


def test_a_stopped_generator_cancels_what_runs_and_answers_with_an_error(held):
    generator = Generator(held.rollout.generator._model, frozenset(), 512)
    generator.pause()

    async def stopped():
        running = asyncio.create_task(generator.run(Row("r", PROMPT, SAMPLING, torch.Generator())))
        await asyncio.sleep(0)
        await asyncio.to_thread(generator.stop)
        with pytest.raises(asyncio.CancelledError):
            await running
        with pytest.raises(MetronomeError, match="destroyed"):
            await generator.run(Row("r", PROMPT, SAMPLING, torch.Generator()))

    asyncio.run(stopped())


def test_loras_product_is_added_under_the_base_models_name():
    draw = torch.Generator().manual_seed(0)
    shapes = {"base_layer.weight": (4, 3), "lora_A.default.weight": (2, 3), "lora_B.default.weight": (4, 2)}
    full = {f"base_model.model.q.{name}": torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    full["base_model.model.norm.weight"] = torch.ones(3)
    found = merged(full, 0.5)
    assert set(found) == {"q.weight", "norm.weight"}
    base, a, b, _ = full.values()
    torch.testing.assert_close(found["q.weight"], base + 0.5 * (b @ a))


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"actor.backend": "megatron:d1"}, "actor.backend"),
        ({"actor.backend": "archon:d1"}, "actor.backend"),
        ({"actor.backend": "fsdp:d1t2"}, "actor.backend"),
        ({"actor.enable_tree_training": True}, "actor.enable_tree_training"),
        ({"actor.use_kernels": True}, "actor.use_kernels"),
        ({"actor.offload": True}, "actor.offload"),
        ({"enable_offload": True}, "enable_offload"),
        ({"actor.fsdp.offload_params": True}, "actor.fsdp.offload_params"),
        ({"actor.fsdp.per_layer_optim_step": True}, "actor.fsdp.per_layer_optim_step"),
        ({"rollout.scheduling_strategy.type": "colocation"}, "rollout.scheduling_strategy.type"),
        ({"rollout.return_routed_experts": True}, "rollout.return_routed_experts"),
        ({"rollout.agent.mode": "online"}, "rollout.agent.mode"),
        ({"gconfig.stop": ["x"]}, "gconfig.stop"),
        ({"gconfig.frequency_penalty": 0.5}, "gconfig.frequency_penalty"),
        ({"gconfig.use_beam_search": True}, "gconfig.use_beam_search"),
        ({"memory_profiler.profile_steps": [1]}, "memory_profiler"),
        ({"teacher.rollout.backend": "vllm:d1", "teacher.path": "x"}, "teacher.engine_type"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_needs_an_accelerator_or_a_server_is_refused_by_its_key(folder, keys, named):
    with pytest.raises(ConfigurationError) as refused:
        arrange(room.configuration(folder, keys))
    assert refused.value.where == named


def test_what_a_cpu_needs_is_set_and_said(folder):
    keys = {"actor.backend": "fsdp:d4", "actor.attn_impl": "flash_attention_2", "actor.dtype": "bfloat16"}
    config = room.configuration(folder, keys | {"actor.weight_update_mode": "xccl"})
    notes = "\n".join(arrange(config))
    for key, value in (("backend", "fsdp:d1"), ("attn_impl", "sdpa"), ("dtype", "float32")):
        assert getattr(config.actor, key) == value
        assert f"actor.{key}={value}" in notes
    assert config.actor.weight_update_mode == "disk"
    assert "actor.weight_update_mode=disk" in notes
    assert arrange(config) == []  # said once


def test_without_torchrun_the_process_is_a_rank_of_its_own(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "AREAL_SPMD_MODE"):
        monkeypatch.delenv(name, raising=False)
    prepare()
    assert os.environ["AREAL_SPMD_MODE"] == "1"
    assert os.environ["TORCHDYNAMO_DISABLE"] == "1"
    assert [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")] == ["0", "1", "0"]
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_PORT", "1234")):
        monkeypatch.setenv(name, value)
    prepare()
    assert os.environ["RANK"] == "1"
    assert os.environ["MASTER_PORT"] == "1234"


def test_two_ranks_generate_with_the_weights_that_they_train_together(tmp_path):
    script = Path(__file__).with_name("areal_room_two_ranks.py")
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    run = subprocess.run(
        [*launch, str(script), str(tmp_path)], capture_output=True, text=True, timeout=240, env=environment
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    assert run.stdout.count("both steps seen") == 2
