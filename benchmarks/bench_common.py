"""What the benchmarks of several hosts share: ways in turns, a model's shape, and figures on the results page."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "docs" / "results"


def in_turns(
    ways: Mapping[str, Callable[[], object]], repeats: int, *, once: str = "", warm: bool = False
) -> dict[str, list[float]]:
    """Wall seconds of each way, ``repeats`` times in turns, after a round that isn't counted unless they are ``warm``.

    The way ``once`` runs in one turn only.
    """
    found: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(int(warm), repeats + 1):
        for name, way in ways.items():
            if name == once and repeat != 1:
                continue
            started = time.perf_counter()
            way()
            seconds = time.perf_counter() - started
            print(f"{name}: {seconds:.4g} s{'' if repeat else ' (not counted)'}", file=sys.stderr)
            if repeat:
                found[name].append(seconds)
    return found


def save_smollm2(folder: Path, layers: int = 30) -> Path:
    """A random Llama of SmolLM2-135M's shape (its published configuration; fewer ``layers`` for tests)."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rope_theta=100000,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def table(rows: list[tuple[str, ...]]) -> str:
    """Markdown; the first row is the head."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])


def between(begin: str, end: str, text: str, folder: Path = FOLDER) -> None:
    """Puts ``text`` between two marks of ``folder``'s README.md, in the place of what stands there."""
    page = folder / "README.md"
    head, found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, closed, tail = rest.partition(end)
    if not found or not closed:
        raise SystemExit(f"{page} lacks the lines {begin} and {end}, between which the figures are written")
    page.write_text(f"{head}{begin}\n\n{text}\n\n{end}{tail}", encoding="utf-8")
