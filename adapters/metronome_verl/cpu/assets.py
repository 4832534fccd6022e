"""A tiny model, its tokenizer, data and a reward function in a folder: made here, the same every time, no network.

``python -m metronome_verl.cpu.assets FOLDER`` makes them by hand.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metronome.errors import ConfigurationError

SPECIAL = ("<pad>", "<|im_start|>", "<|im_end|>")
"""The tokens of the tokenizer that aren't bytes."""

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The chat template."""

REWARD = '''"""A reward that varies with a random model: the share of digits, and whether the sum is there."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **others):
    digits = sum(character.isdigit() for character in solution_str)
    right = float(str(ground_truth) in solution_str)
    return {"score": digits / max(1, len(solution_str)) + right, "acc": right}
'''
"""The text of ``reward.py``."""


@dataclass(frozen=True)
class Assets:
    """Where things lie: the model with its tokenizer, 64 and 4 rows of parquet, ``compute_score``."""

    model: Path
    train: Path
    validation: Path
    reward: Path


def make(folder: Path, *, hidden: int = 64, layers: int = 2) -> Assets:
    """Writes everything into ``folder``; the model is a Qwen2 of about 90,000 parameters.

    Raises ConfigurationError when the folder can't be written.
    """
    found = Assets(folder / "model", folder / "train.parquet", folder / "validation.parquet", folder / "reward.py")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        found.reward.write_text(REWARD, encoding="utf-8")
        _save_rows(found.train, 64, seed=0)
        _save_rows(found.validation, 4, seed=1)
        tokenizer = _tokenizer()
        tokenizer.save_pretrained(found.model)
        _save_model(found.model, tokenizer, hidden, layers)
    except OSError as error:
        raise ConfigurationError(
            f"the tiny model and its data can't be written: {error.strerror or error}",
            found=str(folder),
            where="the folder of a smoke run",
            remedy="--output FOLDER, one that you may write",
        ) from None
    return found


def _tokenizer() -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *letters])}
    bytes_only = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    bytes_only.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_only,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def _save_model(folder: Path, tokenizer: Any, hidden: int, layers: int) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        # Far enough from uniform that the most likely token is the same in every order of summation.
        initializer_range=0.1,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen2ForCausalLM(config).save_pretrained(folder)


def _save_rows(path: Path, rows: int, seed: int) -> None:
    from pyarrow import Table, parquet

    draw = random.Random(seed)
    made: list[dict[str, Any]] = []
    for index in range(rows):
        left, right = draw.randint(0, 9), draw.randint(0, 9)
        made.append(
            {
                "data_source": "tiny_sums",
                "prompt": [{"role": "user", "content": f"{left}+{right}="}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(left + right)},
                "extra_info": {"index": index, "split": "train"},
            }
        )
    parquet.write_table(Table.from_pylist(made), path)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m metronome_verl.cpu.assets FOLDER")
    print(make(Path(sys.argv[1])))
