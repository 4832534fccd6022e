"""OpenRLHF's asynchronous trainer in one process: actors in threads, a real actor worker, stand-ins for engines."""

import queue
import threading
import time
from types import SimpleNamespace

import local_ray
import openrlhf_controller
import workers
from openrlhf.trainer import ppo_trainer_async
from openrlhf.trainer.ppo_utils import experience
from openrlhf.trainer.ppo_utils.experience import Experience as experience_of_openrlhf
from openrlhf.utils import get_strategy

from metronome_openrlhf import bounded, generating
from metronome_openrlhf.policy import MetronomePolicy

GENERATE = {"do_sample": True, "max_len": 64, "max_new_tokens": 12, "temperature": 1.0, "top_p": 1.0}


running = []
"""Calls that may not have ended."""

stopped = threading.Event()
"""Ends whoever waits at a queue."""


class Call(local_ray.Ref):
    """A call that runs in a thread of its own."""

    def __init__(self, function, arguments, named):
        super().__init__()
        self.done = threading.Event()

        def run():
            try:
                self.value = function(*arguments, **named)
            except BaseException as error:
                self.error = error
            finally:
                self.done.set()

        threading.Thread(target=run, daemon=True).start()
        running.append(self)


class Threaded:
    """An actor whose calls run in threads."""

    def __init__(self, target):
        self.target = target

    def __getattr__(self, name):
        method = getattr(self.target, name)
        return SimpleNamespace(remote=lambda *arguments, **named: Call(method, arguments, named))


class Ray:
    """``local_ray`` with threads; of several calls the first error is raised, as Ray does."""

    wait, put = staticmethod(local_ray.wait), staticmethod(local_ray.put)

    @staticmethod
    def remote(cls):
        return SimpleNamespace(remote=lambda *arguments, **named: Threaded(cls(*arguments, **named)))

    @classmethod
    def get(cls, refs):
        if isinstance(refs, (list, tuple)):
            calls = [one for one in refs if isinstance(one, Call)]
            while not all(one.done.is_set() for one in calls) and not any(one.error for one in calls):
                time.sleep(0.001)
            for one in calls:
                if one.error is not None:
                    raise one.error
            return [cls.get(one) for one in refs]
        if isinstance(refs, Call):
            assert refs.done.wait(60)
        return local_ray.get(refs)


class Queue(queue.Queue):
    """As Ray's. Knows whether somebody waits for it in vain."""

    waited = 0

    def get(self, block=True, timeout=None):
        if not block:
            return super().get(False)
        self.waited += 1
        try:
            return self._patient(super().get, queue.Empty)
        finally:
            self.waited -= 1

    def put(self, item, block=True, timeout=None):
        return self._patient(lambda timeout: super(Queue, self).put(item, timeout=timeout), queue.Full)

    def _patient(self, attempt, vain):
        end = time.monotonic() + 60
        while not stopped.is_set():
            try:
                return attempt(timeout=0.02)
            except vain:
                assert time.monotonic() < end, "nobody is at the other end"
        raise RuntimeError("the test is over")

    def starved(self):
        return self.waited > 0 and self.empty()


class Lock:
    def __init__(self):
        self._lock = threading.Lock()

    def acquire(self):
        self._lock.acquire()

    def release(self):
        self._lock.release()


class Engine(openrlhf_controller.Engine):
    """Notes what a publication does to it."""

    def __init__(self, log, **named):
        super().__init__(**named)
        self.log = log

    def set_version(self, version):
        super().set_version(version)
        self.log.append(f"set_version {version}")

    def pause_generation(self):
        self.log.append("pause")

    def resume_generation(self):
        self.log.append("resume")

    def abort_running(self):
        self.log.append("abort")


