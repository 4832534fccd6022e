"""A tiny model, its tokenizer, prompts and a reward function in a folder: made here, always the same, no network.

``python -m metronome_areal.cpu.assets FOLDER`` makes them by hand.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SPECIAL = ("<pad>", "<eos>")
TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
REWARD = '''"""A reward that varies with a random model: the share of digits, and whether the sum is there."""


def reward(prompt, completions, prompt_ids, completion_ids, answer=None, **others):
    digits = sum(character.isdigit() for character in completions)
    right = float(bool(answer) and answer in completions)
    return digits / max(1, len(completions)) + right
'''


@dataclass(frozen=True)
class Assets:
    """Where things lie: the model with its tokenizer, 64 prompts (``messages``, ``answer``), and ``reward``."""

    model: Path
    prompts: Path
    reward: Path


def make(folder: Path, *, hidden: int = 64, layers: int = 2, tie: bool = False) -> Assets:
    """Writes everything into ``folder``; the model is a Qwen2 of about 90,000 parameters in float32.

    Args:
        folder: is made if it isn't there.
        hidden: the model's width.
        layers: its depth.
        tie: whether input and output embeddings are one.
    """
    found = Assets(folder / "model", folder / "prompts.jsonl", folder / "tiny_reward.py")
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(found.model)
    _save_model(found.model, tokenizer, hidden, layers, tie)
    rows = [
        {"messages": [{"role": "user", "content": f"{left}+{right}=?"}], "answer": str(left + right)}
        for left in range(8)
        for right in range(8)
    ]
    found.prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    found.reward.write_text(REWARD, encoding="utf-8")
    return found


def _tokenizer() -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [*map(chr, range(32, 127)), "\n", "\t"]
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


def _save_model(folder: Path, tokenizer: Any, hidden: int, layers: int, tie: bool) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=len(tokenizer),  # 99: uneven over two ranks
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=tie,
        # Far enough from uniform that the most likely token is the same in every order of summation.
        initializer_range=0.1,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen2ForCausalLM(config).save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m metronome_areal.cpu.assets FOLDER")
    print(make(Path(sys.argv[1])))
