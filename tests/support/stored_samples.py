"""Samples in a job's store: of end-to-end tests, and written from the answers of an engine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from grpo_operator.api.v1alpha1.observability import SamplesSpec
from grpo_worker.common.store_path import JobFolder
from grpo_worker.data.prompts import Prompt
from grpo_worker.data.tokenizer import TextTokenizer, load_tokenizer
from grpo_worker.rollout.batch_file import RolloutBatch
from grpo_worker.rollout.sampling import Sample
from grpo_worker.rollout.stream import chunk_of
from grpo_worker.rollout.train_batch import make_batch
from grpo_worker.samples.reader import samples
from grpo_worker.samples.writer import SampleWriter


def assert_ids_are_texts(rows: Sequence[dict[str, Any]]) -> None:
    """Decode the tokens of samples again: they make the stored texts, with a log-probability each."""
    tokenizer = load_tokenizer("preset:tiny-moe")
    for row in rows:
        assert tokenizer.decode_all([row["prompt_ids"], row["answer_ids"]]) == [row["prompt"], row["answer"]]
        assert len(row["rollout_log_probs"]) == len(row["answer_ids"]) > 0
    assert rows, "no sample was kept"


def assert_texts_are_the_engines(
    prompt: Prompt, drawn: Sequence[dict[str, Any]], model: Path, folder: Path
) -> None:
    """Compare the texts of an engine with ours of its tokens, also of samples in ``folder``.

    ``drawn``: bodies of answers with special tokens. Answers with an id beyond the tokenizer's are left out:
    SGLang shows token 0 in its place.
    """
    tokenizer = load_tokenizer(str(model))
    size = Tokenizer.from_file(str(model / "tokenizer.json")).get_vocab_size()
    answers = [body for body in drawn if max(body["output_ids"]) < size]
    ids, texts = [body["output_ids"] for body in answers], [body["text"] for body in answers]
    assert tokenizer.decode_all(ids) == texts
    assert texts != [tokenizer.decode(each) for each in ids], "no special token was drawn"
    assert any(text.endswith("\ufffd") for text in texts), "no answer ends within a character"
    rows = _written_and_read(prompt, answers, tokenizer, folder)
    assert [(row["answer_ids"], row["answer"]) for row in rows] == list(zip(ids, texts, strict=True))


def _written_and_read(
    prompt: Prompt, answers: Sequence[dict[str, Any]], tokenizer: TextTokenizer, folder: Path
) -> list[dict[str, Any]]:
    """Write answers as the samples of a step, as a job does, and read them again."""
    parts = [chunk_of(answer) for answer in answers]
    drawn = [Sample(prompt.index, n, part.ids, part.log_probs, 1, "e") for n, part in enumerate(parts)]
    scores = [0.0] * len(drawn)
    batch = make_batch([prompt], drawn)
    old = batch.response["rollout_log_probs"]
    batch = batch.with_columns(old_log_probs=old).with_rows(advantages=np.zeros(batch.rows, np.float32))
    writer = SampleWriter(JobFolder(folder, folder), SamplesSpec(), tokenizer.decode_all, lambda: None)
    writer.add(1, 1, RolloutBatch([prompt], drawn, scores, [prompt]), scores, batch)
    writer.flush()
    return list(samples(folder))
