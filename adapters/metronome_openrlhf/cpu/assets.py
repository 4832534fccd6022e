"""A tiny model, its tokenizer, prompts and a reward function in a folder: made here, always the same, no network."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SPECIAL = ("<pad>", "<eos>")
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}="
REWARD = '''"""A reward that varies with a random model: the share of digits, and whether the sum is there."""


def reward_func(queries, prompts, labels):
    answer = queries[0][len(prompts[0]):].replace("<eos>", "")
    digits = sum(character.isdigit() for character in answer)
    right = float(bool(labels[0]) and labels[0] in answer)
    score = digits / max(1, len(answer)) + right
    return {"rewards": score, "scores": score, "extra_logs": {"answer_length": float(len(answer))}}
'''


@dataclass(frozen=True)
class Assets:
    """Where things lie: the model with its tokenizer, 64 prompts (``input``, ``label``), and ``reward_func``."""

    model: Path
    prompts: Path
    reward: Path

    def flags(self) -> list[str]:
        """OpenRLHF's flags for them."""
        return [
            *("--actor.model_name_or_path", str(self.model), "--data.prompt_dataset", str(self.prompts)),
            *("--data.input_key", "input", "--data.label_key", "label", "--reward.remote_url", str(self.reward)),
        ]


def make(folder: Path, *, hidden: int = 64, layers: int = 2) -> Assets:
    """Writes everything into ``folder``; the model is a Qwen2 of about 100,000 parameters in bfloat16.

    Its heads have 32 dimensions each: vLLM's attention on a CPU takes multiples of 32.
    """
    found = Assets(folder / "model", folder / "prompts.jsonl", folder / "reward.py")
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(found.model)
    _save_model(found.model, tokenizer, hidden, layers)
    lines = [
        json.dumps({"input": f"{left}+{right}", "label": str(left + right)}) for left in range(8) for right in range(8)
    ]
    found.prompts.write_text("\n".join(lines) + "\n")
    found.reward.write_text(REWARD)
    return found


def _tokenizer() -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [*map(chr, range(32, 127)), "\n"]
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *letters])}
    single = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    single.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    single.decoder = decoders.Fuse()
    single.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=single, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def _save_model(folder: Path, tokenizer: Any, hidden: int, layers: int) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=128,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.1,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def main(arguments: Sequence[str]) -> int:
    """``python -m metronome_openrlhf.cpu.assets FOLDER``; returns the exit code."""
    usage = "usage: python -m metronome_openrlhf.cpu.assets FOLDER   (a tiny model, prompts and a reward go there)"
    if {"-h", "--help"} & set(arguments):
        print(usage)
        return 0
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print(usage, file=sys.stderr)
        return 2
    found = make(Path(arguments[0]))
    print(" ".join(shlex.quote(word) for word in found.flags()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
