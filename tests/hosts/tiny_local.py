"""A tiny random model with a character tokenizer, and small helpers shared by the local host's tests."""

import json
import random

import torch
import transformers

from metronome_local.engine import Continuation, Engine
from metronome_local.rollouts import Row

CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]
SPECIAL = ["<pad>", "<eos>", "<unk>"]
TINY = {
    "vocab_size": len(SPECIAL) + len(CHARACTERS),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
# Dense everywhere, so that whatever moves the weights moves it: the share of characters before 'P'.
REWARDS = '''"""Reward functions of the tests."""


def early(prompts, completions, **columns):
    """The share of characters that come before "P"."""
    return [sum(c < "P" for c in text) / max(1, len(text)) for text in completions]


def rare(prompts, completions, **columns):
    """1 where the text holds a digit: many groups are all zeros, many mixed."""
    return [float(any(c.isdigit() for c in text)) for text in completions]
'''


def tokenizer():
    """A tokenizer with one token a character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: place for place, token in enumerate([*SPECIAL, *CHARACTERS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    outer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    outer.chat_template = TEMPLATE
    return outer


def model(kind="llama", seed=0, **changes):
    """A random causal language model in float32 whose distributions are far from uniform."""
    config = transformers.AutoConfig.for_model(kind, **{**TINY, **changes})
    torch.manual_seed(seed)
    made = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in made.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return made.eval()


def save(folder, seed=0):
    """Writes model, tokenizer, prompts and reward functions; returns the folder."""
    model(seed=seed).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    (folder / "rewards.py").write_text(REWARDS)
    words = [f"{a}{b}?" for a in ("count", "name", "say", "tell", "draw") for b in (" one", " two", " all", "")]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": word}) + "\n" for word in words))
    return folder


def sample(engine, contexts, seeds, max_tokens=8, **options):
    """Runs continuations to their end; ``{key: Sampled}`` with keys 0, 1, ..."""
    for key, (context, seed) in enumerate(zip(contexts, seeds, strict=True)):
        rng = random.Random(seed)
        engine.submit(Continuation(key, tuple(context), max_tokens, rng, **options))
    found = {}
    while engine.busy:
        found.update(engine.step())
    return found


def engine(made, slots=4, eos=(), temperature=1.0):
    """An engine without an end-of-sequence token unless one is given."""
    return Engine(made, slots, eos, temperature)


def rows_of(contexts, samples):
    """One row a sample."""
    rows = []
    for key, context in enumerate(contexts):
        row = Row(list(context))
        row.add_sampled(samples[key])
        rows.append(row)
    return rows
