"""Byte-pair tokens, beside the library whose files these are."""

import json
from pathlib import Path

import numpy as np
import pytest

from pydtnn.data import Tokenizer, load_text, tokenizer
from pydtnn.data.inputs import inputs_of
from pydtnn.saving.models import inputs_from_json, inputs_to_json
from tests.each import each
from tests.small_tokenizer import write_tokenizer

tokenizers = pytest.importorskip("tokenizers")

TEXT = "".join(
    f"{number:>{number % 7}} is followed by {number + 1};\n\n\tgrüße, 東京 🙂\n"
    for number in range(400)
).encode()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_tokenizer(TEXT, tmp_path / "t.json", 300)


def test_tokens_are_those_of_the_library(file):
    ours, theirs = Tokenizer(file), tokenizers.Tokenizer.from_file(str(file))
    tokens = ours.encode(TEXT)
    assert tokens.tolist() == theirs.encode(TEXT.decode()).ids
    assert ours.size == theirs.get_vocab_size() == 300
    assert len(tokens) < 0.6 * len(TEXT)
    assert ours.decode(tokens) == TEXT.decode()


def test_long_texts_are_encoded_in_pieces(file, monkeypatch):
    monkeypatch.setattr(tokenizer, "PIECE_BYTES", 500)
    ours = Tokenizer(file)
    tokens = ours.encode(TEXT)
    assert ours.decode(tokens) == TEXT.decode()
    assert ours.encode(b"").shape == (0,)
    lines = [ours.encode(line + b"\n") for line in TEXT.split(b"\n")[:-1]]
    assert len(ours.encode(TEXT[:499])) <= len(tokens) <= sum(map(len, lines))


def test_special_tokens_padding_and_truncation_of_a_file_are_not_applied(file):
    theirs = tokenizers.Tokenizer.from_file(str(file))
    plain = theirs.encode("a text").ids
    theirs.add_special_tokens(["<s>"])
    theirs.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 300)]
    )
    theirs.enable_truncation(2)
    theirs.enable_padding(length=20)
    theirs.save(str(file))
    ours = Tokenizer(file)
    assert ours.encode(b"a text").tolist() == plain
    assert ours.size == 301


def test_a_text_has_samples_of_tokens(file, tmp_path):
    (tmp_path / "text").write_bytes(TEXT)
    train, test = load_text(tmp_path / "text", length=16, tokenizer=file)
    both = np.concatenate([train.tokens, test.tokens])
    assert both.tolist() == Tokenizer(file).encode(TEXT).tolist()
    assert len(test.tokens) == len(both) // 10
    assert train.classes == test.classes == 300
    assert train.encoding == test.encoding == f"tokenizer {Tokenizer(file).digest}"


def test_another_tokenizer_is_another_encoding_that_a_model_remembers(file, tmp_path):
    content = json.loads(file.read_text())
    words = content["model"]["vocab"]
    first, second = [*words][:2]
    words[first], words[second] = words[second], words[first]
    (tmp_path / "other.json").write_text(json.dumps(content))
    (tmp_path / "text").write_bytes(TEXT)
    paths = (None, file, tmp_path / "other.json")
    sets = [load_text(tmp_path / "text", length=16, tokenizer=path)[0] for path in paths]
    assert len({data.encoding for data in sets}) == 3
    model = json.dumps(inputs_to_json([("x", (16,))], inputs_of(sets[1])))
    assert inputs_from_json(json.loads(model))[1].encoding == sets[1].encoding


BPE = b'{"model": {"type": "BPE", "vocab": %s, "merges": []}}'


@each(
    ("data", "sentence"),
    [
        (b"{}", "is not a tokenizer.json file"),
        (b"\xff", "is not a tokenizer.json file"),
        (b'{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 5', "is not a tokenizer"),
        (BPE % b"{}", "1 to 16,777,216 tokens, got 0"),
        (BPE % b'{"a": 4000000000}', "1 to 16,777,216 tokens, got 4,000,000,001"),
    ],
)
def test_other_files_are_refused(tmp_path, data, sentence):
    (tmp_path / "t.json").write_bytes(data)
    with pytest.raises(ValueError, match=sentence):
        Tokenizer(tmp_path / "t.json")


def test_a_pattern_that_takes_too_long_is_refused_in_a_sentence(file):
    """The library's panics are no subclass of Exception."""
    content = json.loads(file.read_text())
    content["pre_tokenizer"] = {"type": "Split", "behavior": "Isolated", "invert": False}
    content["pre_tokenizer"]["pattern"] = {"Regex": "(a+)+$"}
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"tokenizer: .*t.json cannot be applied to text: .*limit"):
        Tokenizer(file).encode(b"a" * 60 + b"b")


def test_other_texts_are_refused(file, tmp_path):
    (tmp_path / "text").write_bytes(b"line\n" * 90 + b"\xe4" + b"line\n" * 90)
    with pytest.raises(ValueError, match=r"in UTF-8, got byte 0xe4 at position 450"):
        load_text(tmp_path / "text", length=8, tokenizer=file)
    (tmp_path / "text").write_bytes(b"followed")
    with pytest.raises(ValueError, match=r"expected at least 18 tokens.* got [1-8] in"):
        load_text(tmp_path / "text", length=8, tokenizer=file)
