"""Two data-parallel ranks in bounded mode, interrupted and resumed: each rank's own window, one G, each prompt once."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("areal", reason="the AReaL adapter's tests need AReaL (requirements/areal.txt)")

import areal_bounded_ranks as script


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What both ranks left of both runs, and the prompts of the data."""
    folder = tmp_path_factory.mktemp("bounded_ranks")
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    for which in ("first", "second"):
        run = subprocess.run(
            [*launch, str(Path(script.__file__)), str(folder), which],
            capture_output=True,
            text=True,
            timeout=300,
            env=environment,
        )
        assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    prompts = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    runs = [
        [json.loads((folder / f"{which}{rank}.json").read_text()) for rank in range(2)] for which in ("first", "second")
    ]
    return runs, [one["messages"][0]["content"] for one in prompts]


def test_each_rank_goes_on_with_its_own_prompts_and_none_is_trained_twice(found):
    (first, second), data = found
    for rank in range(2):
        before, after = first[rank], second[rank]
        assert after["begun"] == [3, 3]
        assert before["batch"] == after["batch"] == 2
        assert len(before["out"]) >= 2  # the ranks' windows, which a checkpoint keeps apart
        done = before["trained"] + after["trained"]
        assert set(before["out"]) <= set(after["trained"] + after["out"])
        assert not Counter(done) - Counter(data[rank::2])
    everywhere = [one for run in (first, second) for rank in run for one in rank["trained"]]
    assert not Counter(everywhere) - Counter(data)


def test_ranks_choose_one_g_and_keep_the_bound(found):
    runs, _ = found
    for first, second in runs:
        assert first["controller"] == second["controller"]
        assert max(first["most"]) <= 2
    assert [rank["controller"]["step"] for run in runs for rank in run] == [2, 2, 5, 5]
