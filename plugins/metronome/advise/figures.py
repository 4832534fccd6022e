"""Advice as plain values, for JSON: everything that the text prints."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from metronome.advise.advise import Advice, Row
from metronome.advise.gain import Calibration, Gain


def as_json(advice: Advice) -> dict[str, Any]:
    """Plain values of everything that is printed."""
    cluster = advice.base.cluster
    return {
        "advice": True,
        "run": advice.name,
        "host": advice.host,
        "source": advice.source,
        "facts": asdict(advice.facts),
        "calibration": {
            "steps": len(advice.base.steps),
            "simulated": _calibration(advice.simulated),
            "replayed": None if advice.replayed is None else _calibration(advice.replayed),
        },
        "model": {
            "engines": cluster.engines.count,
            "slots": cluster.engines.slots,
            "tokens_per_second_alone": cluster.engines.decode.rate(1),
            "tokens_per_second_full": cluster.engines.decode.rate(cluster.engines.slots),
            "prefill_seconds_per_token": cluster.engines.prefill_seconds_per_token,
            "prefill_seconds_per_token_at_most": None
            if advice.base.dearest is None
            else advice.base.dearest.prefill_seconds_per_token,
            "decode_error": advice.base.decode_error,
            "trainer_ranks": cluster.trainer.ranks,
            "seconds_per_token": cluster.trainer.seconds_per_token,
            "seconds_per_group": cluster.trainer.seconds_per_group,
            "group_cost": None if advice.base.cost is None else asdict(advice.base.cost),
            "padded": cluster.trainer.padded,
            "optimizer_seconds": cluster.trainer.optimizer_seconds,
            "publication_seconds": cluster.publication_seconds,
        },
        "split": None if advice.split is None else {"engines": advice.split[0], "trainer_ranks": advice.split[1]},
        "measured": list(advice.base.measured),
        "assumed": list(advice.base.assumed),
        "notes": list(advice.notes),
        "flags_go": advice.beside,
        "techniques": [_row(row) for row in advice.rows],
    }


def _row(row: Row) -> dict[str, Any]:
    return {
        "key": row.key,
        "name": row.name,
        "gain": _gain(row.gain),
        "gain_over": None if row.over is None else {"than": row.than, **(_gain(row.over) or {})},
        "per": row.per,
        "method": row.method,
        "changes": row.changes,
        "changes_gradient": row.changes_gradient,
        "flag": row.flag,
        "verdict": row.verdict,
        "why": row.why,
    }


def _gain(found: Gain | None) -> dict[str, float | None] | None:
    return None if found is None else {"value": found.value, "low": found.low, "high": found.high}


def _calibration(fits: Calibration) -> dict[str, Any]:
    return {
        "step_seconds": fits.computed,
        "recorded_step_seconds": fits.recorded,
        "error_of_the_mean": fits.level,
        "error_of_a_step": fits.error,
        "trusted": fits.trusted,
    }
