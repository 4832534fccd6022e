"""The benchmarks against OpenRLHF: their arithmetic, what they run, and tiny runs of what needs no Ray."""

import asyncio
import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("openrlhf", reason="the OpenRLHF adapter's tests need OpenRLHF (requirements/openrlhf.txt)")

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import openrlhf_room  # noqa: F401  (attaches the CPU room)

# isort: split

import openrlhf_controller
import openrlhf_engine
import openrlhf_passes
import openrlhf_periodic
import openrlhf_table
import openrlhf_timed
import openrlhf_update
import simulated
import torch
from openrlhf.trainer import ppo_trainer
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator
from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer
from transformers import AutoTokenizer

from metronome_openrlhf.cpu import assets
from metronome_openrlhf.fingerprint import fingerprint
from metronome_openrlhf.flags import take
from metronome_openrlhf.samples import Arriving

WORK = {"hidden": 32, "layers": 1, "prompts": 4, "size": 2, "longest": 32, "slots": 3, "micro": 4, "delay": 0.001}
WORK |= {"steps": 2}
BESIDE = {"whole": 3.0, "parts": 3.3}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- the engine ---------------------------------------------------------------------------------------


def test_the_engine_decodes_as_many_at_a_time_as_it_has_slots_and_every_batch_takes_as_long():
    async def batch(engine):
        now = asyncio.get_running_loop().time
        begun = now()

        async def one():
            async for output in engine.generate([1], None, request_id="x"):
                return now() - begun, output.outputs[0]

        return await asyncio.gather(*[one() for _ in range(8)])

    async def batches():
        engine = openrlhf_engine.Engine({**WORK, "delay": 0.004})
        found = [await batch(engine), await batch(engine)]
        return found, engine.output_processor.get_num_unfinished_requests()

    (first, second), running = asyncio.run(batches())
    wanted = simulated.lengths(8, 32)
    for found in (first, second):
        assert [len(output.token_ids) for _, output in found] == wanted
        least = 0.004 * simulated.decode_steps(wanted, 3)
        assert least <= max(seconds for seconds, _ in found) < 0.004 * sum(wanted)
    assert first[0][1].token_ids != second[0][1].token_ids
    assert running == 0


def test_published_weights_change_what_the_engine_is_known_by(monkeypatch):
    class Sent:
        def broadcast(self, weight, src):
            weight.fill_(2)

    engine = openrlhf_engine.Engine(WORK)
    engine.worker.group = Sent()
    assert asyncio.run(engine.collective_rpc(fingerprint)) == [0.0]
    asyncio.run(engine.collective_rpc("update_weight", args=("name", torch.bfloat16, (3, 2), True)))
    assert asyncio.run(engine.collective_rpc(fingerprint)) == [12.0]


def test_the_rollout_actor_gets_the_engine_and_openrlhfs_own_executor(monkeypatch, tmp_path):
    import vllm
    from openrlhf.trainer.ray.vllm_engine import _load_agent_executor

    monkeypatch.setattr(vllm, "AsyncLLMEngine", vllm.AsyncLLMEngine)
    reward = assets.make(tmp_path, hidden=32, layers=1).reward
    monkeypatch.setenv(openrlhf_engine.WORK, json.dumps({**WORK, "reward": str(reward)}))
    made = _load_agent_executor(openrlhf_engine.__file__)
    assert made.reward_func(["1+1=2"], ["1+1="], ["2"])["rewards"] == 2.0
    engine = vllm.AsyncLLMEngine.from_engine_args(None)
    assert engine.lengths == simulated.lengths(8, 32)


# --- the stopwatch ------------------------------------------------------------------------------------


