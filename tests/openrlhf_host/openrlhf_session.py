"""Runs ``python -m metronome_openrlhf`` with a Ray of its own, and reads what it printed."""

from __future__ import annotations

import ast
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from metronome_openrlhf.cpu.assets import Assets

VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "RAY_DEDUP_LOGS": "0",
    "RAY_COLOR_PREFIX": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
}

# OpenRLHF's schedule has a rate of 0 in the first step otherwise.
_STOCK = """
--actor.num_nodes 1 --actor.num_gpus_per_node 1 --ref.num_nodes 1 --ref.num_gpus_per_node 1 --vllm.num_engines 1
--ds.zero_stage 2 --algo.advantage.estimator group_norm --algo.kl.init_coef 0
--rollout.batch_size 4 --rollout.n_samples_per_prompt 4 --rollout.micro_batch_size 8
--train.batch_size 16 --train.micro_batch_size 4 --train.num_episodes 1 --train.max_epochs 1
--data.max_len 48 --rollout.max_new_tokens 16 --data.max_samples 8 --data.apply_chat_template
--actor.adam.lr 3e-3 --actor.lr_scheduler constant --actor.lr_warmup_ratio 0
"""
_STEP = re.compile(r"Global step (\d+): (\{.*\})")


@dataclass(frozen=True)
class Output:
    """A finished run: exit code, everything it and its workers printed, metrics of each step, seconds."""

    returncode: int
    text: str
    steps: tuple[dict[str, float], ...]
    seconds: float

    def tail(self, lines: int = 60) -> str:
        """The last lines, for an assertion's message."""
        return "\n".join(self.text.splitlines()[-lines:])


def stock(assets: Assets, folder: Path) -> list[str]:
    """OpenRLHF's flags of a small run: GRPO, 4 prompts of 4 samples a step, 2 steps, one optimiser step each."""
    places = ["--ckpt.path", str(folder / "checkpoints"), "--ckpt.output_dir", str(folder / "trained")]
    return [*assets.flags(), *_STOCK.split(), *places]


def run(
    flags: Sequence[str],
    *,
    timeout: float = 900,
    variables: Mapping[str, str] | None = None,
    module: str = "metronome_openrlhf",
) -> Output:
    """Runs ``python -m metronome_openrlhf``, or another ``module``, with ``flags`` and waits for its end."""
    return run_command([sys.executable, "-m", module, *flags], timeout=timeout, variables=variables)


def run_command(command: Sequence[str], *, timeout: float = 900, variables: Mapping[str, str] | None = None) -> Output:
    """Runs ``command``, which starts OpenRLHF, and waits for its end.

    A run that exceeds ``timeout`` seconds is ended with return code -9, its output kept. Only processes that it
    started are ended.
    """
    # Short: Ray's sockets lie below it, and their paths may have 107 characters.
    folder = tempfile.mkdtemp(prefix="mray")
    kept = {name: value for name, value in os.environ.items() if name not in ("CUDA_VISIBLE_DEVICES", "RAY_ADDRESS")}
    begin = time.monotonic()
    driver = subprocess.Popen(
        list(command),
        env=kept | VARIABLES | {"RAY_TMPDIR": folder} | dict(variables or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    lines: list[str] = []
    late = False
    for line in _lines(driver, begin + timeout):
        if line is None:
            late = True
            lines.append(f"stopped: it ran longer than {timeout:.0f} s")
            break
        lines.append(line)
    _end(driver)
    code = driver.wait()
    shutil.rmtree(folder, ignore_errors=True)
    text = "\n".join(lines)
    return Output(-9 if late else code, text, tuple(_steps(text)), time.monotonic() - begin)


def moved(first: Path, last: Path) -> float:
    """Mean over random tokens of KL(first, last), in nats, between two saved models of ``cpu.assets``."""
    import torch
    from transformers import AutoModelForCausalLM

    tokens = torch.randint(2, 97, (8, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        a, b = (
            AutoModelForCausalLM.from_pretrained(one, dtype=torch.float32)(tokens).logits.log_softmax(-1)
            for one in (first, last)
        )
    return float((a.exp() * (a - b)).sum(-1).mean())


def _steps(text: str) -> Iterator[dict[str, float]]:
    for found in _STEP.finditer(text):
        numbers = ast.literal_eval(re.sub(r"\b(nan|inf)\b", "1e999", found[2]))
        yield {"step": float(found[1])} | numbers


def _end(driver: subprocess.Popen[str]) -> None:
    """Ends the driver if it runs, and what it had started."""
    try:
        processes = psutil.Process(driver.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return
    if driver.poll() is None:
        driver.send_signal(signal.SIGTERM)
        try:
            driver.wait(timeout=30)
        except subprocess.TimeoutExpired:
            driver.kill()
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def _lines(driver: subprocess.Popen[str], end: float) -> Iterator[str | None]:
    """The driver's lines, then an end; None once when ``end`` passes first."""
    assert driver.stdout is not None
    came: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in driver.stdout:
            came.put(line.rstrip("\n"))
        came.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = came.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            yield None
            return
        if line is None:
            return
        yield line
