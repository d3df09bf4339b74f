"""Texts of single tokens, which together are the text (pure)."""

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[Sequence[int]]], list[str]]
_INCOMPLETE = "\ufffd"  # what a part of a character is decoded to
_MOST = 4  # tokens of a character: it has up to four bytes


def token_texts(ids: Sequence[int], decode: Decode) -> list[str]:
    """Return the text of each token. ``decode``: returns the texts of lists of ids.

    A token is decoded after the one before it, since some tokenizers leave out the space that a text begins
    with. A character of several tokens belongs to the last one of them.
    """
    alone = decode([[token] for token in ids])
    after = decode([list(ids[at - 1 : at + 1]) for at in range(1, len(ids))])
    texts = alone[:1] + [both.removeprefix(before) for before, both in zip(alone, after, strict=False)]
    at = 0
    while at < len(texts):
        at = _joined(ids, texts, at, decode) if _INCOMPLETE in texts[at] else at + 1
    return texts


def _joined(ids: Sequence[int], texts: list[str], at: int, decode: Decode) -> int:
    """Give the text of the character that begins in token ``at`` to its last token; return the next token."""
    for end in range(at + 2, min(at + _MOST, len(ids)) + 1):
        (text,) = decode([list(ids[at:end])])
        if _INCOMPLETE not in text:
            texts[at:end] = [*[""] * (end - at - 1), text]
            return end
    return at + 1
