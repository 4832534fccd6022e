"""Whole runs of the local host with a tiny model: what a run leaves behind, what it survives, and how it ends."""

import contextlib
import io
import json
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
from rich.console import Console

from metronome.errors import ConfigurationError, WaitTimeout, WorkerFailed
from metronome_local import host
from metronome_local.progress import read_jsonl

pytestmark = pytest.mark.timeout(150)

# A reward function that sends its own process a signal, the second time that it is called after a file says so.
SIGNALLING = '''"""A reward function that ends its own run."""

import multiprocessing
import os
import pathlib

calls = 0


def early(prompts, completions, **columns):
    """The share of characters that come before "P"."""
    global calls
    number, path, text, note = os.environ.get("METRONOME_TEST_SIGNAL", "0||| ").split("|")
    if int(number) and pathlib.Path(path).is_file() and text in pathlib.Path(path).read_text():
        calls += 1
        if calls == 2:
            pids = [str(child.pid) for child in multiprocessing.active_children()]
            pathlib.Path(note).write_text(" ".join(pids))
            os.kill(os.getpid(), int(number))
    return [sum(c < "P" for c in text) / max(1, len(text)) for text in completions]
'''
# Prompts whose index is a multiple of three speak for long, so that publications meet them in the middle.
UNEVEN = '''"""Rollout functions of the tests."""

from metronome_local.rollouts import Request, Row


def uneven(prompt, tokenizer):
    """120 tokens for every third prompt, 3 for the others."""
    row = Row(list(prompt.ids))
    row.add_sampled((yield Request(prompt.ids, 120 if prompt.index % 3 == 0 else 3)))
    return [row]


def broken(prompt, tokenizer):
    """Raises at the prompt with index 2."""
    row = Row(list(prompt.ids))
    row.add_sampled((yield Request(prompt.ids)))
    if prompt.index == 2:
        raise RuntimeError("the tool is down")
    return [row]
'''
SAGC = {"sizes": [2, 4], "start": 2, "tau": 1.3, "delta": 0.2, "eta": 0.6, "min_dwell": 1}


@contextlib.contextmanager
def built(recipe, folder, resume=False):
    """A trainer in this process, its workers beside it; ended whatever happens."""
    console = Console(file=io.StringIO(), width=200)
    parts = host.validate(recipe, "the test's recipe")
    trainer = host.build(*parts, folder, console, base=folder.parent, resume=str(folder) if resume else None)
    trainer.console = console
    try:
        yield trainer
    finally:
        trainer.close()
        trainer.parts.progress.close()
        assert not any(worker.process.is_alive() for worker in trainer.parts.pool._workers)


def train(recipe, folder, resume=False):
    """Trains to the end; returns the trainer with what it left behind."""
    with built(recipe, folder, resume) as trainer:
        host.train(trainer, trainer.console)
    return trainer


def groups_in(folder):
    return read_jsonl(folder / "groups.jsonl")


def periods_in(folder):
    return [record for record in read_jsonl(folder / "metrics.jsonl") if "fingerprint" in record]


def trained_in(folder):
    """Prompt index -> period; every prompt counted once."""
    trained = {group["index"]: group["period"] for group in groups_in(folder)}
    assert len(trained) == len(groups_in(folder))
    return trained


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


@pytest.fixture(scope="module")
def resumable(tiny_model, tmp_path_factory):
    """A recipe in which nothing depends on time: one slot, so that groups arrive in the order of their prompts."""
    folder = tmp_path_factory.mktemp("resumable")
    (folder / "signalling.py").write_text(SIGNALLING)
    return {
        "host": "local",
        "model": {"name": str(tiny_model)},
        "task": {
            "kind": "dataset",
            "path": str(tiny_model / "prompts.jsonl"),
            "reward": f"{folder / 'signalling.py'}:early",
            "held_out": 0.2,
        },
        "sampling": {"max_tokens": 8, "max_prompt_tokens": 64, "slots": 1, "fixed_lengths": [2, 8]},
        "training": {
            "periods": 5,
            "prompts": 4,
            "lr": 1e-2,
            "schedule": "linear",
            "kl": 0.05,
            "weight_decay": 0.1,
        },
        "evaluation": {"every": 2, "max_prompts": 2},
        "machine": {"workers": 1, "threads": 1, "pin": False, "timeout": 60},
        "checkpoints": {"every": 2},
        "metronome": {
            "rollout_source": "periodic",
            "periodic": {"audit_every": 2},
            "loss": "a3po",
            "attention": "shared_prompt",
            "shared_prompt": {"backend": "cascade"},
            "group_controller": "sagc",
            "sagc": SAGC,
        },
    }


