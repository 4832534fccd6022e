"""The AReaL benchmarks: their engine, their stopwatch, and the figures that are made of what they measure."""

import asyncio
import functools
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("areal", reason="the AReaL adapter's tests need AReaL (requirements/areal.txt)")

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import areal_passes
import areal_periodic
import areal_room as room
import areal_table
import areal_timed
import areal_update
import simulated
import torch
from areal.engine.fsdp_engine import FSDPEngine

from metronome_areal.accumulate import Accumulation
from metronome_areal.cpu import assets
from metronome_areal.periodic import PeriodicActor

WORK = {"hidden": 32, "layers": 1, "prompts": 4, "size": 2, "longest": 32, "slots": 3, "pack": 256, "delay": 0.001}
WORK |= {"steps": 1, "tokens": 40}
BESIDE = {"whole": 3.0, "parts": 3.3}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- the engine ---------------------------------------------------------------------------------------


def test_the_engine_decodes_as_many_at_a_time_as_it_has_slots_and_every_batch_takes_as_long():
    request = SimpleNamespace(input_ids=[5, 6], tokenizer=None)

    async def batch(engine):
        now = asyncio.get_running_loop().time
        begun = now()

        async def one():
            return await engine.agenerate(request), now() - begun

        return await asyncio.gather(*[one() for _ in range(8)])

    async def batches():
        engine = areal_timed.Sleeping(SimpleNamespace(get_version=lambda: 7), {**WORK, "delay": 0.004})
        return [await batch(engine), await batch(engine)]

    first, second = asyncio.run(batches())
    wanted = simulated.lengths(8, 32)
    for found in (first, second):
        assert [len(one.output_tokens) for one, _ in found] == wanted
        least = 0.004 * simulated.decode_steps(wanted, 3)
        assert least - 1e-6 <= max(seconds for _, seconds in found) < 0.004 * sum(wanted)  # a clock's rounding
    assert first[0][0].output_tokens != second[0][0].output_tokens
    assert first[0][0].output_versions == [7] * wanted[0]


# --- the stopwatch ------------------------------------------------------------------------------------


