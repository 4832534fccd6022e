"""Whole runs of a tiny model in this process, and what they leave behind."""

import contextlib
import io

from rich.console import Console

from metronome_local import host
from metronome_local.build import build
from metronome_local.progress import read_jsonl
from metronome_local.validation import validate

# A reward function that sends its own process a signal, the second time that it is called after a file says so.
SIGNALLING = '''"""A reward function that ends its own run."""

import multiprocessing
import os
import pathlib

calls = 0


def early(prompts, completions, **columns):
    """The share of characters that come before "P"."""
    global calls
    number, path, text, note = os.environ.get("METRONOME_TEST_SIGNAL", "0||| ").split("|")
    if int(number) and pathlib.Path(path).is_file() and text in pathlib.Path(path).read_text():
        calls += 1
        if calls == 2:
            pids = [str(child.pid) for child in multiprocessing.active_children()]
            pathlib.Path(note).write_text(" ".join(pids))
            os.kill(os.getpid(), int(number))
    return [sum(c < "P" for c in text) / max(1, len(text)) for text in completions]
'''
# Prompts whose index is a multiple of three speak for long, so that publications meet them in the middle.
UNEVEN = '''"""Rollout functions of the tests."""

from metronome_local.rollouts import Request, Row


def uneven(prompt, tokenizer):
    """120 tokens for every third prompt, 3 for the others."""
    row = Row(list(prompt.ids))
    row.add_sampled((yield Request(prompt.ids, 120 if prompt.index % 3 == 0 else 3)))
    return [row]


def broken(prompt, tokenizer):
    """Raises at the prompt with index 2."""
    row = Row(list(prompt.ids))
    row.add_sampled((yield Request(prompt.ids)))
    if prompt.index == 2:
        raise RuntimeError("the tool is down")
    return [row]
'''


@contextlib.contextmanager
def built(recipe, folder, resume=False):
    """A trainer in this process, its workers beside it; ended whatever happens."""
    console = Console(file=io.StringIO(), width=200)
    parts = validate(recipe, "the test's recipe")
    trainer = build(*parts, folder, console, base=folder.parent, resume=str(folder) if resume else None)
    trainer.console = console
    try:
        yield trainer
    finally:
        trainer.close()
        trainer.parts.progress.close()
        assert not any(worker.process.is_alive() for worker in trainer.parts.pool._workers)


def train(recipe, folder, resume=False):
    """Trains to the end; returns the trainer with what it left behind."""
    with built(recipe, folder, resume) as trainer:
        host.train(trainer, trainer.console)
    return trainer


def groups_in(folder):
    return read_jsonl(folder / "groups.jsonl")


def periods_in(folder):
    return [record for record in read_jsonl(folder / "metrics.jsonl") if "fingerprint" in record]


def trained_in(folder):
    """Prompt index -> period; every prompt counted once."""
    trained = {group["index"]: group["period"] for group in groups_in(folder)}
    assert len(trained) == len(groups_in(folder))
    return trained