def test_of_nested_calls_the_outermost_is_timed(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(openrlhf_timed.time, "perf_counter", lambda: now[0])

    class Nested:
        def inner(self):
            now[0] += 1.0

        def outer(self):
            self.inner()
            now[0] += 2.0
            raise ValueError("as the host may")

    watch, one = openrlhf_timed.Watch(), Nested()
    watch.over(Nested, "inner", "host")
    watch.over(one, "outer", "parts")
    one.inner()
    with pytest.raises(ValueError, match="as the host may"):
        one.outer()
    assert watch.taken() == {"host": 1.0, "parts": 3.0}
    assert watch.taken() == {}


@pytest.mark.parametrize("slow", [0.0, 0.03])
def test_what_our_trainer_does_itself_is_own_time_and_what_openrlhf_does_is_not(tmp_path, monkeypatch, slow):
    """Slowed down in our code it is own time; OpenRLHF's code is slowed down in either case."""
    for owner, name in (
        (Arriving, "part"),
        (Arriving, "_finished"),
        (SamplesGenerator, "_dispatch_prompts_to_vllm"),
        (SamplesGenerator, "_process_response_into_experience"),
        (RemoteExperienceMaker, "make_experience_batch"),
        (ppo_trainer.BasePPOTrainer, "broadcast_to_vllm"),
        (ppo_trainer.BasePPOTrainer, "_compute_rollout_stats"),
        (ActorPPOTrainer, "training_step"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # the stopwatch stays on classes otherwise
    openrlhf_controller.install(monkeypatch.setattr)
    monkeypatch.setattr(openrlhf_controller, "MetronomeTrainer", openrlhf_timed.Trainer)
    monkeypatch.setattr(openrlhf_controller, "MetronomePolicy", openrlhf_timed.Policy)
    process = SamplesGenerator._process_response_into_experience
    sleep = openrlhf_timed.time.sleep

    def slowly(self, response, **named):
        sleep(0.02)
        return process(self, response, **named)

    monkeypatch.setattr(SamplesGenerator, "_process_response_into_experience", slowly)
    made = openrlhf_controller.build(tmp_path, {"rollout_source": "periodic"})
    together = made._together

    def concatenated(rows):
        sleep(slow)
        return together(rows)

    monkeypatch.setattr(made, "_together", concatenated)
    made.fit()
    for one in made.logs:
        found = one.status["benchmark"]
        assert found["generation"] > 16 * 0.02  # rows
        assert found["step"] > found["generation"] + found["training"] + found["publish"]
        assert 8 * slow < found["own"] < found["step"] - found["generation"]  # micro-batches
        assert 0 < found["own_in_worker"] < found["own"]
        assert "worker" not in one.status
    if not slow:
        assert min(one.status["benchmark"]["own"] for one in made.logs) < 0.24


def test_openrlhfs_own_steps_say_when_each_group_came(tmp_path, monkeypatch):
    openrlhf_controller.install(monkeypatch.setattr)
    monkeypatch.setattr(openrlhf_controller, "STOCK", openrlhf_timed.Stock)
    made = openrlhf_controller.build(tmp_path)
    made.fit()
    assert len(made.logs) == 4
    for one in made.logs:
        found = one.status["benchmark"]
        assert found["step"] > found["generation"] + found["training"] + found["publish"]
        assert len(found["arrivals"]) == len(found["longest"]) == 4
        assert found["arrivals"] == sorted(found["arrivals"])
        assert found["arrivals"][-1] <= found["generation"]


# --- periodic against OpenRLHF's trainer --------------------------------------------------------------


def step(number, seconds, benchmark, **more):
    """A step of OpenRLHF's log: 4 s to generate, 4 s to train, 0.5 s to publish, and what else it took."""
    return {
        "step": number,
        "rollout/response_length_mean": 9.5,
        "rollout/reward_mean": 0.5,
        "actor_grad_norm": 2.0,
        **more,
        "benchmark": {"step": seconds, "generation": 4.0, "training": 4.0, "publish": 0.5, **benchmark},
    }


def runs():
    """Four groups that arrive one second after another and take a second each."""
    theirs = {"arrivals": [1.0, 2.0, 3.0, 4.0], "longest": [20, 20, 20, 20]}
    ours = {"generation": 1.0, "training": 3.75, "optimiser": 0.25, "own": 0.11, "own_in_worker": 0.01}
    parts = {"metronome/periodic/parts": 4}
    return {
        "synchronous": {"metrics": [step(1, 60.0, theirs), step(2, 8.5, theirs), step(3, 8.5, theirs)]},
        "periodic": {
            "metrics": [step(1, 60.0, ours, **parts), step(2, 5.5, ours, **parts), step(3, 5.5, ours, **parts)]
        },
    }


def test_ratio_bound_and_closed_form_are_those_of_the_measured_parts():
    found = openrlhf_periodic.figures(runs(), WORK, BESIDE)
    assert found["faster"] == pytest.approx(8.5 / 5.5)
    assert found["bound"] == 2.0  # generation and training take equally long
    assert found["bound_of_the_step"] == (4 + 4 + 0.5) / (4 + 0.5)
    # the last group's second of training stays: (4 + 4) / (4 + 1), publication on either side
    assert found["closed_form_ratio"] == pytest.approx((8 + 0.5) / (5 + 0.5))
    assert found["periodic_over_closed_form"] == pytest.approx(1.0)
    assert found["overhead"]["share"] == pytest.approx(0.11 / 5.5)
    assert found["passes"]["end_to_end"] == 1.0
    assert found["passes"]["in_one_process"] == pytest.approx(1.1)


def test_a_long_group_that_comes_last_lowers_the_closed_form():
    other = runs()
    for one in other["synchronous"]["metrics"]:
        one["benchmark"] = {**one["benchmark"], "longest": [10, 10, 10, 50]}
    found = openrlhf_periodic.figures(other, WORK, BESIDE)
    assert found["closed_form_ratio"] == pytest.approx((8 + 0.5) / (4 + 4 * 50 / 80 + 0.5))
    assert found["bound"] == 2.0


def test_other_work_shows():
    same = openrlhf_periodic.figures(runs(), WORK, BESIDE)["same_work"]
    assert same["steps"] == 3
    assert same["response_lengths"] == [9.5]
    assert same["largest_reward_difference"] == same["largest_grad_norm_difference"] == 0
    other = runs()
    other["periodic"]["metrics"][2].update({"actor_grad_norm": 2.2, "rollout/response_length_mean": 8.5})
    found = openrlhf_periodic.figures(other, WORK, BESIDE)["same_work"]
    assert found["largest_grad_norm_difference"] == pytest.approx(0.1)
    assert found["first_grad_norm_difference"] == 0
    assert found["response_lengths"] == [8.5, 9.5]


def test_both_runs_get_the_same_flags_but_for_periodic_mode(tmp_path):
    made = assets.Assets(tmp_path / "model", tmp_path / "prompts", tmp_path / "reward.py")
    found = {}
    for kind in openrlhf_periodic.KINDS:
        block, rest = take(openrlhf_periodic.flags(kind, WORK, made, tmp_path))
        values = dict(pairwise(rest))
        found[kind] = [one for one in rest if str(tmp_path / kind) not in one]
        assert block.pop("cpu") is True
        assert block == ({"rollout_source": "periodic"} if kind == "periodic" else {})
        assert values["--train.agent_func_path"].endswith("openrlhf_engine.py")
        assert "--reward.remote_url" not in values
        assert values["--train.batch_size"] == "8"  # one step a batch
        assert values["--data.max_samples"] == "12"
        assert values["--data.max_len"] == str(openrlhf_periodic.TOKENS + 32)
    assert found["synchronous"] == found["periodic"]


def test_a_prompt_has_as_many_tokens_as_is_told(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(assets.make(tmp_path, hidden=32, layers=1).model)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": openrlhf_periodic.PROMPT}], tokenize=False, add_generation_prompt=True
    )
    assert len(tokenizer(asked, add_special_tokens=False)["input_ids"]) == openrlhf_periodic.TOKENS


def test_parts_and_the_whole_are_both_timed(tmp_path):
    tiny = assets.make(tmp_path, hidden=32, layers=1)
    found = openrlhf_passes.passes(tiny.model, WORK, 9, repeats=1)
    assert found["whole"] > 0
    assert found["parts"] > 0
    groups = openrlhf_passes.groups(WORK, 9)
    lengths = [int(row.response_length[0]) for group in groups for row in group]
    assert lengths == simulated.lengths(8, 32)


# --- the update ---------------------------------------------------------------------------------------


def test_the_update_benchmark_counts_tokens_as_the_theory_does_and_both_sides_compute_the_same():
    found = openrlhf_update.measure((16, 4, 4), layers=1, repeats=1, threads=1)
    assert found["tokens"] == {"separate": 80, "fed": 32, "ratio": 2.5}
    assert found["theory_tokens"] == 2.5
    same = found["same"]
    assert same["log_probs"] < 1e-5
    assert same["reference_log_probs"] < 1e-5
    assert same["gradient"] < 1e-5
    assert same["grad_norm_shared"] == pytest.approx(same["grad_norm"], rel=1e-5)
    assert same["grad_norm"] > 0
    seconds = found["update"]["seconds"]
    assert found["update"]["over_rows"] == seconds["rows"] / seconds["shared"]
    assert found["a3po"]["tokens"] == 16
    assert found["a3po"]["seconds"]["interpolation"] > 0
    json.dumps(found)


# --- the page -----------------------------------------------------------------------------------------


def test_the_page_is_written_between_its_marks_from_the_figures(monkeypatch, tmp_path):
    page = tmp_path / "README.md"
    page.write_text(f"before\n{openrlhf_table.BEGIN}\nold\n{openrlhf_table.END}\nafter\n")
    periodic = {"work": WORK, **openrlhf_periodic.figures(runs(), WORK, BESIDE)}
    times = openrlhf_update.compared({"rows": [2.5, 2.0, 2.0], "shared": [0.5, 0.4, 0.5]})
    update = {
        "shape": [12, 3, 4],
        "threads": 1,
        "model": {"shape": "SmolLM2-135M", "layers": 1},
        "tokens": {"separate": 48, "fed": 24},
        "theory_tokens": 2.0,
        "same": {"log_probs": 1e-6, "gradient": 2e-6},
        **dict.fromkeys(("update", "old_log_prob", "reference_log_prob"), times),
        "a3po": {
            "tokens": 12,
            "seconds": {"old_log_prob": 2.0, "interpolation": 1e-5, "loss": 3e-3, "loss_of_openrlhf": 1e-3},
            "old_log_prob_over_interpolation": 2e5,
            "old_log_prob_over_all_that_the_loss_adds": 1e3,
        },
    }
    (tmp_path / "openrlhf_periodic.json").write_text(json.dumps(periodic))
    (tmp_path / "openrlhf_update.json").write_text(json.dumps(update))
    monkeypatch.setattr(openrlhf_table, "FOLDER", tmp_path)
    openrlhf_table.main()
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old\n" not in text
    assert "| 8.50 | 4.00 | 4.00 | 0.50 | 0.00 | **1.55x** faster |" in text
    assert "2.00 %, 2.00 % (goal 2 %); 110 ms" in text
    assert "| 2.0 | 0.5 | **4.00x** faster | 2.00x |" in text
    assert "2.00 ms for all that the loss does" in text
    once = text
    openrlhf_table.main()
    assert page.read_text() == once
    page.write_text("no marks\n")
    with pytest.raises(SystemExit, match="between which"):
        openrlhf_table.main()
    assert page.read_text() == "no marks\n"
