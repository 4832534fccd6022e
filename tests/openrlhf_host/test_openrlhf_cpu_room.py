"""The CPU room in this process: what stands in for CUDA, and real vLLM with our rollout engine, without Ray."""

import asyncio
import os
import socket
import threading
from copy import deepcopy

import pytest

pytest.importorskip("openrlhf", reason="the OpenRLHF adapter's tests need OpenRLHF (requirements/openrlhf.txt)")

import openrlhf_room  # noqa: F401  (attaches the CPU room)
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import is_flash_attn_2_available

from metronome.errors import ConfigurationError, MetronomeError, VersionMismatch
from metronome_openrlhf.cpu import assets
from metronome_openrlhf.cpu.patches import PATCHES
from metronome_openrlhf.cpu.transport import StoreGroup
from metronome_openrlhf.spans import SPANS
from metronome_patches.ledger import applied

LONG = 300
"""Tokens of a sample that is still being generated when it is interrupted."""

AGENT = """
import asyncio
import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

ENVIRONMENT = asyncio.Event()


class Instance(AgentInstanceBase):
    def __init__(self):
        self.turns = 0

    async def reset(self, states, **named):
        return {"observation": states["observation"]}

    async def step(self, states, **named):
        self.turns += 1
        if self.turns == 1:
            await ENVIRONMENT.wait()
        return {
            "rewards": torch.tensor(1.0),
            "environment_feedback": " and",
            "done": self.turns == 2,
            "sampling_params": states["sampling_params"],
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(Instance)
"""


# ---- in place of CUDA -----------------------------------------------------------------------------------------------


def test_every_change_of_the_room_finds_what_it_expects():
    import openrlhf.trainer.ray.ppo_actor
    import openrlhf.trainer.ray.vllm_engine  # noqa: F401

    assert {patch.target for patch in PATCHES} <= set(applied())


def test_openrlhf_s_device_is_the_cpu():
    assert torch.zeros(2, device=torch.cuda.current_device()).device.type == "cpu"
    torch.device(f"cuda:{torch.cuda.current_device()}")  # as OpenRLHF's replay buffer writes it
    torch.cuda.synchronize()
    torch.cuda.set_device(0)
    assert torch.cuda.current_stream() is None
    assert not torch.cuda.is_available()


def test_padding_is_taken_out_and_put_back():
    from flash_attn.bert_padding import pad_input, unpad_input

    rows = torch.randn(3, 5, 2, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 1, 1], [0, 0, 0, 1, 1]])
    packed, places, sums, longest, lengths = unpad_input(rows, mask)
    assert torch.equal(packed, rows[mask.bool()])
    assert sums.tolist() == [0, 3, 8, 10]
    assert (longest, lengths.tolist()) == (5, [3, 5, 2])
    back = pad_input(packed, places, 3, 5)
    assert torch.equal(back, rows * mask[..., None])
    back.sum().backward()
    assert torch.equal(rows.grad, mask[..., None].expand_as(rows).double())


def test_transformers_does_not_take_flash_attn_for_installed():
    assert not is_flash_attn_2_available()


def test_ring_attention_is_refused():
    from openrlhf.models.ring_attn_utils import all_gather

    with pytest.raises(ConfigurationError, match="ring attention needs flash-attn"):
        all_gather(torch.zeros(1), None)


def pair():
    port = free_port()
    return StoreGroup("127.0.0.1", port, 0, 2), StoreGroup("127.0.0.1", port, 1, 2)


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_weights_travel_as_they_are(dtype):
    sender, receiver = pair()
    for shape in ((3, 4), (), (5,)):
        sent = (torch.randn(shape) * 100).to(dtype)
        sender.broadcast(sent, src=0, stream=None)
        received = torch.zeros(shape, dtype=dtype)
        receiver.broadcast(received, src=0)
        assert torch.equal(sent, received)
    # a view that isn't contiguous, on both sides
    sent, received = torch.randn(4, 3).to(dtype).T, torch.zeros(4, 3, dtype=dtype).T
    sender.broadcast(sent, src=0)
    receiver.broadcast(received, src=0)
    assert torch.equal(sent, received)


def test_a_weight_of_another_size_is_refused():
    sender, receiver = pair()
    sender.broadcast(torch.zeros(3), src=0)
    with pytest.raises(VersionMismatch, match="12 bytes instead of 16"):
        receiver.broadcast(torch.zeros(4), src=0)


# ---- the rollout engine ---------------------------------------------------------------------------------------------


