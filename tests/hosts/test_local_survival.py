"""What a run of the local host survives, and how it ends when it can't: kills, interrupts, faults of workers."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import yaml
from tiny_runs import UNEVEN, built, groups_in, periods_in, train, trained_in

from metronome.errors import ConfigurationError, WaitTimeout, WorkerFailed
from metronome_local import host

pytestmark = pytest.mark.timeout(150)


def weights_of(trainer):
    return torch.cat([p.detach().flatten().clone() for p in trainer.parts.model.parameters()])


def gone(pid, seconds=15.0):
    """Whether a process ends within some seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    return False


def command(recipe, folder, *arguments, watch, note):
    """``metronome run`` in a process of its own, which sends itself a signal: ``watch`` is number, file, text."""
    path = folder.parent / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    number, file, text = watch
    environment = {**os.environ, "METRONOME_TEST_SIGNAL": f"{number:d}|{file}|{text}|{note}"}
    return subprocess.run(
        [sys.executable, "-m", "metronome.cli", "run", str(path), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.timeout(300)
def test_a_run_killed_and_then_interrupted_resumes_to_the_weights_of_an_uninterrupted_one(whole, resumable, tmp_path):
    folder, note = tmp_path / "run", tmp_path / "note"
    killed = command(
        resumable,
        folder,
        "--output",
        str(folder),
        watch=(signal.SIGKILL, folder / "checkpoints" / "000002" / "state.json", ""),
        note=note,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    (worker,) = note.read_text().split()
    assert gone(worker)  # a worker doesn't outlive its trainer
    assert max(trained_in(folder).values()) == 2

    note.unlink()
    interrupted = command(
        resumable,
        folder,
        "--resume",
        str(folder),
        watch=(signal.SIGINT, folder / "metrics.jsonl", '"period": 3'),
        note=note,
    )
    assert interrupted.returncode == 130, interrupted.stderr
    assert interrupted.stderr.strip() == ""
    assert f"continue with --resume {folder}" in interrupted.stdout
    assert gone(note.read_text().split()[0])
    assert (folder / "checkpoints" / "000003" / "trainer.pt").is_file()
    assert max(trained_in(folder).values()) == 3

    resumed = train(resumable, folder, resume=True)
    uninterrupted_folder, uninterrupted = whole
    assert trained_in(folder) == trained_in(uninterrupted_folder)
    mine, wanted = periods_in(folder), periods_in(uninterrupted_folder)
    # One slot: nothing depends on timing, so the runs are equal bit by bit.
    for key in (
        "period",
        "version",
        "fingerprint",
        "group_size",
        "prompts",
        "reward",
        "lr",
        "loss/grad_norm",
    ):
        assert [record[key] for record in mine] == [record[key] for record in wanted], key
    assert torch.equal(weights_of(resumed), weights_of(uninterrupted))
    assert resumed.controller.state_dict() == uninterrupted.controller.state_dict()
    assert resumed.stream.state_dict() == uninterrupted.stream.state_dict()
    assert resumed.accuracies == uninterrupted.accuracies


def test_an_interrupt_before_the_first_period_ends_cleanly_too(resumable, tmp_path):
    with built(resumable, tmp_path / "run") as trainer:
        timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        host.train(trainer, trainer.console)
        timer.join()
        assert trainer.interrupted
        assert trainer.period == 0
    assert (tmp_path / "run" / "checkpoints" / "000000" / "state.json").is_file()


def killing(trainer):
    """Kills the first worker when the second group is scored, the second when version 1 is published."""
    pool, calls = trainer.parts.pool, []
    score, publish = trainer.parts.rollouts.scorer.score, pool.publish

    def scored(group):
        calls.append(group.prompt.index)
        if len(calls) == 2:
            os.kill(pool.process_ids()[0], signal.SIGKILL)
        return score(group)

    def published(version, write, in_flight):
        def written():
            if version == 1:
                os.kill(pool.process_ids()[1], signal.SIGKILL)
            write()

        return publish(version, written, in_flight)

    trainer.parts.rollouts.scorer.score, pool.publish = scored, published


def test_killed_workers_are_replaced_and_their_prompts_go_out_again_with_the_same_samples(whole, resumable, tmp_path):
    folder = tmp_path / "run"
    recipe = {**resumable, "training": {**resumable["training"], "periods": 2}, "evaluation": {"every": 0}}
    recipe["machine"] = {**resumable["machine"], "workers": 2}
    with built(recipe, folder) as trainer:
        killing(trainer)
        before = trainer.parts.pool.process_ids()
        host.train(trainer, trainer.console)
        after = trainer.parts.pool.process_ids()
    assert not set(before) & set(after)
    assert [record["worker_restarts"] for record in periods_in(folder)] == [2, 2]
    trained = trained_in(folder)
    assert trained == {i: period for i, period in trained_in(whole[0]).items() if period <= 2}
    for group in groups_in(folder):
        assert group["versions"] == [group["period"] - 1]
    wanted = {group["index"]: group["texts"] for group in groups_in(whole[0])}
    assert all(group["texts"] == wanted[group["index"]] for group in groups_in(folder) if group["period"] == 1)


def test_a_worker_that_cannot_be_replaced_stops_the_run_with_the_reason(resumable, tmp_path):
    with built({**resumable, "evaluation": {"every": 0}}, tmp_path / "run") as trainer:
        pool = trainer.parts.pool
        trainer.start()

        def spawn(number):
            raise OSError(12, "Cannot allocate memory")

        pool._spawn = spawn
        os.kill(pool.process_ids()[0], signal.SIGKILL)
        with pytest.raises(WorkerFailed, match=r"worker 0 died and can't be replaced.*allocate memory.*exit code -9"):
            trainer.run_period()


def test_a_worker_that_stands_still_or_dies_without_restarts_left_stops_the_run_with_the_reason(resumable, tmp_path):
    recipe = {**resumable, "machine": {**resumable["machine"], "max_restarts": 0}, "evaluation": {"every": 0}}
    with built(recipe, tmp_path / "run") as trainer:
        trainer.start()
        trainer.stream._timeout = 1.5
        (worker,) = trainer.parts.pool.process_ids()
        os.kill(worker, signal.SIGSTOP)
        with pytest.raises(WaitTimeout, match=r"no group arrived in 1\.5 s while 8 were running.*worker 0: 8 groups"):
            trainer.run_period()
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(WorkerFailed, match=r"worker 0 died.*exit code -9.*machine\.max_restarts"):
            list(trainer.stream.arrivals())


def test_a_rollout_function_that_raises_stops_the_run_with_its_error(tiny_recipe, tmp_path):
    (tmp_path / "rollouts.py").write_text(UNEVEN)
    recipe = tiny_recipe(sampling={"rollout": f"{tmp_path / 'rollouts.py'}:broken"})
    said = pytest.raises(ConfigurationError, match=r"RuntimeError: the tool is down; found 2; in .*broken")
    with built(recipe, tmp_path / "run") as trainer, said:
        host.train(trainer, trainer.console)
