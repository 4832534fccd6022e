"""Tensor, sequence and pipeline parallelism in two processes on gloo keep the equality."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core isn't installed: requirements/megatron.txt")
import two_processes
from cpu_room import FAR, TOLERANCE, build, row
from two_processes import ARRANGEMENTS, LAYERS

from metronome.errors import ConfigurationError
from metronome.shared_prompt.megatron import attach_megatron
from metronome.shared_prompt.reference import ReferenceBackend

PATIENCE = 240.0  # seconds


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    """What each rank found, for every arrangement and form; one start of two processes for all."""
    folder = tmp_path_factory.mktemp("two")
    torch.save(two_processes.whole(), folder / "whole.pt")
    running = torch.multiprocessing.start_processes(
        two_processes.work, args=(str(folder),), nprocs=2, join=False, start_method="spawn"
    )
    assert running is not None
    try:
        for _ in range(2):  # a call returns when one process ends, or when the time is up
            running.join(timeout=PATIENCE)
    finally:
        for process in running.processes:
            if process.is_alive():
                process.kill()
    return [torch.load(Path(folder, f"found{rank}.pt")) for rank in range(2)]


@pytest.mark.timeout(2 * PATIENCE + 60)
@pytest.mark.parametrize("form", ["sbhd", "thd"])
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_parallel_shared_rows_equal_separate_rows(
    arrangement: str, form: str, found: list[dict[Any, Any]], record_property: Any
) -> None:
    layers = LAYERS // ARRANGEMENTS[arrangement].get("pipeline_model_parallel_size", 1)
    record_property("differences", [one[arrangement, form]["apart"] for one in found])
    for one in found:
        assert max(one[arrangement, form]["apart"]) <= TOLERANCE
        assert one[arrangement, form]["calls"] == layers


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_one_wrong_key_shows_in_parallel(arrangement: str, found: list[dict[Any, Any]]) -> None:
    assert all(one[arrangement, "one wrong key"]["apart"][1] > FAR for one in found)


def test_a_stage_without_a_head_says_so() -> None:
    model = build(stages={"pre_process": True, "post_process": False})
    handle = attach_megatron(model, ReferenceBackend())
    ids, plan, _ = row()
    with pytest.raises(ConfigurationError, match="no head"):
        handle.response_log_probs(torch.zeros(1, plan.tokens, 96), ids, plan)