class Engine:
    """A rollout engine with real vLLM, driven from tests that aren't async; and the trainer's end of its weights."""

    def __init__(self, tiny, folder):
        from metronome_openrlhf.rollout import MetronomeRollout

        self.loop = asyncio.new_event_loop()
        self.tokenizer = AutoTokenizer.from_pretrained(tiny.model)
        self.model = AutoModelForCausalLM.from_pretrained(tiny.model, dtype=torch.bfloat16)
        self.actor = MetronomeRollout.__new__(MetronomeRollout)
        agent = folder / "agent.py"
        agent.write_text(AGENT)
        made = self.actor.__init__(
            model=str(tiny.model),
            enforce_eager=True,
            worker_extension_cls="openrlhf.trainer.ray.vllm_worker_wrap.WorkerWrap",
            tensor_parallel_size=1,
            seed=1,
            distributed_executor_backend="uni",
            max_model_len=400,
            enable_prefix_caching=False,
            dtype="bfloat16",
            num_gpus=1,
            enable_sleep_mode=False,
            bundle_indices=None,
            remote_rm_url=str(tiny.reward),
            logprobs_mode="processed_logprobs",
            max_logprobs=1,
            sampling_seed=7,
        )
        self.loop.run_until_complete(made)
        from openrlhf.trainer.ray.vllm_engine import _load_agent_executor

        self.single, self.multi = self.actor.executor, _load_agent_executor(str(agent))
        port = free_port()
        self.sender = StoreGroup("127.0.0.1", port, 0, 2)
        self.loop.run_until_complete(self.actor.init_process_group("127.0.0.1", port, 1, 2, "weights", "gloo", False))

    def __call__(self, coroutine):
        return self.loop.run_until_complete(coroutine)

    def reset(self):
        self.actor.executor, self.actor.sampling_seed = self.single, 7
        self.actor.restarted = 0
        self(self.actor.set_version(self.actor.version + 1))
        self(self.actor.set_version(0))

    async def ask(self, prompt, tokens=24, samples=2, **more):
        from vllm import SamplingParams

        wanted = SamplingParams(max_tokens=tokens, min_tokens=tokens, logprobs=1, **more)
        return await self.actor.generate_responses(prompt, "3", wanted, 400, self.tokenizer, samples)

    async def send(self, model):
        """A broadcast, as OpenRLHF's trainer does it."""
        for name, weight in model.named_parameters():
            sending = threading.Thread(target=self.sender.broadcast, args=(weight.detach(), 0))
            sending.start()
            await self.actor.update_weight(name, dtype=weight.dtype, shape=weight.shape)
            sending.join()

    async def publish(self, model, version):
        await self.actor.pause_generation()
        await self.send(model)
        await self.actor.set_version(version)

    async def until(self, tokens):
        """Returns when each running request has at least that many tokens."""
        while not self.actor._requests or min(one.seen for one in self.actor._requests) < tokens:
            await asyncio.sleep(0.002)

    def other(self):
        """A model with other weights."""
        made = AutoModelForCausalLM.from_config(self.model.config, dtype=torch.bfloat16)
        with torch.random.fork_rng():
            torch.manual_seed(1)
            for weight in made.parameters():
                torch.nn.init.normal_(weight, std=0.1) if weight.dim() > 1 else None
        return made


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    folder = tmp_path_factory.mktemp("assets")
    before = os.environ.get("RAY_ADDRESS")
    os.environ["RAY_ADDRESS"] = "none"  # OpenRLHF's engine looks for Ray's otherwise
    made = Engine(assets.make(folder), folder)
    yield made
    made.actor.llm.shutdown()
    made(asyncio.sleep(0.5))  # vLLM closes its sockets in the loop, and waits for ever for those that it left open
    made.loop.close()
    if before is None:
        del os.environ["RAY_ADDRESS"]
    else:
        os.environ["RAY_ADDRESS"] = before


@pytest.fixture
def engine(running):
    running.reset()
    yield running
    running(running.send(running.model))


PROMPTS = [f"{left}+{right}=" for left in range(3) for right in range(3)]


async def at_once(engine):
    return [[one["observation_tokens"] for one in group] for group in await asyncio.gather(*map(engine.ask, PROMPTS))]


async def in_turn(engine):
    made = {prompt: [one["observation_tokens"] for one in await engine.ask(prompt)] for prompt in reversed(PROMPTS)}
    return [made[prompt] for prompt in PROMPTS]


def test_what_is_sampled_follows_prompt_sample_and_version_not_arrival(engine):
    first = engine(at_once(engine))
    assert all(one != two for one, two in first)  # samples of a prompt differ
    engine.reset()
    assert engine(in_turn(engine)) == first
    assert engine(in_turn(engine)) != first  # asked a second time under the same weights
    engine(engine.actor.set_version(1))
    assert engine(at_once(engine)) != first
    engine.reset()
    engine.actor.sampling_seed = 8
    assert engine(at_once(engine)) != first


