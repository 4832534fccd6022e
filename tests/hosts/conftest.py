"""What the local host's tests share: a tiny model on disk and recipes that train it."""

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
pytest.importorskip("torch")
pytest.importorskip("transformers")

import tiny_local
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Tiny matrices gain nothing from threads, and the cores belong to the workers too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """The folder of a random Llama with a character tokenizer, ``prompts.jsonl`` and ``rewards.py``."""
    return tiny_local.save(tmp_path_factory.mktemp("tiny_model"))


@pytest.fixture
def tiny_recipe(tiny_model):
    """``tiny_recipe(training={...}, metronome={...})``: a recipe of the tiny model, sections merged over it."""

    def make(**sections):
        recipe = {
            "host": "local",
            "model": {"name": str(tiny_model)},
            "task": {
                "kind": "dataset",
                "path": str(tiny_model / "prompts.jsonl"),
                "reward": f"{tiny_model / 'rewards.py'}:early",
                "held_out": 0.2,
            },
            "sampling": {"max_tokens": 6, "max_prompt_tokens": 64, "slots": 8},
            "training": {"periods": 2, "prompts": 4, "lr": 1e-2},
            "evaluation": {"every": 0},
            "machine": {"workers": 1, "threads": 1, "pin": False, "timeout": 60},
            "metronome": {
                "rollout_source": "periodic",
                "attention": "shared_prompt",
                "fixed": {"size": 4},
            },
        }
        for name, section in sections.items():
            if isinstance(section, dict) and isinstance(recipe.get(name), dict):
                recipe[name] = {**recipe[name], **section}
            else:
                recipe[name] = section
        return recipe

    return make
