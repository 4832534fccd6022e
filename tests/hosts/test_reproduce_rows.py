"""The papers' rows that need torch: within their tolerance, able to fail, and as committed."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from metronome.reproduce import rows  # noqa: E402
from metronome.reproduce.catalogue import ROWS  # noqa: E402
from metronome.reproduce.rows import Status, Way  # noqa: E402

COMMITTED = json.loads((Path(__file__).parents[2] / "docs/results/reproduce.json").read_text(encoding="utf-8"))
BY_NAME = {row.name: row for row in ROWS}
CHECKED = [row.name for row in ROWS if "torch" in row.needs and row.way is not Way.MEASURED]


@cache
def result(name):
    return rows.run(BY_NAME[name])


def require(name):
    if "transformers" in BY_NAME[name].needs:
        pytest.importorskip("transformers")


@pytest.mark.parametrize("name", CHECKED)
def test_a_row_that_needs_torch_is_within_its_tolerance(name):
    require(name)
    found = result(name)
    assert found.status is Status.SHOWN, found.note


@pytest.mark.parametrize("name", [name for name in CHECKED if BY_NAME[name].way.repeatable])
def test_committed_figures_of_seeded_rows_are_what_the_code_computes(name):
    require(name)
    (committed,) = [row for row in COMMITTED["rows"] if row["name"] == name]
    ours = {figure["name"]: figure["ours"] for figure in committed["figures"]}
    assert ours == pytest.approx(dict(result(name).ours), rel=1e-9, abs=1e-12)


def patched(target, replacement):
    return lambda patch: patch.setattr(target, replacement)


def half(staleness, *_, dtype=torch.float64, **__):
    return torch.full(staleness.shape, 0.5, dtype=dtype)


def causal(self, q, k, v, plan, scale, **_):
    """The mask dropped: every token sees all before it."""
    from metronome.shared_prompt.reference import masked_attention

    mask = torch.ones(len(k), len(k), dtype=torch.bool).tril()[plan.first_query :]
    return masked_attention(q, k, v, mask, scale)


def without_the_mean(patch):
    from metronome.periodic.whitening import TwoAccumulators

    combine = TwoAccumulators.combine
    patch.setattr(TwoAccumulators, "combine", lambda self, mean, std, factor: combine(self, 0.0, std, factor))


NO_RESCALE = patched("metronome.periodic.normalizer.StreamingNormalizer.final_factor", lambda self: 1.0)
HALF = patched("metronome.a3po.loss.alpha", half)
DROPPED = patched("metronome.shared_prompt.cascade.CascadeBackend.attend", causal)
BREAKS = {
    "periodic-gradient-fp64": NO_RESCALE,
    "periodic-gradient-fp32": NO_RESCALE,
    "periodic-gradient-control": patched("metronome.reproduce.gradients.split", lambda every, seed: [every]),
    "periodic-batch-whitening": without_the_mean,
    "shared-counted": patched("metronome.shared_prompt.cost.causal_pairs", lambda length: length * length),
    "shared-attention-fp64": DROPPED,
    "shared-model": DROPPED,
    "shared-reuse": DROPPED,
    "a3po-alpha-table": patched("metronome.a3po.proximal.alpha", half),
    "a3po-band-identity": HALF,
    "a3po-band-edges": HALF,
    "a3po-plain-ppo": HALF,
    "a3po-cap": HALF,
    "a3po-sandwich-contraction": patched("metronome.a3po.proximal.alpha", half),
    "a3po-clipped": HALF,
    "a3po-fresh": HALF,
    "a3po-variance": HALF,
}


def test_every_row_that_needs_torch_has_a_way_to_fail():
    assert sorted(BREAKS) == sorted(CHECKED)


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_computation_of_a_row_that_needs_torch_is_out_of_tolerance(name, monkeypatch):
    require(name)
    BREAKS[name](monkeypatch)
    found = rows.run(BY_NAME[name])
    assert found.status is Status.OUT
    assert "wanted" in found.note


def test_a_rescale_that_forgets_filtered_rows_is_out_of_tolerance(monkeypatch):
    from metronome.periodic.normalizer import StreamingNormalizer

    factor = StreamingNormalizer.final_factor
    forgetful = lambda self: factor(self) if self.mode == "token-mean" else 1.0  # noqa: E731
    monkeypatch.setattr(StreamingNormalizer, "final_factor", forgetful)
    assert rows.run(BY_NAME["periodic-gradient-fp64"]).status is Status.OUT


def test_measured_rows_are_bounded_and_were_measured():
    measured = [row for row in ROWS if row.way is Way.MEASURED]
    assert {row.name for row in measured} == {"shared-measured", "a3po-proximal-time", "a3po-forward-share"}
    committed = {row["name"]: row for row in COMMITTED["rows"]}
    for row in measured:
        assert all(figure["within"] for figure in committed[row.name]["figures"])


def test_rows_leave_the_random_state_of_torch_alone():
    torch.manual_seed(3)
    wanted = torch.rand(4)
    torch.manual_seed(3)
    for name in ("periodic-gradient-control", "a3po-clipped"):
        rows.run(BY_NAME[name])
    assert torch.equal(torch.rand(4), wanted)
