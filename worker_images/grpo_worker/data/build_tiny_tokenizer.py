"""Build of ``tiny_tokenizer.json``: 128 byte-pair tokens over the texts of some easy tasks.

Each digit is a token of its own. Run ``python -m grpo_worker.data.build_tiny_tokenizer``; the result is
committed and must not change.
"""

import reasoning_gym
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from grpo_worker.model_files.names import TINY_TOKENIZER

TASKS = ("gcd", "lcm", "chain_sum", "basic_arithmetic", "letter_counting", "leg_counting")
SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]
ALPHABET = list("0123456789abcdefghijklmnopqrstuvwxyz .,:;?!'\"()+-*/=\n")


def build() -> Tokenizer:
    """Train the tokenizer; the result is deterministic."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))  # noqa: S106 - a token of text
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.Metaspace(prepend_scheme="never")]
    )
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    trainer = trainers.BpeTrainer(  # type: ignore[no-untyped-call]
        vocab_size=128, special_tokens=SPECIAL, initial_alphabet=ALPHABET, show_progress=False
    )
    texts = (
        reasoning_gym.create_dataset(task, seed=0, size=300)[index]["question"]
        for task in TASKS
        for index in range(300)
    )
    tokenizer.train_from_iterator((text.lower() for text in texts), trainer)
    return tokenizer


if __name__ == "__main__":
    build().save(str(TINY_TOKENIZER))
