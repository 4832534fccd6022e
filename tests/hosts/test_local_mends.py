"""Faults that reviewers found in the running of the local host, each with a test that fails where it comes back.

Workers are threads of this process (``worker_threads``), or scripts that speak the pool's messages.
"""

import os
import statistics
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
import test_local_bad_input
import tiny_local
import torch
import yaml
from tiny_runs import built, periods_in

import metronome_local.build
from metronome.cli import main
from metronome.errors import EqualityViolated
from metronome.periodic.sources import Bounded
from metronome_local import host, pool, worker
from metronome_local.placement import placement_of
from metronome_local.recipe import Machine, Training
from metronome_local.trainer import Trainer
from metronome_local.weights import SharedWeights

pytestmark = pytest.mark.timeout(120)
worker_threads = test_local_bad_input.worker_threads
SYNCHRONOUS = {"rollout_source": "synchronous"}


def until(true, seconds=20.0):
    """Waits for something to become true."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


# --- cores ----------------------------------------------------------------------------------------


@pytest.fixture
def cores():
    """The cores of this thread, given back whatever a test leaves."""
    if not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores to divide")
    before = os.sched_getaffinity(0)
    yield before
    os.sched_setaffinity(0, before)


def test_every_variant_of_a_comparison_gets_the_cores_that_the_first_one_got(
    tiny_recipe, tmp_path, monkeypatch, worker_threads, cores
):
    placements, asked = [], placement_of
    monkeypatch.setattr(
        metronome_local.build,
        "placement_of",
        lambda machine: placements.append(asked(machine)) or placements[-1],
    )
    recipe = tiny_recipe(training={"periods": 1, "prompts": 2}, machine={"pin": True})
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    arguments = ["compare", str(tmp_path / "recipe.yaml"), "--vary", "training.lr=0.01,0.02,0.03"]
    assert main([*arguments, "--output", str(tmp_path / "out")]) == 0
    assert len(placements) == 3
    assert placements[0].trainer is not None
    assert placements[1] == placements[2] == placements[0]
    assert os.sched_getaffinity(0) == cores


def test_a_trainer_is_bound_while_it_lives_and_free_when_it_is_closed(tiny_recipe, tmp_path, worker_threads, cores):
    recipe = tiny_recipe(machine={"pin": True})
    for name in ("one", "two"):
        with built(recipe, tmp_path / name) as trainer:
            mine = trainer.parts.placement.trainer
            assert os.sched_getaffinity(0) == set(mine) < cores
            assert placement_of(Machine(workers=1, threads=1)).trainer is None  # what a second run would have got
        assert os.sched_getaffinity(0) == cores


# --- publications ---------------------------------------------------------------------------------


def test_a_worker_lost_while_the_optimiser_steps_is_replaced_and_not_blamed_for_the_weights(
    tiny_recipe, tmp_path, worker_threads
):
    recipe = tiny_recipe(training={"mini_batches": 2, "periods": 2}, metronome=SYNCHRONOUS)
    with built(recipe, tmp_path / "run") as trainer:
        workers = trainer.parts.pool

        def losing(*_):  # the shared buffer has other weights than those published
            if workers.restarts == 0:
                workers._workers[0].connection.send(("stop",))
                until(lambda: workers.restarts == 1 and workers._workers[0].ready)
                time.sleep(0.3)  # long enough to apply what it might have been sent

        trainer.parts.optimiser.register_step_post_hook(losing)
        host.train(trainer, trainer.console)
    assert [record["worker_restarts"] for record in periods_in(tmp_path / "run")] == [1, 1]


class Scripted:
    """A worker's process that answers as a worker does; it applies weights in ``slowness`` seconds."""

    pid, exitcode = 0, -9

    def __init__(self, connection, slowness):
        self.sentinel, self._ended = os.pipe()
        self.connection, self.slowness, self.told = connection, slowness, []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self):
        self.connection.send(("ready", 1.0))
        while (message := self.connection.recv())[0] != "stop":
            self.told.append(message)
            if message[0] == "weights":
                time.sleep(self.slowness)
                self.connection.send(("applied", message[1], "the same"))
            elif message[0] == "pause":
                self.connection.send(("paused",))
        os.write(self._ended, b"x")

    def is_alive(self):
        return self._thread.is_alive()

    def join(self, timeout):
        self._thread.join(timeout)


def test_a_publication_waits_for_a_replaced_worker_that_still_applies_the_version_before(monkeypatch):
    spawned = []

    def spawn(self, number):
        ours, theirs = self._context.Pipe()
        spawned.append(Scripted(theirs, slowness=0.5 * len(spawned)))
        return pool._Worker(number, spawned[-1], ours)

    monkeypatch.setattr(pool.RolloutPool, "_spawn", spawn)
    weights = SimpleNamespace(fingerprint=lambda _: "the same")
    workers = pool.RolloutPool(weights, [None], fingerprint_dtype=None, timeout=4, max_restarts=1)
    workers.publish(0, lambda: None)
    workers._workers[0].connection.send(("stop",))
    until(lambda: len(spawned) == 2 and spawned[1].told)
    written = []
    workers.hold()
    workers.publish(1, lambda: written.append(list(spawned[1].told)))
    assert written == [[("weights", 0), ("pause", "finish")]]
    workers.close()


