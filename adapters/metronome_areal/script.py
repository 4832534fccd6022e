"""A training script as AReaL's users write them: prompts from a file, a reward by its path, ``PPOTrainer.train``.

The recipes run it: ``python -m metronome_areal script.py --config script.yaml key=value ...``. Nothing in it is
metronome's; without the launcher it is a run of AReaL alone.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal import PPOTrainer
from areal.api.cli_args import GRPOConfig, load_expr_config
from areal.dataset import get_custom_dataset
from areal.utils.hf_utils import load_hf_tokenizer

from metronome.errors import ConfigurationError

WORKFLOW = "areal.workflow.rlvr.RLVRWorkflow"


@dataclass
class ScriptConfig:
    """What a run is besides AReaL's configuration.

    Attributes:
        reward: ``package.module.function`` or ``FILE.py:function``; called as AReaL's reward functions are.
        keep: path of a function of a group that says whether it is trained, as ``metronome_areal.script.mixed``.
        enable_thinking: of the chat template.
    """

    reward: str = "areal.reward.gsm8k.gsm8k_reward_fn"
    keep: str | None = None
    enable_thinking: bool = False


@dataclass
class Config(GRPOConfig):
    """AReaL's GRPOConfig with a section ``script``."""

    script: ScriptConfig = field(default_factory=ScriptConfig)


def mixed(group: dict[str, Any]) -> bool:
    """Whether the group's rewards differ, as DAPO's dynamic sampling asks: alike ones have no advantage."""
    return len(set(group["rewards"].tolist())) > 1


def prompts(dataset: Any, tokenizer: Any) -> Any:
    """The rows of ``dataset.path``: of a ``.jsonl`` file with ``messages``, or what AReaL loads by that name.

    Raises ConfigurationError for a file that isn't there, or one without ``messages``.
    """
    path = Path(dataset.path)
    if path.suffix != ".jsonl":
        return get_custom_dataset(split=dataset.split, dataset_config=dataset, tokenizer=tokenizer)
    if not path.is_file():
        raise ConfigurationError("there is no such file", found=str(path), where="path of a data set", remedy="FILE")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not rows or any("messages" not in row for row in rows):
        raise ConfigurationError(
            "prompts are rows with messages",
            found=sorted(rows[0]) if rows else "an empty file",
            where=str(path),
            remedy='{"messages": [{"role": "user", "content": "..."}], "answer": "..."} a line',
        )
    if dataset.max_length is None:
        return rows
    return [row for row in rows if _tokens(row, tokenizer) <= dataset.max_length]


def _tokens(row: dict[str, Any], tokenizer: Any) -> int:
    return sum(len(tokenizer.encode(message["content"])) for message in row["messages"])


def importable(reward: str) -> str:
    """``FILE.py:function`` as ``FILE.function``, with its folder where modules are looked for; a path as it is."""
    file, _, name = reward.rpartition(":")
    if not file:
        return reward
    if not Path(file).is_file():
        raise ConfigurationError("there is no such file", found=file, where="script.reward", remedy="FILE.py:function")
    sys.path.insert(0, str(Path(file).absolute().parent))
    return f"{Path(file).stem}.{name}"


def main(arguments: list[str]) -> None:
    """Reads the configuration and trains."""
    config, _ = load_expr_config(arguments, Config)
    tokenizer = load_hf_tokenizer(config.tokenizer_path)
    training = prompts(config.train_dataset, tokenizer)
    wanted = config.valid_dataset is not None and config.valid_dataset.path
    evaluation = prompts(config.valid_dataset, tokenizer) if wanted else None
    named = {
        "reward_fn": importable(config.script.reward),
        "gconfig": config.gconfig,
        "tokenizer": config.tokenizer_path,
        "enable_thinking": config.script.enable_thinking,
    }
    with PPOTrainer(config, train_dataset=training, valid_dataset=evaluation) as trainer:
        trainer.train(
            workflow=WORKFLOW,
            workflow_kwargs=named,
            eval_workflow=WORKFLOW,
            eval_workflow_kwargs={**named, "gconfig": config.eval_gconfig},
            dynamic_filter_fn=config.script.keep,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
