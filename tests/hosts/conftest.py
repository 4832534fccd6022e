"""What the local host's tests share: a tiny model on disk and recipes that train it."""

import importlib.util
import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
    collect_ignore_glob = ["test_local_*.py"]  # the local host needs its extra: pip install "metronome-rl[local]"


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Tiny matrices gain nothing from threads, and the cores belong to the workers too."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """The folder of a random Llama with a character tokenizer, ``prompts.jsonl`` and ``rewards.py``."""
    import tiny_local

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


@pytest.fixture(scope="session")
def resumable(tiny_model, tmp_path_factory):
    """A recipe in which nothing depends on time: one slot, so that groups arrive in the order of their prompts."""
    import tiny_runs

    folder = tmp_path_factory.mktemp("resumable")
    (folder / "signalling.py").write_text(tiny_runs.SIGNALLING)
    return {
        "host": "local",
        "model": {"name": str(tiny_model)},
        "task": {
            "kind": "dataset",
            "path": str(tiny_model / "prompts.jsonl"),
            "reward": f"{folder / 'signalling.py'}:early",
            "held_out": 0.2,
        },
        "sampling": {"max_tokens": 8, "max_prompt_tokens": 64, "slots": 1, "fixed_lengths": [2, 8]},
        "training": {
            "periods": 5,
            "prompts": 4,
            "lr": 1e-2,
            "schedule": "linear",
            "kl": 0.05,
            "weight_decay": 0.1,
        },
        "evaluation": {"every": 2, "max_prompts": 2},
        "machine": {"workers": 1, "threads": 1, "pin": False, "timeout": 60},
        "checkpoints": {"every": 2},
        "metronome": {
            "rollout_source": "periodic",
            "periodic": {"audit_every": 2},
            "loss": "a3po",
            "attention": "shared_prompt",
            "shared_prompt": {"backend": "cascade"},
            "group_controller": "sagc",
            "sagc": {"sizes": [2, 4], "start": 2, "tau": 1.3, "delta": 0.2, "eta": 0.6, "min_dwell": 1},
        },
    }


@pytest.fixture(scope="session")
def whole(resumable, tmp_path_factory):
    """The uninterrupted run of ``resumable``: its folder and its trainer."""
    import tiny_runs

    folder = tmp_path_factory.mktemp("whole") / "run"
    return folder, tiny_runs.train(resumable, folder)