def stepping(lr, schedule=lambda _: 1.0, written=True):
    """A trainer of a model whose weights are all 0.5, the published dtype being bfloat16."""
    made = tiny_local.model()
    for parameter in made.parameters():
        torch.nn.init.constant_(parameter, 0.5)
        parameter.grad = torch.ones_like(parameter)
    optimiser = torch.optim.SGD(made.parameters(), lr=lr)
    weights = SharedWeights(made)

    def publish(version, write, in_flight):
        if written:
            write()
        parts.pool.fingerprint = weights.fingerprint(torch.bfloat16)
        return parts.pool.fingerprint

    parts = SimpleNamespace(
        recipe=SimpleNamespace(training=Training(max_grad_norm=1e9), machine=SimpleNamespace(timeout=1.0)),
        selection=SimpleNamespace(rollout_source=None, group_controller=None),
        pool=SimpleNamespace(hold=lambda: None, publish=publish, fingerprint=""),
        rollouts=SimpleNamespace(prompt_at=None, describe=str),
        gradient=SimpleNamespace(parameters=list(made.parameters())),
        optimiser=optimiser,
        scheduler=torch.optim.lr_scheduler.LambdaLR(optimiser, schedule),
        progress=SimpleNamespace(phase=lambda *_: None),
        model=made,
        weights=weights,
    )
    trainer = Trainer(parts)
    trainer.publish()
    return trainer


def test_a_step_too_small_for_bfloat16_counts_as_a_step():
    trainer = stepping(lr=1e-6)
    before = trainer.parts.weights.fingerprint(torch.bfloat16)
    trainer.step()
    trainer.publish()
    assert trainer.parts.weights.fingerprint(torch.bfloat16) == before  # nothing to see in half precision
    trainer = stepping(lr=1e-6, written=False)
    trainer.step()
    with pytest.raises(EqualityViolated, match="weights of the version before"):
        trainer.publish()


def test_the_step_is_judged_by_the_learning_rate_that_it_was_made_with():
    trainer = stepping(lr=0.1, schedule=lambda step: float(step > 0))
    trainer.step()  # at 0: nothing moves, and the next one's rate doesn't matter
    trainer.publish()
    trainer = stepping(lr=0.1, schedule=lambda step: float(step == 0), written=False)
    trainer.step()
    with pytest.raises(EqualityViolated):
        trainer.publish()


# --- folders, records --------------------------------------------------------------------------------


def test_two_processes_never_share_a_run_folder(monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda _: "20260101-000000")
    mine = host.default_folder("demo")
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert host.default_folder("demo") != mine
    assert mine.parent == Path("runs")


def test_several_steps_a_period_are_timed_and_measured_over_all_mini_batches(tiny_recipe, tmp_path, worker_threads):
    recipe = tiny_recipe(training={"mini_batches": 2, "epochs": 2, "periods": 1}, metronome=SYNCHRONOUS)
    with built(recipe, tmp_path / "run") as trainer:
        gradient, seen = trainer.parts.gradient, []
        add, finish = gradient.add, gradient.finish

        def slow(*arguments):
            time.sleep(0.05)
            add(*arguments)

        def finished():
            seen.append((finish(), dict(gradient.meter.sums), dict(gradient.meter.maxima)))
            return seen[-1][0]

        gradient.add, gradient.finish = slow, finished
        trainer.parts.optimiser.register_step_pre_hook(lambda *_: time.sleep(0.05))
        host.train(trainer, trainer.console)
    (record,) = periods_in(tmp_path / "run")
    assert len(seen) == 4
    assert 0.4 <= record["seconds_training"] < record["seconds"]  # eight visits of a group
    assert 0.2 <= record["seconds_step"] < record["seconds"]
    assert record["seconds_closed_form"] == pytest.approx(record["seconds"], abs=0.15)
    assert record["loss/loss"] == pytest.approx(statistics.fmean(metrics["loss"] for metrics, *_ in seen))
    total = [sum(sums["ratio"][place] for _, sums, _ in seen) for place in (0, 1)]
    assert record["loss/ratio"] == pytest.approx(total[0] / total[1])
    assert record["loss/ratio"] != pytest.approx(seen[-1][0]["ratio"], rel=1e-9)
    assert record["loss/ratio_max"] == max(maxima["ratio"] for *_, maxima in seen)


def test_peak_memory_is_the_processs_own_and_not_its_parents(monkeypatch):
    status = Path("/proc/self/status")
    if not status.is_file():
        pytest.skip("no /proc here")
    monkeypatch.setattr(
        worker,
        "resource",
        SimpleNamespace(RUSAGE_SELF=0, getrusage=lambda _: SimpleNamespace(ru_maxrss=2**40)),
    )
    (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
    assert worker.peak_memory() == pytest.approx(int(line.split()[1]) / 1024, rel=0.05)


def test_groups_go_out_with_the_size_of_the_open_period_whatever_the_controller_says_meanwhile(tiny_recipe):
    sizes, sent = iter(range(2, 100)), []

    def generate(prompt, size):
        sent.append(size)
        return Future()

    controller = SimpleNamespace(
        name="restless",
        size=lambda: next(sizes),
        largest=lambda: 100,
        prompts=lambda budget, multiple: 4,
    )
    recipe = SimpleNamespace(training=Training(prompts=4), machine=SimpleNamespace(timeout=1.0))
    clockless = SimpleNamespace(computed_tokens=0, separate_tokens=0, attention_calls=0)
    parts = SimpleNamespace(
        recipe=recipe,
        selection=SimpleNamespace(rollout_source=Bounded(max_staleness=1), group_controller=controller),
        gradient=SimpleNamespace(proximal_seconds=0.0, loss_calls=0, log_probs=clockless),
        rollouts=SimpleNamespace(prompt_at=lambda index: index, generate=generate, describe=str),
        progress=SimpleNamespace(phase=lambda *_: None),
    )
    trainer = Trainer(parts)
    assert trainer._open().size == 2
    assert sent == [2] * 8  # this period's and, at staleness 1, the next one's
    trainer.stream.close()
