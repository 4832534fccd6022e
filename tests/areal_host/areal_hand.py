"""AReaL's real executor with episodes that end when a test says so, and a dispatcher that is only its results."""

import asyncio
import contextlib
import itertools
import threading
import time
from types import SimpleNamespace

import areal_room as room
from areal.api import RolloutWorkflow
from areal.api.cli_args import InferenceEngineConfig
from areal.infra.workflow_executor import WorkflowExecutor

from metronome_areal.bounded import BoundedFlow
from metronome_areal.flow import NEVER


class Hand(RolloutWorkflow):
    """One-row episodes of ``turns`` turns that wait for ``end``; each turn notes the engine's version."""

    def __init__(self, turns=1):
        self.turns = turns
        self.begun, self.ended = [], []
        self._may = {}

    def end(self, *prompts):
        for prompt in prompts:
            self._may[prompt] = self._may.get(prompt, 0) + self.turns

    async def arun_episode(self, engine, data):
        prompt = data["prompt"]
        self.begun.append(prompt)
        versions = []
        for _ in range(self.turns):
            while self._may.get(prompt, 0) < 1:
                await asyncio.sleep(0.005)
            self._may[prompt] -= 1
            versions.append(engine.get_version())
        self.ended.append(prompt)
        (row,) = room.random_groups([1], version=versions[0], seed=prompt)
        row["versions"][:, -1] = versions[-1]
        return row | {"versions_seen": row["rewards"] * 0 + len(set(versions))}


class Engine:
    """A version, as AReaL's executor asks for it."""

    def __init__(self, version=0):
        self.version = version

    def get_version(self):
        return self.version


@contextlib.contextmanager
def executor(engine=None, bound=NEVER, batch=2, concurrent=64, ranks=1):
    """AReaL's WorkflowExecutor over ``engine``, as a rollout engine has it."""
    config = InferenceEngineConfig(
        backend="vllm:d1",
        experiment_name="hand",
        trial_name="t0",
        max_concurrent_rollouts=concurrent,
        consumer_batch_size=batch,
        max_head_offpolicyness=bound,
    )
    made = WorkflowExecutor(config, engine or Engine())
    made.initialize(train_data_parallel_size=ranks)
    try:
        yield made
    finally:
        made.destroy()


def flow_on(made, source, workflow, seconds=20.0, prompts=None):
    """A flow of ``workflow``'s episodes on the executor ``made``, and AReaL's engine as far as ours looks at it."""
    rollout = SimpleNamespace(workflow_executor=made, pause=made.pause, resume=made.resume)
    prompts = ({"prompt": number} for number in itertools.count()) if prompts is None else prompts
    flow = BoundedFlow(rollout, source, prompts, 10, seconds)
    flow.submit = lambda task: made.submit(task.data, workflow=workflow)
    return flow, rollout


def until(holds, seconds=20.0):
    """Waits for what another thread does."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it didn't come"
        time.sleep(0.01)


class Results:
    """A rollout whose tasks end at once, with the versions that a test gives them."""

    def __init__(self):
        self.dispatcher = SimpleNamespace(
            _result_cv=threading.Condition(),
            _input_cv=threading.Condition(),
            _pending_results={},
            _pending_inputs=[],
            _active_task_ids=set(),
            _check_thread_exception=lambda: None,
        )
        self.out, self.sent, self._numbers = {}, [], itertools.count()

    def submit(self, task):
        number = next(self._numbers)
        self.out[number] = task
        self.sent.append(task.data["prompt"])
        return number

    def finish(self, number, versions):
        """Ends task ``number`` with tokens of ``versions``."""
        task = self.out.pop(number)
        (group,) = room.random_groups([task.size], version=versions[0], seed=number)
        group["versions"][group["loss_mask"].bool()] = versions[0]
        group["versions"][0, group["loss_mask"][0].nonzero()[-1]] = versions[-1]
        self.dispatcher._pending_results[number] = SimpleNamespace(data=SimpleNamespace(trajectory=group))
