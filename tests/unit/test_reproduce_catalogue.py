"""The papers' rows: all are there, the cheap ones hold, each can fail, and the committed results are the code's."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from metronome.contracts import Verdict
from metronome.reproduce import a3po_time, rows
from metronome.reproduce.catalogue import ROWS, choose, unreproducible
from metronome.reproduce.rows import Result, Row, Status, Way

ROOT = Path(__file__).parents[2]
COMMITTED = json.loads((ROOT / "docs/results/reproduce.json").read_text(encoding="utf-8"))

# What TECHNIQUES and the issue ask for, claim by claim.
WANTED = {
    "gradient equality in float64 and float32, and its negative control": (
        "periodic-gradient-fp64",
        "periodic-gradient-fp32",
        "periodic-gradient-control",
    ),
    "batch whitening by two accumulators": ("periodic-batch-whitening",),
    "one version a period": ("periodic-one-version",),
    "the 2x bound and the closed form": ("periodic-bound", "periodic-closed-form"),
    "1.92x by simulation, and where less is left": ("periodic-1.92x", "periodic-unbalanced"),
    "near linear from 16 to 64 devices": ("periodic-scaling",),
    "against other frameworks": ("periodic-3.12x", "periodic-5.05x", "periodic-gpu-3x", "periodic-accuracy"),
    "shared-prompt ratios with the 8x row": (
        "shared-8x",
        "shared-tokens",
        "shared-attention-pairs",
        "shared-group-size",
        "shared-counted",
    ),
    "shared-prompt equalities": ("shared-attention-fp64", "shared-model", "shared-reuse"),
    "shared prompts measured, and what another paper measured": ("shared-measured", "shared-4.395x"),
    "A-3PO's identities": (
        "a3po-alpha-table",
        "a3po-band-identity",
        "a3po-band-edges",
        "a3po-plain-ppo",
        "a3po-cap",
        "a3po-sandwich-contraction",
    ),
    "clipped fraction and variance against staleness, and d = 0": ("a3po-clipped", "a3po-variance", "a3po-fresh"),
    "proximal time and the step-time model": (
        "a3po-proximal-time",
        "a3po-forward-share",
        "a3po-step-time",
        "a3po-step-simulated",
        "a3po-against-whom",
    ),
    "A-3PO's tables": ("a3po-hours-1.5b", "a3po-hours-8b", "a3po-evaluation"),
    "p(G), its conventions, convergence and calibration": (
        "sagc-straggler-rates",
        "sagc-conventions",
        "sagc-convergence",
        "sagc-99.6-43.4",
    ),
    "SAGC's choice": ("sagc-hull", "sagc-dwell", "sagc-infeasible", "sagc-dapo-filter", "sagc-traps"),
    "hours at equal steps and at equal rollouts": (
        "sagc-hours-equal-steps",
        "sagc-hours-equal-rollouts",
        "sagc-hours-simulated",
        "sagc-budgets",
    ),
    "SAGC's tables": ("sagc-hours", "sagc-evaluation"),
    "the survey": (
        "survey-generation-time",
        "survey-admission",
        "survey-staleness-bound",
        "survey-staleness-simulated",
    ),
}
CORE = [row for row in ROWS if row.compute is not None and row.cheap and "torch" not in row.needs]
BY_NAME = {row.name: row for row in ROWS}


@cache
def result(name: str) -> Result:
    return rows.run(BY_NAME[name])


def committed(name: str) -> dict:
    (found,) = [row for row in COMMITTED["rows"] if row["name"] == name]
    return found


def require_simpy(row: Row) -> None:
    if "simpy" in row.needs:
        pytest.importorskip("simpy")


def test_every_row_that_was_asked_for_is_there_and_no_other() -> None:
    wanted = [name for names in WANTED.values() for name in names]
    assert sorted(wanted) == sorted(BY_NAME)
    assert len(wanted) == len(set(wanted)) == len(ROWS)


def test_a_row_says_where_it_stands_and_what_it_is_worth() -> None:
    for row in ROWS:
        assert row.claim, row.name
        assert "arXiv" in row.source or "ours" in row.source or "blog" in row.source, row.name
        assert row.remark.endswith("."), row.name
        assert (row.compute is None) == (row.way is Way.NOT_HERE), row.name
        assert row.figures or row.compute is None, row.name
        names = [figure.name for figure in row.figures]
        assert len(names) == len(set(names)), row.name
        bounded = [figure for figure in row.figures if not (math.isinf(figure.low) and math.isinf(figure.high))]
        assert bounded or row.compute is None, f"{row.name} could never be out of tolerance"


def test_what_cannot_be_shown_here_says_why() -> None:
    names = {row.name for row in unreproducible()}
    assert {"periodic-3.12x", "periodic-5.05x", "a3po-hours-1.5b", "a3po-hours-8b", "sagc-hours"} <= names
    assert all("needs" in row.remark.lower() for row in unreproducible())


def test_calibrated_rows_are_labelled() -> None:
    for name in ("sagc-99.6-43.4", "sagc-hours-equal-steps", "sagc-hours-equal-rollouts", "sagc-hours-simulated"):
        assert "CALIBRATED" in BY_NAME[name].remark
        assert "CALIBRATED" in committed(name)["remark"]
        assert BY_NAME[name].how == "simulation, calibrated"


def test_simulated_rows_say_so() -> None:
    for row in ROWS:
        if "simpy" in row.needs and row.way is Way.SIMULATION:
            assert "simulated" in row.remark.lower(), row.name


@pytest.mark.parametrize("row", CORE, ids=lambda row: row.name)
def test_a_cheap_row_is_within_its_tolerance(row: Row) -> None:
    require_simpy(row)
    found = result(row.name)
    assert found.status is Status.SHOWN, found.note


@pytest.mark.parametrize("row", [row for row in CORE if row.way.repeatable], ids=lambda row: row.name)
def test_committed_figures_are_what_the_code_computes(row: Row) -> None:
    require_simpy(row)
    ours = {figure["name"]: figure["ours"] for figure in committed(row.name)["figures"]}
    assert ours == pytest.approx(dict(result(row.name).ours), rel=1e-9, abs=1e-12)


def test_committed_results_have_the_rows_claims_paper_figures_and_bounds_of_the_code() -> None:
    changing = ("cpu_seconds", "status", "note")
    assert [row["name"] for row in COMMITTED["rows"]] == [row.name for row in ROWS]
    for row in ROWS:
        wanted = Result(row, Status.SHOWN).as_json()
        found = committed(row.name)
        for key in wanted:
            if key not in (*changing, "figures"):
                assert found[key] == wanted[key], f"{row.name}: {key}"
        keys = ("name", "unit", "paper", "low", "high", "tolerance")
        assert [{key: one[key] for key in keys} for one in found["figures"]] == [
            {key: one[key] for key in keys} for one in wanted["figures"]
        ], row.name


def test_committed_results_show_every_row_that_can_be_shown() -> None:
    assert COMMITTED["passed"] is True
    for row in ROWS:
        found = committed(row.name)
        assert found["status"] == (Status.NOT_HERE if row.compute is None else Status.SHOWN).value
        for one, figure in zip(found["figures"], row.figures, strict=True):
            assert one["within"] is (None if row.compute is None else True)
            assert row.compute is None or figure.holds(one["ours"])


def test_the_committed_page_is_the_committed_json() -> None:
    page = (ROOT / "docs/results/reproduce.md").read_text(encoding="utf-8")
    assert f"    {COMMITTED['command']}\n" in page
    assert COMMITTED["summary"] in page
    for row in ROWS:
        assert f"`{row.name}`" in page
        assert row.remark in page or row.remark.replace("|", "\\|") in page
        for one, figure in zip(committed(row.name)["figures"], row.figures, strict=True):
            if row.compute is not None:
                assert f"| {figure.shown(figure.paper)} | {figure.shown(one['ours'])} |" in page, row.name


# --- each row can fail ----------------------------------------------------------------------------

Break = Callable[[pytest.MonkeyPatch], None]


def patched(target: str, replacement: object) -> Break:
    return lambda patch: patch.setattr(target, replacement)


def waits_for_all(patch: pytest.MonkeyPatch) -> None:
    from metronome.periodic.sources import Periodic, Synchronous

    patch.setattr(Periodic, "release", Synchronous.release)


def free_forward_pass(patch: pytest.MonkeyPatch) -> None:
    from metronome.simulate import model, training

    patch.setattr(model, "work", lambda *given: dataclasses.replace(training.work(*given), proximal=0.0))


def lower_middle(lengths) -> float:
    ordered = sorted(lengths)
    return ordered[-1] / ordered[(len(ordered) - 1) // 2]


def always_dwelt(patch: pytest.MonkeyPatch) -> None:
    from metronome.sagc.controller import SagcController

    observe = SagcController.observe

    def hurried(self, stats):
        self._dwell = 99
        return observe(self, stats)

    patch.setattr(SagcController, "observe", hurried)


def no_fallback(patch: pytest.MonkeyPatch) -> None:
    from metronome.sagc.controller import SagcController

    decide = SagcController._decide

    def patient(self, event):
        self._capped = -(10**9)
        return decide(self, event)

    patch.setattr(SagcController, "_decide", patient)


def anything_goes(patch: pytest.MonkeyPatch) -> None:
    from metronome.periodic.sources import Bounded

    patch.setattr(Bounded, "verdict", lambda *_: Verdict.TRAIN)
    patch.setattr(Bounded, "capacity", lambda self, flow: max(0, 8 * flow.batch - flow.running - flow.queued))


def other_hours(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(a3po_time.HOURS, "8B", (20.0, 16.10, 14.54))


def sized_by(which: str) -> Break:
    def always(_: str, rollouts: int, __: int, *, size: int, largest: int) -> int:
        return rollouts // (size if which == "g" else largest)

    return patched("metronome.sagc.budget.prompts", always)


DENSE = patched("metronome.shared_prompt.cost.causal_pairs", lambda length: length * length)
EVERY_TOKEN = patched("metronome.shared_prompt.cost.token_ratio", lambda *_: 1.0)
NO_DUAL = patched("metronome.sagc.controller.SagcController._learn", lambda *_: None)
BREAKS: dict[str, Break] = {
    "periodic-one-version": patched("metronome.periodic.sources.Periodic.verdict", lambda *_: Verdict.TRAIN),
    "periodic-bound": patched("metronome.periodic.closed_form.speed_bound", lambda *_: 2.1),
    "periodic-closed-form": patched("metronome.periodic.closed_form.periodic_seconds", lambda _, work: sum(work)),
    "periodic-1.92x": waits_for_all,
    "periodic-unbalanced": waits_for_all,
    "periodic-scaling": patched("metronome.simulate.cluster.Trainer.speed", lambda *_: 1.0),
    "shared-8x": EVERY_TOKEN,
    "shared-tokens": EVERY_TOKEN,
    "shared-attention-pairs": DENSE,
    "shared-group-size": EVERY_TOKEN,
    "a3po-step-time": patched("metronome.reproduce.a3po_time.step_gain", lambda *_: 1.0),
    "a3po-step-simulated": free_forward_pass,
    "a3po-against-whom": other_hours,
    "sagc-straggler-rates": patched("metronome.sagc.events.straggler_ratio", lower_middle),
    "sagc-conventions": patched("metronome.sagc.events.straggler_ratio", lambda _: 1.0),
    "sagc-convergence": NO_DUAL,
    "sagc-99.6-43.4": NO_DUAL,
    "sagc-hull": patched("metronome.sagc.options.utility", lambda _, size: size / 4),
    "sagc-dwell": always_dwelt,
    "sagc-infeasible": no_fallback,
    "sagc-hours-equal-steps": sized_by("g"),
    "sagc-hours-equal-rollouts": sized_by("largest"),
    "sagc-budgets": sized_by("largest"),
    "sagc-dapo-filter": patched("metronome.sagc.options.utility", lambda *_: 1.0),
    "sagc-traps": patched("metronome.sagc.events.straggler_ratio", lambda own: max(own) / max(1, min(own))),
    "survey-generation-time": patched("metronome.reproduce.survey.generation_seconds", lambda n, length, _: n * length),
    "survey-admission": patched("metronome.periodic.sources._Source.capacity", lambda _, flow: flow.batch),
    "survey-staleness-bound": patched("metronome.periodic.sources.Bounded.verdict", lambda *_: Verdict.TRAIN),
    "survey-staleness-simulated": anything_goes,
}


def test_every_cheap_row_has_a_way_to_fail() -> None:
    assert sorted(BREAKS) == sorted(row.name for row in CORE)


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_computation_is_out_of_tolerance(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    require_simpy(BY_NAME[name])
    BREAKS[name](monkeypatch)
    found = rows.run(BY_NAME[name])
    assert found.status is Status.OUT
    assert "wanted" in found.note
    assert not found.succeeded


def test_the_simulated_hours_follow_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """The long row on fewer steps: it is the smaller number of rollouts that saves hours at equal steps."""
    pytest.importorskip("simpy")
    monkeypatch.setattr("metronome.reproduce.sagc_hours.SIMULATED_STEPS", 120)
    name = "fixed_prompts, 8 slots, equal steps"
    assert BY_NAME["sagc-hours-simulated"].compute()[name] < 25.0
    monkeypatch.setattr("metronome.sagc.controller.prompts", lambda _, rollouts, __, size, largest: rollouts // size)
    assert BY_NAME["sagc-hours-simulated"].compute()[name] == pytest.approx(29.5, abs=1.0)


# --- rows themselves ------------------------------------------------------------------------------


def row_of(compute, *figures, **more) -> Row:
    return Row("a", "T", "c", "ours", Way.ARITHMETIC, figures, "r.", compute, **more)


def test_a_figure_that_is_not_a_number_is_out_of_tolerance() -> None:
    for value in (math.nan, math.inf, -math.inf):
        found = rows.run(row_of(lambda value=value: {"x": value}, rows.near("x", 1.0, 0.5)))
        assert found.status is Status.OUT
        json.dumps(found.as_json(), allow_nan=False)


def test_bounds_include_their_ends_and_nothing_beyond() -> None:
    figure = rows.near("x", 1.0, 0.5)
    assert [figure.holds(value) for value in (0.49, 0.5, 1.5, 1.51)] == [False, True, True, False]
    assert rows.exactly("x", 0.0).holds(0.0)
    assert not rows.exactly("x", 0.0).holds(1e-300)
    assert rows.at_most("x", 1.0).tolerance == "at most 1"
    assert rows.near("x", 0.4, 0.02, "%").tolerance == "40.0 % +- 2.0 %"


def test_a_row_without_its_package_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "find_spec", lambda name: None)
    found = rows.run(row_of(lambda: {"x": 1.0}, rows.exactly("x", 1.0), needs=("torch",)))
    assert found.status is Status.NOT_RUN
    assert found.note == "needs torch: install torch"
    assert not found.succeeded


def test_a_row_that_forgets_a_figure_is_a_fault() -> None:
    with pytest.raises(AssertionError, match="its figures"):
        rows.run(row_of(dict, rows.exactly("x", 1.0)))


def test_rows_keep_their_order_whatever_is_asked_for() -> None:
    names = [ROWS[5].name, ROWS[0].name]
    assert [row.name for row in choose(names, cheap=False)] == names[::-1]
    assert all(row.cheap for row in choose([], cheap=True))
    assert len(choose([], cheap=False)) == len(ROWS)
