"""An agent for OpenRLHF's ``--train.agent_func_path`` that keeps a record of what it generated, beside its own file.

It answers in one turn, judged by ``reward.py`` beside it. Prompts take different times to judge, so that groups finish
apart. ``place`` copies it to a run's assets; ``record`` reads what it wrote.
"""

import asyncio
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from openrlhf.utils.agent import SingleTurnAgentExecutor

SECONDS = 0.25


class AgentExecutor(SingleTurnAgentExecutor):
    """OpenRLHF's; each sample is a line: prompt, tokens, the engine's version and a fingerprint of its weights."""

    def __init__(self):
        super().__init__(str(Path(__file__).with_name("reward.py")))

    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None):
        version, before = llm_engine.version, await llm_engine.fingerprint()
        found = await super().execute(prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images)
        await asyncio.sleep(SECONDS * (sum(map(ord, prompt)) % 4))
        line = {
            "prompt": prompt,
            "tokens": found["observation_tokens"],
            "versions": [version, llm_engine.version],
            "weights": [before, await llm_engine.fingerprint()],
        }
        with Path(__file__).with_suffix(".jsonl").open("a") as out:
            out.write(json.dumps(line) + "\n")
        return found


@dataclass(frozen=True)
class Sample:
    """A line of the record; ``versions`` and ``weights`` before and after it was made."""

    prompt: str
    tokens: tuple[int, ...]
    versions: tuple[int, int]
    weights: tuple[float, float]


def place(assets, name="sampled"):
    """The agent under ``name`` beside the assets' reward, with a record of its own; returns OpenRLHF's flags for it."""
    path = shutil.copy(__file__, assets.reward.with_name(f"{name}.py"))
    return ["--train.agent_func_path", str(path)]


def record(assets, name="sampled"):
    """What was generated under each version of the weights: version -> samples."""
    found = {}
    for line in assets.reward.with_name(f"{name}.jsonl").read_text().splitlines():
        fields = {key: tuple(value) if isinstance(value, list) else value for key, value in json.loads(line).items()}
        found.setdefault(fields["versions"][0], []).append(Sample(**fields))
    return found
