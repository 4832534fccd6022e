"""Faults that reviewers found in how a run of the local host ends: hangs, interrupts, kills between two renames."""

import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
import test_local_bad_input
import torch
import yaml
from tiny_runs import built, periods_in, train

from metronome_local import host
from metronome_local.checkpoint import Checkpoints, load_state, load_tensors
from metronome_local.dispatch import Rollouts
from metronome_local.pool import RolloutPool
from metronome_local.progress import read_jsonl

pytestmark = pytest.mark.timeout(150)
worker_threads = test_local_bad_input.worker_threads

# --- SIGINT between two periods -------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 3])
def test_an_interrupt_during_a_step_leaves_the_evaluation_to_the_resumed_run(
    every, tiny_recipe, tmp_path, worker_threads
):
    folder = tmp_path / "run"
    recipe = tiny_recipe(training={"periods": 3}, evaluation={"every": every}, checkpoints={"every": 1})

    def evaluated():
        return [one["period"] for one in read_jsonl(folder / "metrics.jsonl") if "held_out_accuracy" in one]

    with built(recipe, folder) as trainer:
        trainer.parts.optimiser.register_step_post_hook(lambda *_: os.kill(os.getpid(), signal.SIGINT))
        host.train(trainer, trainer.console)
        assert trainer.interrupted
        assert trainer.period == 1  # the step was made: its period is whole
    assert evaluated() == [0]
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["000001"]
    resumed = train(recipe, folder, resume=True)
    assert evaluated() == {1: [0, 1, 2, 3], 3: [0, 3]}[every]
    assert [period for period, _ in resumed.accuracies] == evaluated()
    assert [record["period"] for record in periods_in(folder)] == [1, 2, 3]
    train({**recipe, "training": {**recipe["training"], "periods": 4}}, folder, resume=True)
    assert evaluated() == {1: [0, 1, 2, 3, 4], 3: [0, 3, 4]}[every]  # what the checkpoint knows isn't done again


# --- checkpoints ----------------------------------------------------------------------------------


def saved(folder, period=1):
    """Saves a checkpoint of a small model; returns its parts."""
    model = torch.nn.Linear(2, 2)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda _: 1.0)
    parts = SimpleNamespace(model=model, optimiser=optimiser, scheduler=scheduler)
    state = {"period": period, "version": 1, "stream": {}, "controller": {}, "random": [], "accuracies": []}
    Checkpoints(folder, keep=1).save(state, parts)
    return parts