class Learner(bounded.MetronomeLearner):
    """Takes its time: by ``pace``, the engines are as far as the queue lets them before a step, or behind it."""

    pace = "slow"

    def train_step(self, rollout_samples, global_step):
        if self.pace == "slow":
            wait_until(self._far_enough)
        self.trained.append([(row.prompts[0], bounded.versions_of([row])) for row in rollout_samples])
        return super().train_step(rollout_samples, global_step)

    def _far_enough(self):
        waits = self.rollout_slots.starved() or self.again.starved() or self.rollout_queue.full()
        return waits or self.over.is_set()

    def save_logs_and_checkpoints(self, global_step, logs_dict=None, client_states=None):
        super().save_logs_and_checkpoints(global_step, logs_dict, client_states)
        self.logs.append(SimpleNamespace(step=global_step, status=dict(logs_dict), states=dict(client_states)))


class Generator(bounded.MetronomeGenerator):
    """Behind a fast learner, it begins a batch when the learner waits for one."""

    pace = "slow"

    def fit(self, *arguments, **named):
        try:
            return super().fit(*arguments, **named)
        finally:
            self.over.set()

    def _batch(self, data, back, episode):
        if self.pace == "fast":
            wait_until(self.rollout_queue.starved)
        return super()._batch(data, back, episode)


def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition() and not stopped.is_set():
        assert time.monotonic() < end, "the other side stands still"
        time.sleep(0.001)


def stop():
    """Ends what still runs: a run that failed leaves an actor that waits for the other."""
    stopped.set()
    for one in running:
        assert one.done.wait(60)
    running.clear()
    stopped.clear()


def install(patch):
    """Puts the stand-ins where OpenRLHF's and our classes look them up."""
    openrlhf_controller.install(patch)
    modules = (*openrlhf_controller.MODULES, ppo_trainer_async, bounded, generating)
    for module in modules:
        patch(module, "ray", Ray)
    for module in (ppo_trainer_async, bounded):
        patch(module, "Queue", Queue)
    patch(ppo_trainer_async, "VLLMLock", SimpleNamespace(remote=lambda: local_ray.Handle(Lock())))
    patch(
        ppo_trainer_async,
        "batch_vllm_engine_call",
        lambda engines, name, *given, **named: [getattr(one, name).remote(*given).value for one in engines],
    )
    patch(bounded, "MetronomeLearner", Learner)
    patch(bounded, "MetronomeGenerator", Generator)


def build(folder, block, pace="slow", engines=1, states=None, **flags):
    """The whole trainer of ours with ``learner``, ``generator``, ``engines``, ``log`` of calls, and ``worker``.

    Args:
        folder: the assets.
        block: the ``metronome:`` block, with ``in_flight``.
        pace: of the learner, against the engines: ``slow`` or ``fast``.
        engines: how many.
        states: a checkpoint's, which is resumed; weights aren't.
        flags: OpenRLHF's, with ``__`` for the dot.
    """
    assets = workers.model(folder)
    given = dict(zip(assets.flags()[::2], assets.flags()[1::2], strict=True))
    given = {name.removeprefix("--").replace(".", "__"): value for name, value in given.items()}
    defaults = {"data__max_len": 64, "data__max_samples": 24, "ckpt__path": str(folder / "checkpoints")}
    args = workers.arguments({"rollout_source": "bounded", **block}, **{**given, **defaults, **flags})
    experience.Experience = experience_of_openrlhf  # which ours replaces
    worker = workers.policy(args, assets.model, openrlhf_controller._publishing(MetronomePolicy))
    log = []
    worker.engines = targets = [Engine(log) for _ in range(engines)]
    if states is not None:
        (folder / "checkpoints" / "_actor").mkdir(parents=True, exist_ok=True)
        args.ckpt.load_enable, worker.checkpoint_states = True, states
    strategy = get_strategy(args)
    strategy.ds_device_mesh = worker.strategy.ds_device_mesh
    over = threading.Event()
    for cls in (Learner, Generator):
        cls.pace, cls.over = pace, over
    Learner.trained, Learner.logs = [], []
    made = object.__new__(bounded.MetronomeTrainerAsync)
    made.__init__(
        str(assets.model),
        strategy,
        openrlhf_controller.Group([worker]),
        None,
        None,
        None,
        [local_ray.Handle(one) for one in targets],
        **GENERATE,
    )
    made.learner, made.generator = made.trainer_actor.target, made.generator_actor.target
    made.worker, made.engines, made.log = worker, targets, log
    return made
