"""A small tokenizer."""

from __future__ import annotations

from pathlib import Path


def write_tokenizer(text: bytes, path: Path, vocabulary: int) -> Path:
    """Write a tokenizer of the most frequent pairs of bytes of a text."""
    import tokenizers

    found = tokenizers.ByteLevelBPETokenizer()
    found.train_from_iterator([text.decode()], vocabulary, show_progress=False)
    found.save(str(path))
    return path