@pytest.fixture(scope="module")
def whole(resumable, tmp_path_factory):
    """The uninterrupted run of ``resumable``: its folder and its trainer."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return folder, train(resumable, folder)


# --- what a run leaves behind -------------------------------------------------------------------------


def test_a_run_leaves_metrics_groups_a_board_and_checkpoints(whole):
    folder, trainer = whole
    records = periods_in(folder)
    assert [record["period"] for record in records] == [1, 2, 3, 4, 5]
    assert records == json.loads(
        json.dumps(
            [r | {"group/explanation": e["group/explanation"]} for r, e in zip(trainer.history, records, strict=True)]
        )
    )
    for number, record in enumerate(records):
        assert record["version"] == number
        assert record["tpspd"] > 0
        assert record["tpspd"] == pytest.approx(record["tokens"] / record["seconds"] / 2)
        assert all(
            record[f"calls/{hook}"] > 0 for hook in ("rollout_source", "policy_loss", "attention", "group_controller")
        )
        assert len(record["arrivals"]) == record["calls/rollout_source"] == record["prompts"]
        assert record["tokens_computed"] > 0
        assert record["seconds"] > record["seconds_training"] > 0
    assert list((folder / "tensorboard").glob("events*"))
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["000004", "000005"]
    evaluated = [r["period"] for r in read_jsonl(folder / "metrics.jsonl") if "held_out_accuracy" in r]
    assert evaluated == [0, 2, 4, 5]
    assert yaml.safe_load((folder / "recipe.yaml").read_text())["sampling"]["slots"] == 1


def test_every_prompt_is_trained_once_at_the_version_that_sampled_it(whole):
    folder, _ = whole
    trained = trained_in(folder)
    assert sorted(trained) == list(range(len(trained)))
    for group in groups_in(folder):
        assert group["versions"] == [group["trained_at"]] == [group["period"] - 1]
        assert len(group["rewards"]) == len(group["texts"]) == group["size"]
    for record in periods_in(folder):
        mine = [group for group in groups_in(folder) if group["period"] == record["period"]]
        assert len(mine) == record["prompts"]
        assert {group["size"] for group in mine} == {record["group_size"]}
        assert record["prompts"] * record["group_size"] == 16  # fixed rollouts


def test_the_controller_moves_and_each_publication_has_weights_of_its_own(whole):
    records = periods_in(whole[0])
    assert {record["group_size"] for record in records} == {2, 4}
    assert len({record["fingerprint"] for record in records}) == len(records)


def test_an_audited_period_finds_the_streamed_gradient(whole):
    differences = [record.get("loss/audit_difference") for record in periods_in(whole[0])]
    assert [found is not None for found in differences] == [True, False, True, False, True]
    assert all(0.0 < found < 1e-4 for found in differences if found is not None)  # two backends, two roundings


def test_audits_that_could_not_tell_are_refused(tiny_recipe):
    name = tiny_recipe()["model"]["name"]
    audit = {"periodic": {"audit_every": 1, "strict": False}}
    host.validate(tiny_recipe(metronome=audit), "the test's recipe")
    with pytest.raises(ConfigurationError, match=r"rounding alone.*audit_tolerance"):
        host.validate(tiny_recipe(model={"name": name, "dtype": "bfloat16"}, metronome=audit), "the test's recipe")
    with pytest.raises(ConfigurationError, match=r"makes several steps.*audit_every: 0"):
        host.validate(tiny_recipe(training={"epochs": 2}, metronome=audit), "the test's recipe")


def test_a_synchronous_run_of_the_same_seed_trains_the_same_prompts_with_the_same_gradient(whole, resumable, tmp_path):
    folder = tmp_path / "run"
    recipe = {**resumable, "training": {**resumable["training"], "periods": 2}, "evaluation": {"every": 0}}
    recipe["sampling"] = {**resumable["sampling"], "slots": 8}  # other neighbours, the same samples
    recipe["metronome"] = {
        key: "synchronous" if key == "rollout_source" else value
        for key, value in resumable["metronome"].items()
        if key != "periodic"
    }
    train(recipe, folder)
    first = {group["index"]: group for group in groups_in(folder) if group["period"] == 1}
    wanted = {group["index"]: group for group in groups_in(whole[0]) if group["period"] == 1}
    assert first.keys() == wanted.keys()
    for index, group in first.items():
        assert group["texts"] == wanted[index]["texts"]
        assert group["rewards"] == wanted[index]["rewards"]
    synchronous, periodic = periods_in(folder), periods_in(whole[0])
    assert synchronous[0]["loss/grad_norm"] == pytest.approx(periodic[0]["loss/grad_norm"], rel=1e-4)
    assert synchronous[1]["loss/grad_norm"] != pytest.approx(synchronous[0]["loss/grad_norm"], rel=1e-4)
    assert trained_in(folder).items() <= trained_in(whole[0]).items()


# --- what a run survives ------------------------------------------------------------------------------


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
    score, publish = trainer.parts.scorer.score, pool.publish

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

    trainer.parts.scorer.score, pool.publish = scored, published


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


# --- bounded staleness --------------------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", ["finish", "abort", "resume"])
def test_a_bounded_run_reaches_its_staleness_and_never_passes_it(tiny_recipe, tmp_path, in_flight):
    (tmp_path / "rollouts.py").write_text(UNEVEN)
    folder = tmp_path / "run"
    recipe = tiny_recipe(
        sampling={"rollout": f"{tmp_path / 'rollouts.py'}:uneven", "max_tokens": 120, "slots": 64},
        training={"periods": 5, "in_flight": in_flight, "lr": 1e-3},
        metronome={
            "rollout_source": "bounded",
            "bounded": {"max_staleness": 2},
            "loss": "a3po",
            "fixed": {"size": 2},
        },
    )
    with built(recipe, folder) as trainer:
        rows, add, pool = [], trainer.parts.gradient.add, trainer.parts.pool

        def noted(groups, version, *rest):
            # The third period waits for the long rollouts, which publications have met in the middle.
            deadline = time.monotonic() + 30
            while version == 2 and time.monotonic() < deadline:
                if not any(one.job.prompt.index % 3 == 0 for one in list(pool._pending.values())):
                    break
                time.sleep(0.02)
            rows.extend((version, group.index, row) for group in groups for row in group.rows)
            add(groups, version, *rest)

        trainer.parts.gradient.add = noted
        host.train(trainer, trainer.console)
    trained = trained_in(folder)
    assert len(trained) == 20
    assert trained.keys() == {index for _, index, _ in rows}
    staleness = [version - v for version, _, row in rows for v in row.versions]
    records = periods_in(folder)
    assert max(staleness) == max(record["loss/staleness_max"] for record in records) == 2
    assert min(staleness) == 0
    spanning = {index for _, index, row in rows if len(set(row.versions)) > 1}
    for _, _, row in rows:
        assert row.versions == sorted(row.versions)
    counts = {name: sum(record[name] for record in records) for name in ("dropped", "aborted")}
    again = {group["index"] for group in groups_in(folder) if group["index"] < 12 and 0 not in group["versions"]}
    assert bool(again) == (in_flight == "abort")  # the first twelve go out at version 0
    assert (counts["aborted"] > 0) == (in_flight == "abort")
    assert bool(spanning) == (in_flight == "resume")
    if in_flight == "resume":
        assert any(len(group["versions"]) > 1 for group in groups_in(folder))
        assert counts["dropped"] > 0  # by the third period the long ones of the first are at the bound
    # Whatever was dropped or aborted is pending or trained, nothing is lost: all indices below the next are known.
    state = trainer.stream.state_dict()
    assert set(state["pending"]) | set(trained) == set(range(state["next_index"]))
    assert not set(state["pending"]) & set(trained)


# --- options ------------------------------------------------------------------------------------------


def test_lora_publishes_its_adapter_and_leaves_the_base_alone(tiny_recipe, tmp_path):
    pytest.importorskip("peft")
    recipe = tiny_recipe(
        model={"name": tiny_recipe()["model"]["name"], "lora": {"rank": 4, "targets": ["q_proj", "v_proj"]}},
        training={"kl": 0.1, "lr": 1e-2, "mini_batches": 2},
        metronome={"rollout_source": "synchronous"},
    )
    with built(recipe, tmp_path / "run") as trainer:
        model = trainer.parts.model
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        start = trainer.parts.weights.fingerprint()
        host.train(trainer, trainer.console)
        moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved
    assert all("lora_" in name for name in moved)
    fingerprints = [start] + [record["fingerprint"] for record in periods_in(tmp_path / "run")]
    assert len(set(fingerprints)) == 3
    assert all(record["loss/kl"] >= 0 for record in periods_in(tmp_path / "run"))
    saved = torch.load(tmp_path / "run" / "checkpoints" / "000002" / "trainer.pt", weights_only=True)
    assert saved["weights"].keys() == {name for name in before if "lora_" in name}


def test_half_precision_checkpointing_and_dynamic_sampling_train_together(tiny_recipe, tmp_path):
    folder = tmp_path / "run"
    base = tiny_recipe()
    recipe = tiny_recipe(
        model={"name": base["model"]["name"], "dtype": "bfloat16", "gradient_checkpointing": True},
        task={**base["task"], "reward": base["task"]["reward"].replace(":early", ":rare")},
        training={"algorithm": "dapo", "periods": 2, "lr": 3e-3},
        metronome={
            "periodic": {"audit_every": 1, "audit_tolerance": 0.1},
            "shared_prompt": {"backend": "cascade"},
        },
    )
    trainer = train(recipe, folder)
    records, groups = periods_in(folder), groups_in(folder)
    assert sum(record["filtered"] for record in records) > 0
    assert all(1e-4 < record["loss/audit_difference"] < 0.1 for record in records)
    for record in records:
        assert len([group for group in groups if group["period"] == record["period"]]) == 4
        assert record["calls/attention"] >= 4 * 2
    assert all(len(set(group["rewards"])) == 2 for group in groups)  # what has no differences was replaced
    trained_in(folder)
    assert records[0]["fingerprint"] != records[1]["fingerprint"]
    assert trainer.parts.model.dtype == torch.float32  # bf16 is how it computes, not what the optimiser holds
