"""A rollout engine that stands for a device of its own: it decodes by sleeping, and takes no processor time.

OpenRLHF's rollout actor loads this file (``--train.agent_func_path``) before it makes vLLM's engine, and gets ours
instead; its executor, reward function, scheduling of prompts and publication of weights are OpenRLHF's. Used by
benchmarks/openrlhf_periodic.py only, which describes the work in the variable ``WORK``.

Every batch has the same response lengths, in the order of the requests; tokens differ from batch to batch.
"""

from __future__ import annotations

import asyncio
import json
import os
from types import SimpleNamespace

from simulated import lengths, response

WORK = "METRONOME_BENCHMARK_WORK"


class Engine:
    """As much of vLLM's engine as OpenRLHF's rollout actor calls.

    Args:
        work: ``prompts``, ``size``, ``longest``, ``slots``, ``delay`` (seconds a token).
    """

    def __init__(self, work):
        self.lengths = lengths(work["prompts"] * work["size"], work["longest"])
        self.delay, self.longest = work["delay"], work["longest"]
        self.slots = asyncio.Semaphore(work["slots"])
        self.requests = self.running = 0
        self.worker = Worker()
        self.output_processor = SimpleNamespace(get_num_unfinished_requests=lambda: self.running)

    @classmethod
    def from_engine_args(cls, _):
        return cls(json.loads(os.environ[WORK]))

    async def generate(self, prompt, sampling_params, request_id):
        tokens = response(self.requests, self.lengths)
        self.requests += 1
        self.running += 1
        try:
            async with self.slots:
                await asyncio.sleep(len(tokens) * self.delay)
        finally:
            self.running -= 1
        end = "length" if len(tokens) == self.longest else "stop"
        yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens, text="", finish_reason=end, logprobs=None)])

    async def collective_rpc(self, method, args=()):
        return [getattr(self.worker, method)(*args) if isinstance(method, str) else method(self.worker, *args)]

    async def is_sleeping(self):
        return False

    async def reset_prefix_cache(self):
        pass


class Worker:
    """Holds the published weights."""

    def __init__(self):
        self.weights = {}
        self.model_runner = SimpleNamespace(model=SimpleNamespace(parameters=self.weights.values))

    def init_process_group(self, address, port, rank, world_size, *_):
        from metronome_openrlhf.cpu.transport import StoreGroup

        self.group = StoreGroup(address, int(port), rank, world_size)

    def update_weight(self, name, dtype, shape, *_):
        import torch

        weight = torch.empty(tuple(shape), dtype=dtype)
        self.group.broadcast(weight, src=0)
        self.weights[name] = weight


def executor():
    """OpenRLHF's own executor of single turns, in a process whose vLLM engine is ours."""
    import vllm
    from openrlhf.utils.agent import SingleTurnAgentExecutor

    class AgentExecutor(SingleTurnAgentExecutor):
        def __init__(self):
            vllm.AsyncLLMEngine = Engine
            super().__init__(json.loads(os.environ[WORK])["reward"])

    return AgentExecutor


def __getattr__(name):  # OpenRLHF asks for it when it loads the file; tests need neither it nor vLLM
    if name == "AgentExecutor":
        return executor()
    raise AttributeError(name)
