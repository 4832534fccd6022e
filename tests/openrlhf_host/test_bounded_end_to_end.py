"""Bounded mode whole: OpenRLHF's asynchronous main on real vLLM, requests that go on over publications, A-3PO."""

import pytest

pytest.importorskip("openrlhf", reason="the OpenRLHF adapter's tests need OpenRLHF (requirements/openrlhf.txt)")

import openrlhf_room  # noqa: F401  (attaches the CPU room)
import openrlhf_session

from metronome_openrlhf.cpu import assets


def test_a3po_learns_from_samples_two_versions_old_whose_requests_went_on_over_publications(tmp_path):
    tiny = assets.make(tmp_path / "assets")
    flags = openrlhf_session.stock(tiny, tmp_path)
    ours = [
        "--metronome.rollout_source",
        "bounded",
        "--metronome.bounded.max_staleness",
        "3",
        "--metronome.loss",
        "a3po",
    ]
    # Answers of some hundred tokens take longer than a step, so that publications meet requests.
    longer = ["--data.max_len", "256", "--rollout.max_new_tokens", "200", "--data.max_samples", "32"]
    found = openrlhf_session.run(["--metronome.cpu", *flags, *longer, *ours, "--metronome.in_flight", "resume"])
    assert found.returncode == 0, found.tail()
    assert [one["step"] for one in found.steps] == [1, 2, 3, 4, 5, 6, 7, 8]
    for step, one in enumerate(found.steps):
        assert one["rollout/num_samples"] == 16
        assert one["actor_grad_norm"] > 0
        assert one["metronome/loss/calls"] == 4
        assert one["metronome/loss/version_unknown"] == 0
        assert one["metronome/bounded/staleness_max"] == one["metronome/loss/staleness_max"] <= min(step, 3)
        assert one["metronome/bounded/dropped_groups"] == 0
    stale = [one for one in found.steps if one["metronome/loss/staleness_max"] >= 2]
    assert stale
    assert max(one["metronome/loss/off_behavior"] for one in stale) > 0.1
    assert all(
        one["metronome/loss/off_behavior"] == 0 for one in found.steps if one["metronome/loss/staleness_max"] < 2
    )
    assert max(one["metronome/bounded/rows_over_publications"] for one in found.steps) > 0
    assert "metronome: --train.async_queue_size 3" in found.text
