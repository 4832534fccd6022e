"""verl's unmodified ``main_ppo`` in periodic mode on two data-parallel ranks against one, with the same rollouts."""

import math

import pytest

pytest.importorskip("verl", reason="the verl adapter's tests need verl (requirements/verl.txt)")
pytest.importorskip("transfer_queue", reason="verl's V1 trainer needs TransferQueue (requirements/verl.txt)")

import pyarrow
from pyarrow import parquet
from ray_session import run_main_ppo
from test_verl_end_to_end import POOL, overrides, session, tiny

__all__ = ["session", "tiny"]  # fixtures

pytestmark = pytest.mark.slow

REWARD = """def compute_score(data_source, solution_str, ground_truth, extra_info=None, **others):
    digits = sum(character.isdigit() for character in solution_str)
    found = float(any(character in solution_str for character in "1234"))
    return {"score": digits / max(1, len(solution_str)) + found, "acc": found}
"""


@pytest.mark.timeout(1200)
def test_two_ranks_have_the_gradient_of_one_with_shared_prompts_and_dynamic_sampling(tiny, session, tmp_path):
    """Three responses a group: verl adds rows for the second rank. The server's seeds follow prompts, not ranks."""
    reward, distinct = tmp_path / "reward.py", tmp_path / "distinct.parquet"
    reward.write_text(REWARD)
    table = parquet.read_table(tiny.train)
    rows = {str(row["prompt"]): row for row in table.to_pylist()}
    parquet.write_table(pyarrow.Table.from_pylist(list(rows.values()), schema=table.schema), distinct)
    ours = [
        "+metronome.rollout_source=periodic",
        "+metronome.attention=shared_prompt",
        "actor_rollout_ref.rollout.n=3",
        "actor_rollout_ref.actor.entropy_coeff=0.01",
        "actor_rollout_ref.actor.clip_ratio_high=0.28",
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.metric=acc",
        f"reward.custom_reward_function.path={reward}",
        f"data.train_files={distinct}",
        "+actor_rollout_ref.rollout.engine_kwargs.metronome_hf.seconds_per_token=0.005",
    ]
    pool = [one for one in POOL if "seconds_per_token" not in one]
    runs = []
    for ranks in (1, 2):
        run = run_main_ppo(overrides(tiny, *pool, *ours, f"trainer.n_gpus_per_node={ranks}"), session, timeout=560)
        assert run.returncode == 0, run.tail()
        assert [step["step"] for step in run.metrics] == [1, 2]
        for step in run.metrics:
            assert step["metronome/weights/changed"] == 1
            assert step["training/rollout_probs_diff_max"] < 1e-6
            assert step["training/off_policy/trajectory_staleness/max"] == 0
            assert step["metronome/trained/rows"] == 12  # whatever was filtered, and without what verl adds
            assert step["metronome/attention/tokens_fed"] < step["metronome/attention/tokens_separate"]
        runs.append(run.metrics)
    (one, later), (two, _) = runs
    assert one["metronome/trained/tokens"] == two["metronome/trained/tokens"] > 24
    assert one["training/filter_groups/evicted_samples"] == two["training/filter_groups/evicted_samples"] > 0
    for name in ("actor/grad_norm", "actor/entropy_loss", "actor/pg_loss"):
        assert math.isfinite(one[name])
        assert two[name] == pytest.approx(one[name], rel=1e-5, abs=1e-7), name
        assert later[name] != pytest.approx(one[name], rel=1e-3), name  # of other rollouts it is another
    assert one["actor/grad_norm"] > 0.1