def test_without_a_seed_arrival_matters(engine):
    engine.actor.sampling_seed = None
    first = engine(at_once(engine))
    assert engine(at_once(engine)) != first


def plain(model, tokens):
    """log p of each token after the first, in float32."""
    with torch.no_grad():
        logits = deepcopy(model).float()(torch.tensor([tokens])).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def test_versions_change_at_the_token_at_which_the_weights_do(engine):
    other = engine.other()

    async def interrupted():
        asked = asyncio.gather(*[engine.ask(prompt, LONG) for prompt in PROMPTS[:3]])
        await engine.until(20)
        await engine.publish(other, 5)
        await engine.actor.resume_generation()
        return [one for group in await asked for one in group]

    before = engine(engine.actor.fingerprint())
    found = engine(interrupted())
    assert engine(engine.actor.fingerprint()) != before
    for one in found:
        (old, first), (new, second) = one[SPANS]
        assert (old, new, first + second) == (0, 5, LONG)
        assert first >= 20
        start = one["action_ranges"][0][0]
        edge = start + first
        said = torch.tensor(one["rollout_log_probs"])[1:]
        by_old = (plain(engine.model, one["observation_tokens"]) - said).abs()
        by_new = (plain(other, one["observation_tokens"]) - said).abs()
        # bfloat16 against float32; the first token of the new weights is the one after the edge
        assert by_old[start - 1 : edge - 1].max() < 0.25
        assert by_new[edge - 1 :].max() < 0.25
        assert by_new[start - 1 : edge - 1].mean() > 0.5
        assert by_old[edge - 1 :].mean() > 0.5


def test_abort_starts_running_samples_anew(engine):
    async def interrupted():
        asked = asyncio.gather(*[engine.ask(prompt, LONG) for prompt in PROMPTS[:3]])
        await engine.until(20)
        assert await engine.actor.running() == 6
        await engine.publish(engine.other(), 1)
        assert await engine.actor.abort_running() == 6
        await engine.actor.resume_generation()
        return [one for group in await asked for one in group]

    found = engine(interrupted())
    assert [one[SPANS] for one in found] == [[[1, LONG]]] * 6
    assert engine.actor.restarted == 6
    assert engine(engine.actor.running()) == 0
    assert engine.actor.get_num_unfinished_requests() == 0


def test_turns_have_their_own_versions_and_feedback_none(engine):
    engine.actor.executor = engine.multi
    wait = engine.multi.agent_instance_cls.step.__globals__["ENVIRONMENT"]

    async def between_turns(abort):
        wait.clear()
        # An executor of several turns lets each use what is left of the row: half of the tokens end one.
        asked = asyncio.ensure_future(engine.ask(PROMPTS[0], 12, 2, stop_token_ids=[*range(2, 50)]))
        while not asked.done():
            await asyncio.sleep(0.01)
            if not engine.actor._requests and all(one.requests for one in engine.actor._rollouts):
                break
        await engine.publish(engine.other(), 1)
        if abort:
            assert await engine.actor.abort_running() == 0  # none is being generated
        await engine.actor.resume_generation()
        wait.set()
        return await asked

    for one in engine(between_turns(abort=False)):
        (first, second), ranges = one[SPANS], one["action_ranges"]
        assert [first[0], second[0]] == [0, 1]
        assert [first[1], second[1]] == [end - start for start, end in ranges]
        assert ranges[1][0] > ranges[0][1]  # the environment's tokens stand between
    assert engine.actor.restarted == 0
    engine(engine.send(engine.model))
    engine.reset()
    engine.actor.executor = engine.multi
    for one in engine(between_turns(abort=True)):
        assert [version for version, _ in one[SPANS]] == [1]
        assert len(one["action_ranges"]) == 2
    assert engine.actor.restarted == 2


def test_new_weights_under_running_requests_are_refused(engine):
    async def careless():
        asked = asyncio.ensure_future(engine.ask(PROMPTS[0], LONG))
        await engine.until(1)
        with pytest.raises(MetronomeError, match="the weights of a running engine changed"):
            await engine.actor.set_version(1)
        return await asked

    assert [one[SPANS] for one in engine(careless())] == [[[0, LONG]]] * 2


def test_a_weight_of_another_type_is_refused(engine):
    weight = torch.zeros(2, dtype=torch.float32)
    with pytest.raises(Exception, match=r"another type than the engine's|collective_rpc|failed"):
        engine(engine.actor.update_weight("lm_head.weight", dtype=weight.dtype, shape=weight.shape))
