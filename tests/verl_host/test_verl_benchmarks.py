"""The benchmarks against verl: their arithmetic, what they run, and tiny runs of what needs no Ray."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("verl", reason="the verl adapter's tests need verl (requirements/verl.txt)")
pytest.importorskip("transfer_queue", reason="verl's V1 trainer needs TransferQueue (requirements/verl.txt)")

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import verl_passes
import verl_periodic
import verl_sampler
import verl_table
import verl_update
from hydra import compose, initialize_config_dir
from verl.trainer.ppo.v1 import replay_buffer
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync

from metronome_verl import own
from metronome_verl.command import verl_config_folder
from metronome_verl.cpu import assets

WORK = {"hidden": 32, "layers": 1, "prompts": 4, "size": 2, "length": 8, "slots": 2, "delay": 0.01, "steps": 2}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- the suite's own time -----------------------------------------------------------------------------


def test_own_time_is_what_is_neither_verls_nor_a_wait_and_lateness_counts(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(own.time, "perf_counter", lambda: now[0])

    def passes(seconds):
        now[0] += seconds

    time = own.OwnTime()
    passes(0.5)  # ours
    with time.elsewhere():
        passes(8.0)
        with time.here():
            passes(0.25)  # ours, within verl's call
        passes(1.0)
    time.late = 0.125
    assert time.elapsed == 9.75
    assert time.seconds == 0.5 + 0.25 + 0.125


# --- periodic against verl's trainers -----------------------------------------------------------------


def step(number, seconds, **more):
    """A step of verl's logger: 4 s to generate, 4 s to train, 0.5 s to publish, and what else it took."""
    return {
        "step": number,
        "timing_s/step": seconds,
        "timing_s/gen": 4.0,
        "timing_s/old_log_prob": 1.0,
        "timing_s/adv": 0.5,
        "timing_s/update_actor": 2.5,
        "timing_s/update_weights": 0.5,
        "response_length/min": 8.0,
        "response_length/max": 8.0,
        "critic/score/mean": 0.5 + number / 100,
        "actor/grad_norm": 2.0,
        **more,
    }


def runs():
    """Four groups that arrive one second after another and take a second each; verl's own poll costs a second."""
    verls = [step(1, 60.0), *(step(number, 8.5 if number % 2 == 0 else 9.5) for number in range(2, 6))]
    ours = {
        "metronome/periodic/seconds_waiting": 1.0,
        "metronome/periodic/seconds_late": 0.05,
        "metronome/periodic/overhead": 0.01,
        "metronome/periodic/parts": 4,
        "timing_s/gen": 0.0,
    }
    return {
        "separate": {"metrics": verls, "arrivals": {str(n): [1.0, 2.0, 3.0, 4.0] for n in range(1, 6)}},
        "colocated": {"metrics": [step(n, 8.5 if n % 2 == 0 else 9.5) for n in range(1, 4)], "arrivals": {}},
        "periodic": {"metrics": [step(1, 60.0, **ours), *(step(n, 5.5, **ours) for n in range(2, 4))]},
    }


BESIDE = {"whole": 3.0, "parts": 3.3, "own": 0.055}


def test_ratio_bound_and_closed_form_are_those_of_the_measured_parts():
    found = verl_periodic.figures(runs(), 4, BESIDE)
    assert found["bound"] == 2.0  # generation and training take equally long
    assert found["bound_of_the_step"] == (4 + 4 + 0.5) / (4 + 0.5)
    # the last group's second of training stays: (4 + 4) / (4 + 1), publication on either side
    assert found["closed_form_ratio"] == pytest.approx((8 + 0.5) / (5 + 0.5))
    assert found["periodic_over_closed_form"] == pytest.approx(1.0)
    assert found["faster_than"] == pytest.approx(
        {
            "separate": 9.5 / 5.5,
            "separate_short_poll": 8.5 / 5.5,
            "colocated": 9.5 / 5.5,
            "colocated_short_poll": 8.5 / 5.5,
        }
    )
    assert found["passes"]["end_to_end"] == 1.0
    assert found["passes"]["in_one_process"] == pytest.approx(1.1)
    # the trainer's share, and what the worker adds
    assert found["overhead"]["share"] == pytest.approx(0.01 + 0.055 / 5.5)