def names(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.mark.parametrize("kill", range(5), ids=lambda step: f"before call {step}")
def test_a_kill_while_a_checkpoint_is_replaced_leaves_a_whole_one(kill, tmp_path, monkeypatch):
    first, calls = saved(tmp_path), []

    def counted(function):
        def call(*arguments, **options):
            calls.append(function.__name__)
            if len(calls) > kill:
                raise KeyboardInterrupt  # and nothing after it
            return function(*arguments, **options)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", counted(Path.rename))
        patch.setattr(shutil, "rmtree", counted(shutil.rmtree))
        with pytest.raises(KeyboardInterrupt):
            saved(tmp_path)
    state = load_state(tmp_path)
    assert state["period"] == 1
    load_tensors(state, first.model, first.optimiser, first.scheduler)
    saved(tmp_path)
    assert names(tmp_path) == ["000001"]  # and nothing of the killed one is in the way
    saved(tmp_path, period=2)
    assert names(tmp_path) == ["000002"]


# --- processes ------------------------------------------------------------------------------------


def test_a_new_worker_is_born_deaf_to_the_terminals_interrupt(monkeypatch):
    from multiprocessing import resource_tracker

    tracker = resource_tracker.ResourceTracker()  # as at the start of a program: none is running
    for name in ("ensure_running", "getfd"):
        monkeypatch.setattr(resource_tracker, name, getattr(tracker, name))
    masks = []

    class Process:
        sentinel = -1

        def __init__(self, **_):
            pass

        def start(self):
            resource_tracker.getfd()  # as multiprocessing's own start does
            masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))

    ends = SimpleNamespace(close=lambda: None)
    pool = SimpleNamespace(
        _context=SimpleNamespace(Pipe=lambda: (ends, ends), Process=Process), _weights=None, _configs=[None]
    )
    try:
        RolloutPool._spawn(pool, 0)
    finally:
        tracker._stop()
    assert signal.SIGINT in masks[0]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_groups_that_a_reward_function_holds_up_are_named_and_its_thread_ends_with_the_run():
    free, generated = threading.Event(), []

    def generate(prompt, size, greedy):
        generated.append(Future())
        return generated[-1]

    scorer = SimpleNamespace(score=lambda group: free.wait(30) and group)
    fake = SimpleNamespace(generate=generate, describe=lambda: "worker 0: idle", close=lambda: None)
    before = set(threading.enumerate())
    rollouts = Rollouts(None, scorer, fake, 8, 1.0)
    (thread,) = set(threading.enumerate()) - before
    assert rollouts.describe() == "worker 0: idle"
    scored = [rollouts.generate(None, 2) for _ in range(2)]
    generated[0].set_result("group")
    time.sleep(0.2)  # the only group is in the reward function's hands
    assert rollouts.describe() == "worker 0: idle; 1 groups wait for the reward function"
    generated[1].set_result("group")
    assert "2 groups wait for the reward function" in rollouts.describe()
    free.set()
    assert [one.result(10) for one in scored] == ["group", "group"]
    assert thread.daemon
    rollouts.close()
    thread.join(10)
    assert not thread.is_alive()  # else it would keep the run's weights
    assert rollouts.describe() == "worker 0: idle"


HANGING = '''"""A reward function that never comes back."""

import time


def hang(prompts, completions, **columns):
    """Waits for an hour."""
    time.sleep(3600)
'''
# The patience of a period alone: the workers' start takes longer than a test wants to wait for a reward.
IMPATIENT = """
import sys
from metronome.cli import main
from metronome_local.trainer import Trainer

start = Trainer.start

def impatient(self):
    start(self)
    self.stream._timeout = 2.0

Trainer.start = impatient
sys.exit(main(sys.argv[1:]))
"""


def started(program, recipe, folder):
    """``program`` with the arguments of a run, in a process group of its own."""
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return subprocess.Popen(
        [sys.executable, *program, "run", str(path), "--output", str(folder / "run")],
        env={**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def ended(process, seconds):
    """Standard output and error of a process that must end by itself."""
    try:
        return process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        pytest.fail("the process didn't end")


def test_a_reward_function_that_hangs_ends_the_run_and_the_process(tiny_recipe, tmp_path):
    (tmp_path / "rewards.py").write_text(HANGING)
    task = {**tiny_recipe()["task"], "reward": f"{tmp_path / 'rewards.py'}:hang"}
    process = started(["-c", IMPATIENT], tiny_recipe(task=task, training={"prompts": 1}), tmp_path)
    _, error = ended(process, 60)
    assert process.returncode == 1
    assert error.startswith("metronome: error: no group arrived in 2 s")
    assert "1 groups wait for the reward function" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("delay", [0.3, 2.0])
def test_ctrl_c_while_the_workers_start_prints_no_traceback_and_leaves_a_checkpoint(delay, tiny_recipe, tmp_path):
    process = started(["-m", "metronome.cli"], tiny_recipe(machine={"workers": 2}), tmp_path)
    assert select.select([process.stdout], [], [], 100)[0]
    assert process.stdout.readline().startswith("metronome local:")  # the workers have just been started
    time.sleep(delay)
    os.killpg(process.pid, signal.SIGINT)
    output, error = ended(process, 60)
    assert error == ""
    assert process.returncode == 130
    assert "interrupted" in output
    assert (tmp_path / "run" / "checkpoints" / "000000" / "state.json").is_file()