def test_of_nested_calls_the_innermost_is_timed_and_the_watch_comes_off(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(areal_timed.time, "perf_counter", lambda: now[0])

    class Nested:
        def inner(self):
            now[0] += 1.0

        def outer(self):
            now[0] += 0.5
            self.inner()
            now[0] += 2.0
            raise ValueError("as the host may")

    before = Nested.inner
    with areal_timed.Watch() as watch:
        one = Nested()
        watch.over(Nested, "inner", "training")
        watch.over(one, "outer", "own")
        one.inner()
        now[0] += 100.0  # nobody's
        with pytest.raises(ValueError, match="as the host may"):
            one.outer()
        assert watch.taken() == {"training": 2.0, "own": 2.5}
        assert watch.taken() == {}
    assert Nested.inner is before
    assert "outer" not in vars(one)


def trained(folder, kind):
    """The steps of a run."""
    assets.make(folder, hidden=32, layers=1)
    rows = areal_periodic.prompts(WORK)
    return areal_periodic.run(kind, WORK, folder, rows)["steps"]


@pytest.mark.parametrize("slow", [0.0, 0.3])
def test_what_our_loop_does_itself_is_own_time_and_what_areal_does_is_not(tmp_path, monkeypatch, slow):
    """Slowed down in our code it is own time; AReaL's passes are slowed down in either case."""
    forward, begin = FSDPEngine.forward_backward_batch, Accumulation.begin
    sleep = areal_timed.time.sleep

    @functools.wraps(forward)  # its arguments are what check_host sees
    def slowly(self, *arguments, **named):
        sleep(0.1)
        return forward(self, *arguments, **named)

    def slow_begin(self):
        sleep(slow)
        begin(self)

    monkeypatch.setattr(FSDPEngine, "forward_backward_batch", slowly)
    monkeypatch.setattr(Accumulation, "begin", slow_begin)
    prepare = PeriodicActor.prepare_batch
    steps = trained(tmp_path, "periodic")
    assert PeriodicActor.prepare_batch is prepare
    for one in steps:
        found = one["seconds"]
        assert found["step"] == pytest.approx(sum(found[part] for part in areal_periodic.PARTS[1:]))
        assert min(found.values()) >= 0.0
        assert found["training"] > 0.1 * 2 * one["metrics"]["metronome/periodic/parts"]  # log-probs, and the update
        assert slow < found["own"] < slow + 0.25
    assert steps[0]["groups"] == []


def test_areals_own_steps_say_when_each_group_came_and_do_the_same_work_as_ours(tmp_path):
    steps = trained(tmp_path / "stock", "synchronous")
    lengths = simulated.lengths(8, 32)
    wanted = [2 * 40 + sum(lengths[at : at + 2]) for at in range(0, 8, 2)]
    for one in steps:
        found = one["seconds"]
        assert found["own"] == 0.0
        assert len(one["groups"]) == 4
        assert sorted(tokens for _, tokens in one["groups"]) == sorted(wanted)
        assert 0.0 < max(one["groups"])[0] <= found["waiting"] + 0.01
    ours = trained(tmp_path / "ours", "periodic")
    same = areal_periodic.alike(steps, ours)
    assert same["steps"] == 2
    assert same["largest_reward_difference"] < 1e-6
    assert same["largest_grad_norm_difference"] < 1e-5
    assert min(same["grad_norms"]) > 0


# --- periodic against AReaL's loop --------------------------------------------------------------------


def step(seconds, groups=(), norm=2.0, **parts):
    """A step: 4 s to generate, 4 s to train, 0.5 s to publish, and what else it took."""
    found = {"step": seconds, "waiting": 4.0, "training": 4.0, "own": 0.0, "publication": 0.5, "rest": 0.0, **parts}
    metrics = {areal_periodic.NORM: norm, "rollout/reward": 0.5, "metronome/periodic/parts": 4.0}
    return {"seconds": found, "groups": list(groups), "metrics": metrics}


def runs(tokens=(20, 20, 20, 20)):
    """Four groups that arrive one second after another and take a second each."""
    came = list(zip([1.0, 2.0, 3.0, 4.0], tokens, strict=True))[::-1]
    ours = {"waiting": 1.0, "training": 3.89, "own": 0.11}
    return {
        "synchronous": {"steps": [step(60.0, came), step(8.5, came), step(8.5, came)]},
        "periodic": {"steps": [step(60.0, **ours), step(5.5, **ours), step(5.5, **ours)]},
    }


def test_ratio_bound_and_closed_form_are_those_of_the_measured_parts():
    found = areal_periodic.figures(runs(), WORK, BESIDE)
    assert found["faster"] == pytest.approx(8.5 / 5.5)
    assert found["bound"] == 2.0  # generation and training take equally long
    assert found["bound_of_the_step"] == (4 + 4 + 0.5) / (4 + 0.5)
    # the last group's second of training stays: (4 + 4) / (4 + 1), publication on either side
    assert found["closed_form_ratio"] == pytest.approx((8 + 0.5) / (5 + 0.5))
    assert found["periodic_over_closed_form"] == pytest.approx(1.0)
    assert found["overhead"]["share"] == pytest.approx(0.11 / 5.5)
    assert found["passes"]["end_to_end"] == pytest.approx(3.89 / 4)
    assert found["passes"]["in_one_process"] == pytest.approx(1.1)


def test_a_large_group_that_comes_last_lowers_the_closed_form():
    found = areal_periodic.figures(runs((10, 10, 10, 50)), WORK, BESIDE)
    assert found["closed_form_ratio"] == pytest.approx((8 + 0.5) / (4 + 4 * 50 / 80 + 0.5))
    assert found["bound"] == 2.0


def test_other_work_shows():
    same = areal_periodic.figures(runs(), WORK, BESIDE)["same_work"]
    assert same["steps"] == 3
    assert same["largest_reward_difference"] == same["largest_grad_norm_difference"] == 0
    other = runs()
    other["periodic"]["steps"][2]["metrics"].update({areal_periodic.NORM: 2.2, "rollout/reward": 0.6})
    found = areal_periodic.figures(other, WORK, BESIDE)["same_work"]
    assert found["largest_grad_norm_difference"] == pytest.approx(0.1)
    assert found["largest_reward_difference"] == pytest.approx(0.2)
    assert found["first_grad_norm_difference"] == 0


def test_both_runs_get_the_same_settings_but_for_periodic_mode():
    one, other = (areal_periodic.keys(kind, WORK) for kind in areal_periodic.KINDS)
    assert other == {**one, "metronome.rollout_source": "periodic"}
    assert one["rollout.max_head_offpolicyness"] == 0


def test_prompts_differ_and_are_equally_long(tmp_path):
    made = areal_periodic.prompts(WORK)
    assets.make(tmp_path, hidden=32, layers=1)
    assert len({one["messages"][0]["content"] for one in made}) == 8
    assert {areal_periodic.tokens(tmp_path, [one]) for one in made} == {40}


def test_parts_and_the_whole_are_both_timed(tmp_path):
    assets.make(tmp_path, hidden=32, layers=1)
    config = room.configuration(tmp_path, areal_periodic.keys("synchronous", WORK))
    found = areal_passes.passes(config, WORK, repeats=1)
    assert found["whole"] > 0
    assert found["parts"] > 0
    lengths = [int(one) for group in areal_passes.groups(WORK) for one in group["loss_mask"].sum(1)]
    assert lengths == simulated.lengths(8, 32)


# --- the update ---------------------------------------------------------------------------------------


def test_the_update_benchmark_counts_tokens_as_the_theory_does_and_both_sides_compute_the_same():
    found = areal_update.measure((16, 4, 4), layers=1, repeats=1, threads=1)
    assert found["tokens"] == {"separate": 80, "fed": 32, "ratio": 2.5}
    assert found["theory_tokens"] == 2.5
    same = found["same"]
    assert same["log_probs"] < 1e-5
    assert same["gradient"] < 1e-5
    assert same["grad_norm"] > 0
    seconds = found["update"]["seconds"]
    assert found["update"]["over_packed"] == seconds["packed"] / seconds["shared"]
    assert found["a3po"]["tokens"] == 16
    assert found["a3po"]["seconds"]["interpolation"] > 0
    json.dumps(found)


# --- the page -----------------------------------------------------------------------------------------


def test_the_page_is_written_between_its_marks_from_the_figures(monkeypatch, tmp_path):
    page = tmp_path / "README.md"
    page.write_text(f"before\n{areal_table.BEGIN}\nold\n{areal_table.END}\nafter\n")
    periodic = {"work": WORK, **areal_periodic.figures(runs(), WORK, BESIDE)}
    times = areal_update.compared({"packed": [2.5, 2.0, 2.0], "shared": [0.5, 0.4, 0.5]})
    update = {
        "shape": [12, 3, 4],
        "threads": 1,
        "model": {"shape": "SmolLM2-135M", "layers": 1},
        "tokens": {"separate": 48, "fed": 24},
        "theory_tokens": 2.0,
        "same": {"log_probs": 1e-6, "gradient": 2e-6},
        **dict.fromkeys(("update", "old_log_prob"), times),
        "a3po": {
            "tokens": 12,
            "seconds": {"recompute": 2.0, "interpolation": 1e-5, "loss": 3e-3, "loss_of_areal": 1e-3},
            "recompute_over_interpolation": 2e5,
            "recompute_over_all_that_the_loss_adds": 1e3,
        },
    }
    way = {"micro_batches": 2, "tokens": 256, "tokens_fed": 1280, "peak_mib_above_the_model": 1234}
    way["seconds"] = {"update": 2.0, "log_probs": 1.0}
    apart = {"log_probs": 1e-6, "gradient": 2e-6}
    tree = {
        "groups": 2,
        "shape": [12, 3, 4],
        "threads": 1,
        "model": {"shape": "SmolLM2-135M's widths", "layers": 1, "vocabulary": 49152},
        "ways": dict.fromkeys(("packed", "tree", "shared"), way),
        "largest_differences": dict.fromkeys(("tree", "shared"), apart),
    }
    for name, found in {"periodic": periodic, "update": update, "tree": tree}.items():
        (tmp_path / f"areal_{name}.json").write_text(json.dumps(found))
    monkeypatch.setattr(areal_table, "FOLDER", tmp_path)
    areal_table.main()
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old\n" not in text
    assert "| 8.50 | 4.00 | 4.00 | 0.00 | 0.50 | 0.00 | **1.55x** faster |" in text
    assert "2.00 %, 2.00 % (goal 2 %); 110 ms" in text
    assert "| 2.0 | 0.5 | **4.00x** faster | 2.00x |" in text
    assert "2.00 ms for all that the loss does" in text
    assert "| tree training, dense mask | 2 | 256 | 1,280 | 2.0 | 1.0 | 1,234 | 1e-06, 2e-06 |" in text
    once = text
    areal_table.main()
    assert page.read_text() == once
    page.write_text("no marks\n")
    with pytest.raises(SystemExit, match="between which"):
        areal_table.main()
    assert page.read_text() == "no marks\n"