def test_a_longer_half_lowers_the_bound_and_late_groups_the_closed_form():
    slower = runs()
    for one in slower["separate"]["metrics"]:
        one["timing_s/update_actor"] += 4.0
        one["timing_s/step"] += 4.0
    assert verl_periodic.figures(slower, 4, BESIDE)["bound"] == pytest.approx(12 / 8)
    late = runs()
    late["separate"]["arrivals"] = {str(number): [4.0] * 4 for number in range(1, 6)}
    found = verl_periodic.figures(late, 4, BESIDE)
    assert found["bound"] == 2.0
    assert found["closed_form_ratio"] == 1.0  # nothing to overlap with
    assert found["periodic_over_closed_form"] == pytest.approx(5.5 / 8.5)


def test_other_work_shows():
    same = verl_periodic.figures(runs(), 4, BESIDE)["same_work"]
    assert same["steps"] == 3
    assert same["response_lengths"] == [8.0]
    assert same["largest_score_difference"] == same["largest_grad_norm_difference"] == 0
    other = runs()
    other["periodic"]["metrics"][2].update({"actor/grad_norm": 2.2, "response_length/min": 7.0})
    found = verl_periodic.figures(other, 4, BESIDE)["same_work"]
    assert found["largest_grad_norm_difference"] == pytest.approx(0.1)
    assert found["response_lengths"] == [7.0, 8.0]


def test_what_was_measured_is_kept_for_the_same_work_only(tmp_path):
    made = []

    def measure():
        made.append(len(made))
        return {"seconds": len(made)}

    path = tmp_path / "separate.json"
    assert verl_periodic.kept(path, WORK, measure) == verl_periodic.kept(path, WORK, measure)
    assert verl_periodic.kept(path, {**WORK, "delay": 0.02}, measure)["seconds"] == 2


def test_the_delay_makes_generation_as_long_as_training():
    # 4 groups of 2 in 2 slots, one after another, 8 steps each; an update of 3 s and a third of it for old log-probs
    assert verl_periodic.balanced(3.0, WORK) * 4 * 8 == 4.0
    assert verl_periodic.balanced(3.0, {**WORK, "slots": 4}) * 2 * 8 == 4.0


def test_verls_separate_run_is_synchronous_and_all_three_do_the_same_work(tmp_path):
    found = {}
    for kind in verl_periodic.KINDS:
        with initialize_config_dir(config_dir=str(verl_config_folder()), version_base=None):
            found[kind] = compose("ppo_trainer", overrides=verl_periodic.overrides(kind, WORK, tmp_path))
    stock = found["separate"].trainer.v1
    assert (stock.trainer_mode, stock.separate_async.num_warmup_batches) == ("separate_async", 0)
    assert stock.separate_async.parameter_sync_step == 1  # so a step samples its whole batch, PPOTrainer.step
    assert PPOTrainerSeparateAsync.step is PPOTrainer.step
    for kind, config in found.items():
        actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
        assert (config.data.train_batch_size, rollout.n, config.data.max_response_length) == (4, 2, 8)
        assert rollout.ignore_eos
        assert not config.data.shuffle
        assert rollout.engine_kwargs.metronome_hf.seconds_per_token == 0.01
        assert actor.ppo_mini_batch_size == 4
        assert rollout.nnodes == (0 if kind == "colocated" else 1)
        assert config.trainer.total_training_steps == (5 if kind == "separate" else 3)


