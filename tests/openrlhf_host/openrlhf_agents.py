"""Agents of several turns: files for ``--train.agent_func_path``, and our rollout engine over a stand-in for vLLM."""

import asyncio
import random
from types import SimpleNamespace

from openrlhf.trainer.ray import vllm_engine
from openrlhf_controller import Engine
from transformers import AutoTokenizer

from metronome_openrlhf.rollout import MetronomeRollout

AGENT = '''
import asyncio

import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

ENVIRONMENT = None
"""An event that every environment waits for, where one is set."""

resets = []


class Calculator(AgentInstanceBase):
    """Three turns at most, each but the last answered with as many marks as the turn before was long."""

    def __init__(self):
        self.turns = 0

    async def reset(self, states, **named):
        resets.append(states["observation"])
        return {"observation": states["observation"]}

    async def step(self, states, **named):
        self.turns += 1
        if ENVIRONMENT is not None:
            await ENVIRONMENT.wait()
        text = states["action_text"]
        return {
            "rewards": torch.tensor(sum(map(str.isdigit, text)) / max(1, len(text))),
            "environment_feedback": "" if self.turns == 3 else "!" * (1 + len(text) % 5),
            "done": self.turns == 3,
            "sampling_params": states["sampling_params"],
        }


class AgentExecutor(MultiTurnAgentExecutor):
    """Ends turns at some characters, and logs how many tokens were sampled and how many fed back."""

    def __init__(self):
        super().__init__(Calculator)

    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None):
        sampling_params.stop = list("abcdefghij02468")
        made = await super().execute(prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images)
        sampled = sum(end - start for start, end in made["action_ranges"])
        fed = len(made["observation_tokens"]) - made["action_ranges"][0][0] - sampled
        return {**made, "extra_logs": {"turns": len(made["action_ranges"]), "sampled": sampled, "fed": fed}}
'''


def log_prob(version, place):
    """What the stand-in says of a token that ``version`` sampled at ``place`` of its context."""
    return -(1.0 + version + place / 1024)


class Vllm:
    """In place of vLLM's engine: tokens one by one, a few a turn, drawn from the request's seed.

    Attributes:
        weights: the version that samples.
        given: ``(context, tokens)`` of every finished request.
        slow: seconds between two tokens.
    """

    def __init__(self, tokenizer):
        self.tokenizer, self.weights, self.slow, self.given = tokenizer, 0, 0.0, []
        self.going = asyncio.Event()
        self.going.set()

    async def is_sleeping(self):
        return False

    async def is_paused(self):
        return not self.going.is_set()

    async def pause_generation(self, mode):
        assert mode == "keep"
        self.going.clear()

    async def resume_generation(self):
        self.going.set()

    async def generate(self, prompt, sampling_params, request_id):
        context = list(prompt["prompt_token_ids"])
        draw = random.Random(sampling_params.seed)
        wanted = draw.randint(3, 9)
        tokens, said = [], []
        while len(tokens) < min(wanted, sampling_params.max_tokens):
            await self.going.wait()
            tokens.append(draw.randint(3, 90))
            said.append({tokens[-1]: SimpleNamespace(logprob=log_prob(self.weights, len(context) + len(tokens) - 1))})
            reason = "stop" if len(tokens) == wanted else "length"
            output = SimpleNamespace(
                token_ids=list(tokens), logprobs=list(said), text=self.tokenizer.decode(tokens), finish_reason=reason
            )
            yield SimpleNamespace(outputs=[output])
            await asyncio.sleep(self.slow)
        self.given.append((context, tokens))


def rollout(patch, assets, agent, seed=7):
    """Our rollout engine as OpenRLHF starts it, with the agent of that file, over ``Vllm``; to be awaited."""
    made = Vllm(AutoTokenizer.from_pretrained(assets.model))
    patch(
        vllm_engine,
        "vllm",
        SimpleNamespace(
            __version__="0.29.0",
            AsyncEngineArgs=lambda **named: named,
            AsyncLLMEngine=SimpleNamespace(from_engine_args=lambda given: made),
        ),
    )
    actor = MetronomeRollout.__new__(MetronomeRollout)

    async def start():
        await actor.__init__(agent_func_path=str(agent), num_gpus=1, sampling_seed=seed)
        actor.vllm = made
        return actor

    return start()


class Agents(Engine):
    """The controller's engine: OpenRLHF's own executor and our rollout engine behind it."""

    def __init__(self, actor, loop):
        super().__init__()
        self.actor, self.loop = actor, loop

    def set_version(self, version):
        super().set_version(version)
        self.loop.run_until_complete(self.actor.set_version(version))
        self.actor.vllm.weights = version

    def generate_responses(self, prompt, label, sampling_params, max_length, hf_tokenizer, num_samples=1, images=None):
        self.served.append((prompt, num_samples))
        asked = self.actor.generate_responses(
            prompt, label, sampling_params, max_length, hf_tokenizer, num_samples, images
        )
        return self.loop.run_until_complete(asked)
