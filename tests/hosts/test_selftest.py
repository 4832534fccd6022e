"""``metronome selftest``: passes where the backends are right, names the case where one isn't, refuses bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from metronome.cli import main  # noqa: E402
from metronome.shared_prompt import selftest as module  # noqa: E402
from metronome.shared_prompt import selftest_cases  # noqa: E402
from metronome.shared_prompt.cascade import CascadeBackend  # noqa: E402
from metronome.shared_prompt.reference import ReferenceBackend  # noqa: E402
from metronome.shared_prompt.selftest import selftest  # noqa: E402

KEPT = ("toy: uneven responses", "toy: a cached prompt, window 4", "toy: several groups and padding, sinks")


TIMED = {"shape": [512, 8, 64], "ratio": 2.0, "seconds_rows": 2.0, "seconds_shared": 1.0}


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three toy cases, one dtype, a small timing."""
    every = selftest_cases.cases
    monkeypatch.setattr(module, "cases", lambda *given: [one for one in every(*given) if one.name in KEPT])
    monkeypatch.setattr(module, "DTYPES", {"cpu": ("float32",)})
    monkeypatch.setattr(module, "timing", lambda *given: dict(TIMED))


class WindowDropped(CascadeBackend):
    """Faulty: every layer is full attention."""

    def attend(self, *given: Any, window: int | None = None, **named: Any) -> Any:
        return super().attend(*given, **named)


class HalfTheKeysGradient(ReferenceBackend):
    """Faulty: outputs are right, dk is half of what it should be."""

    def attend(self, q: Any, k: Any, *given: Any, **named: Any) -> Any:
        return super().attend(q, k / 2 + k.detach() / 2, *given, **named)


class Raising(CascadeBackend):
    """Faulty: the kernel raises, with sinks only."""

    def attend(self, *given: Any, sinks: Any = None, **named: Any) -> Any:
        if sinks is not None:
            raise RuntimeError("illegal memory access")
        return super().attend(*given, sinks=sinks, **named)


class NeverTheSame(CascadeBackend):
    """Right up to rounding, other bits at every call."""

    calls = 0

    def attend(self, *given: Any, **named: Any) -> Any:
        self.calls += 1
        return super().attend(*given, **named) * (1 + 1e-6 * self.calls)


def test_all_cases_pass_on_this_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "selftest.json"
    assert main(["selftest", "--device", "cpu", "--backend", "cascade", "--json", str(report)]) == 0
    shown = capsys.readouterr().out
    assert "138 of 138 cases passed" in shown
    found = json.loads(report.read_text())
    assert found["passed"] is True
    assert found["device"]["kind"] == "cpu"
    assert found["device"]["name"]
    assert found["versions"]["torch"].startswith("2.")
    kinds = {(one["dtype"], one["kind"]) for one in found["cases"]}
    assert kinds == {(dtype, kind) for dtype in ("float64", "float32", "bfloat16") for kind in ("toy", "middle")}
    exact = [one["largest"] for one in found["cases"] if one["dtype"] == "float64"]
    assert max(value for largest in exact for value in largest.values()) < 1e-12
    assert {"output", "dq", "dk", "dv", "dsinks"} == {name for largest in exact for name in largest}
    assert all(one["seconds_rows"] > 0 and one["seconds_shared"] > 0 for one in found["timing"])


@pytest.mark.usefixtures("few")
def test_every_backend_of_the_device_is_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "6 of 6 cases passed" in shown
    assert "cascade" in shown
    assert "reference" in shown
    assert "2.00x" in shown
    assert "timed at a prompt of 512 and 8 responses of 64" in shown


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    "faulty, case, what",
    [
        (WindowDropped(), KEPT[1], "is off by"),
        (HalfTheKeysGradient(), KEPT[0], "dk is off by 5.0e-01"),
        (Raising(), KEPT[2], "RuntimeError: illegal memory access"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_faulty_backend_fails_and_its_case_is_named(
    faulty: Any, case: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(module.select, "backend_named", lambda name: faulty)
    report = tmp_path / "report.json"
    assert main(["selftest", "--device", "cpu", "--backend", "cascade", "--json", str(report)]) == 1
    line = next(line for line in capsys.readouterr().out.splitlines() if f"{case}:" in line)
    assert line.startswith("FAILED cascade, float32")
    assert what in line
    found = json.loads(report.read_text())
    assert found["passed"] is False
    assert case in [one["case"] for one in found["cases"] if not one["passed"]]


@pytest.mark.usefixtures("few")
def test_other_bits_are_told_and_fail_only_where_determinism_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert selftest("cpu", backend="cascade", find=lambda name: NeverTheSame()) == 0
    assert "0 of 3" in capsys.readouterr().out
    torch.use_deterministic_algorithms(True)
    try:
        assert selftest("cpu", backend="cascade", find=lambda name: NeverTheSame()) == 1
        assert "different bits" in capsys.readouterr().out
        assert selftest("cpu", backend="cascade") == 0
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("few")
def test_what_a_backend_refuses_is_listed_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    class NoWindows(CascadeBackend):
        def supports(self, need: Any) -> str | None:
            return "no windows here" if need.window else super().supports(need)

    assert selftest("cpu", backend="cascade", find=lambda name: NoWindows()) == 0
    shown = capsys.readouterr().out
    assert "2 of 2 cases passed" in shown
    assert "not run: cascade, 1 cases: no windows here" in shown


@pytest.mark.parametrize("device", ["cuda", "npu"])
def test_a_device_that_is_not_there_is_one_clear_line(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert main(["selftest", "--device", device]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert f"torch doesn't see this device; found '{device}'" in shown.err


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    "arguments, what",
    [
        (["--device", "tpu"], "unknown device"),
        (["--device", "cpu", "--backend", "varlen"], "no backend of that name on cpu"),
        (["--device", "cpu", "--json", "missing/report.json"], "the report can't be written"),
    ],
    ids=["device", "backend", "report"],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], what: str, capsys: Any) -> None:
    assert main(["selftest", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert what in shown.err
    assert shown.err.count("\n") == 1


@pytest.mark.usefixtures("few")
def test_a_backend_that_serves_no_case_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    class Nothing(CascadeBackend):
        def supports(self, need: Any) -> str | None:
            return "not on Tuesdays"

    with pytest.raises(module.ConfigurationError, match="no case could be run on cpu: not on Tuesdays"):
        selftest("cpu", backend="cascade", find=lambda name: Nothing())


def test_long_cases_are_those_of_the_device() -> None:
    def long(device: str) -> list[str]:
        return [one.title for one in selftest_cases.cases(device, True) if one.kind == "long"]

    assert "16384 and 8 x 1024" in long("cuda")
    assert "16384 and 8 x 1024" not in long("cpu")
    assert "1500 segments" in long("npu")
    assert not [one for one in selftest_cases.cases("cuda", False) if one.kind == "long"]


def test_a_dense_mask_of_gigabytes_is_not_run() -> None:
    by_title = {one.title: one for one in selftest_cases.cases("cpu", True)}
    assert "GiB" in (by_title["4096 and 8 x 512"].too_dense("reference") or "")
    assert by_title["4096 and 8 x 512"].too_dense("cascade") is None
    assert by_title["equal responses"].too_dense("reference") is None


def test_the_gpu_benchmark_says_that_it_was_not_run_where_there_is_no_gpu(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    program = Path(__file__).parents[2] / "benchmarks" / "attention_gpu.py"
    out = tmp_path / "attention_gpu.json"
    done = subprocess.run([sys.executable, program, "--out", out], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("not run: torch sees no GPU here")
    assert done.stderr.count("\n") == 1
    assert not out.exists()