@pytest.mark.parametrize("number,pause", [(3, 2.0), (4, verl_sampler.SHORT)])
def test_the_sampler_looks_more_often_in_even_steps_and_notes_when_groups_came(monkeypatch, capsys, number, pause):
    now, pauses = [10.0], []

    def sleep(seconds):
        pauses.append(seconds)
        now[0] += seconds

    def listed():
        tags = {}
        for place, uid in enumerate(("a", "b")):
            done = now[0] - 10.0 >= pause * place - 1e-9
            tags[uid] = {"is_prompt": True, "global_steps": number, "status": "finished" if done else "running"}
            tags[f"{uid}_0_0"] = {"global_steps": number, "min_global_steps": number - 1}
        return {"train": tags}

    clock = SimpleNamespace(sleep=sleep, time=lambda: now[0], perf_counter=lambda: now[0])
    monkeypatch.setattr(replay_buffer, "time", clock)
    monkeypatch.setattr(verl_sampler, "time", clock)
    monkeypatch.setattr(replay_buffer, "tq", SimpleNamespace(kv_list=listed, kv_clear=lambda **_: None))
    made = verl_sampler.Separate("separate_async", {}, 8, "drop", {})
    batch, _ = made.sample(number, "train", 2)
    assert sorted(batch.keys) == ["a_0_0", "b_0_0"]
    assert pauses == [pause]
    assert made.poll_interval == 2.0
    text = "(TaskRunnerV1 pid=7) " + capsys.readouterr().out
    assert verl_periodic.arrivals_of(text) == {str(number): pytest.approx([0.0, pause])}


def test_parts_and_the_whole_are_both_timed_and_our_share_is_within(tmp_path):
    tiny = assets.make(tmp_path, hidden=32, layers=1)
    found = verl_passes.passes(tiny.model, groups=2, prompt=9, size=2, length=5, repeats=1)
    assert 0 < found["own"] < found["parts"]
    assert found["whole"] > 0


# --- the update ---------------------------------------------------------------------------------------


def test_the_update_benchmark_counts_tokens_as_the_theory_does_and_both_sides_compute_the_same():
    found = verl_update.measure((12, 3, 4), layers=1, repeats=1, threads=1)
    assert found["tokens"] == {"separate": 48, "fed": 24, "ratio": 2.0}
    assert found["theory_tokens"] == 2.0
    assert found["first_grad_norm"]["shared"] == pytest.approx(found["first_grad_norm"]["rows"], rel=1e-5)
    seconds = found["update"]["seconds"]
    assert found["update"]["over_the_faster"] == min(seconds["packed"], seconds["rows"]) / seconds["shared"]
    assert found["a3po"]["tokens"] == 12
    assert found["a3po"]["seconds"]["interpolation"] > 0
    json.dumps(found)


# --- the page -----------------------------------------------------------------------------------------


def test_the_page_is_written_between_its_marks_from_the_figures(monkeypatch, tmp_path):
    page = tmp_path / "README.md"
    page.write_text(f"before\n{verl_table.BEGIN}\nold\n{verl_table.END}\nafter\n")
    work = {**WORK, "hidden": 32}
    periodic = {"work": work, **verl_periodic.figures(runs(), 4, BESIDE)}
    times = {"packed": [3.0], "rows": [2.5, 2.0, 2.0], "shared": [0.5, 0.4, 0.5]}
    update = {
        "shape": [12, 3, 4],
        "threads": 1,
        "model": {"shape": "SmolLM2-135M"},
        "tokens": {"separate": 48, "fed": 24},
        "theory_tokens": 2.0,
        "update": verl_update.compared(times),
        "old_log_prob": verl_update.compared(times),
        "a3po": {
            "tokens": 12,
            "seconds": {"old_log_prob": 2.0, "interpolation": 1e-5, "loss": 3e-3, "loss_of_verl": 1e-3},
            "old_log_prob_over_interpolation": 2e5,
            "old_log_prob_over_all_that_the_loss_adds": 1e3,
        },
    }
    (tmp_path / "verl_periodic.json").write_text(json.dumps(periodic))
    (tmp_path / "verl_update.json").write_text(json.dumps(update))
    monkeypatch.setattr(verl_table, "FOLDER", tmp_path)
    verl_table.main()
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old\n" not in text
    assert "| 9.50 | 4.00 | 4.00 | 0.50 | 1.00 | **1.73x** |" in text
    assert "2.00 % (goal 2 %)" in text
    assert "| 3.0 | 2.0 | 0.5 | **4.00x** faster | 2.00x |" in text
    assert "2.00 ms for all that the loss does" in text
    once = text
    verl_table.main()
    assert page.read_text() == once
