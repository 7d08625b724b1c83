"""Reading the command line and YAML files, and the help page (what is refused: test_errors.py)."""

from __future__ import annotations

import json
import re
import signal

import pytest

from pydtnn.cli.config import GROUPS, TrainConfig, flags
from pydtnn.cli.parser import ESSENTIAL, parse
from pydtnn.models import MODELS
from pydtnn.train import main
from tests.each import each

PROMISED = """
    model dataset data-dir epochs steps-per-epoch batch-size global-batch-size optimizer lr momentum
    weight-decay schedule loss metrics augment validation-split dtype device threads seed
    output-dir save load resume evaluate-only lr-scaling download comm cuda-aware tf32 graph
"""


def help_page(capsys: pytest.CaptureFixture[str], *section: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["--help", *section])
    assert end.value.code == 0
    printed, told = capsys.readouterr()
    assert told == ""
    return printed


@each(
    ("arguments", "values"),
    [
        ([], {}),
        (["--lr", "0.1", "--weight-decay", "5e-4"], {"lr": 0.1, "weight_decay": 5e-4}),
        (["--model-options", '{"shortcut": "A"}'], {"model_options": {"shortcut": "A"}}),
        (["--model-options.shortcut=A"], {"model_options": {"shortcut": "A"}}),
        (["--model-options.shortcut", "A"], {"model_options": {"shortcut": "A"}}),
        (
            ['--model-options={"a": [1]}', "--model-options.b=0.5"],
            {"model_options": {"a": [1], "b": 0.5}},
        ),
        (["--lr=1", "--lr=null"], {"lr": None}),
        (
            ["--model-options={a: '12', b: 1e-3, c: 1:30, d: 010}"],
            {"model_options": {"a": "12", "b": 1e-3, "c": "1:30", "d": "010"}},
        ),
        (["--download", "--no-overlap"], {"download": True, "overlap": False}),
        (["--dataset=123", "--model=3.py:net"], {"dataset": "123", "model": "3.py:net"}),
        (["--augment="], {"augment": ""}),
        (["--epochs=3", "--epochs=4"], {"epochs": 4}),
    ],
)
def test_arguments_become_values(arguments, values):
    assert parse(arguments) == TrainConfig(**values)


def test_the_command_line_wins_over_a_file_and_a_later_file_over_an_earlier(tmp_path):
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("lr: 5e-4\nepochs: 7\nbatch-size: 3\n")
    second.write_text("epochs: 8\nmodel_options: {shortcut: A}\n")
    files = [f"--config={first}", "--config", str(second)]
    for arguments in ([*files, "--batch-size=4"], ["--batch-size=4", *files]):
        config = parse(arguments)
        assert (config.lr, config.epochs, config.batch_size) == (5e-4, 8, 4)
        assert config.model_options == {"shortcut": "A"}


def test_a_file_before_which_there_is_an_option_is_printed_as_it_will_be_used(tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text("epochs: 7\n")
    with pytest.raises(SystemExit):
        parse(["--epochs=2", f"--config={file}", "--print-config"])
    assert "\nepochs: 2\n" in capsys.readouterr().out


@each(
    "content",
    [
        b"\xef\xbb\xbflr: 0.5\nepochs: 3\n",
        b"lr: 0.5\r\nepochs: 3\r\n",
        b"{lr: 5.0e-1, epochs: 0x3}",
        b'{"lr": 0.5, "epochs": 3}',
        b"%YAML 1.2\n---\nlr: .5 # half\nepochs: 0o3\n...\n",
    ],
)
def test_files_of_any_editor_are_read(content, tmp_path):
    (tmp_path / "run.yaml").write_bytes(content)
    assert parse(["--config", str(tmp_path / "run.yaml")]) == TrainConfig(lr=0.5, epochs=3)


@each(
    "text", ["12:30", "010", "null", "yes", "1e3", "a: b", "- a", "#x", "é\x1b😀", "'\"\\", " a "]
)
def test_text_that_looks_like_something_else_is_printed_so_that_it_comes_back(
    text, tmp_path, capsys
):
    options_ = {"a": text, text: [True, None, 1, 1e-7, {"b": ()}]}
    arguments = [f"--dataset={text}", f"--model-options={json.dumps(options_, ensure_ascii=False)}"]
    arguments += ["--lr=1e-4", "--no-overlap"]
    with pytest.raises(SystemExit):
        parse([*arguments, "--print-config"])
    (tmp_path / "run.yaml").write_text(capsys.readouterr().out)
    config = parse([f"--config={tmp_path / 'run.yaml'}"])
    assert config == parse(arguments)
    assert config.model_options[text] == [True, None, 1, 1e-7, {"b": []}]


@each(("columns", "widest"), [(80, 80), (300, 100)])
def test_the_help_page_has_groups_names_examples_and_every_option_at_a_width_that_is_read_well(
    columns, widest, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", str(columns))
    page = help_page(capsys, "all")
    assert max(map(len, page.splitlines())) <= widest
    for group in {own.group for own in flags(TrainConfig).values()}:
        assert f"\n{group}:\n" in page
    words = " ".join(page.split())
    for own in flags(TrainConfig).values():
        assert own.help in words
    assert {*MODELS} <= {*re.findall(r"\w+", page)}
    assert "--[no-]overlap exchange gradients" in words
    assert "mpirun -np 2 python -m pydtnn.train" in page
    shown = set(re.findall(r"^  --(?:\[no-\])?([a-z0-9-]+)", page, re.MULTILINE))
    names = {name.replace("_", "-") for name in flags(TrainConfig)}
    assert shown == names | {"config", "print-config", "version"}
    assert set(PROMISED.split()) <= names


def test_the_short_help_page_has_the_most_used_options_and_names_the_sections(capsys):
    page = help_page(capsys)
    shown = re.findall(r"^  --(?:\[no-\])?([a-z0-9-]+)", page, re.MULTILINE)
    assert shown == [name.replace("_", "-") for name in ESSENTIAL]
    words = " ".join(page.split())
    assert "--epochs N passes over the training set (default: 4)" in words
    assert "--data-dir FOLDER folder of the data --augment" in words
    assert f"--help SECTION those of a section: {', '.join((*GROUPS, 'names'))}" in words


@each("section", ["device", "Dev", "virtual ranks", "ranks", "data"])
def test_a_section_of_the_help_page_is_named_by_the_beginning_of_a_word(section, capsys):
    page = help_page(capsys, section)
    titles = re.findall(r"^(\w.*):$", page, re.MULTILINE)
    assert len(titles) == 1
    assert section.lower() in titles[0]
    shown = re.findall(r"^  --(?:\[no-\])?([a-z0-9-]+)", page, re.MULTILINE)
    own = [o for o in flags(TrainConfig).values() if o.group == titles[0]]
    assert shown == [option.label[2:] for option in own]


def test_the_names_of_everything_are_a_section(capsys):
    page = help_page(capsys, "names")
    assert {"resnet44", "cifar10", "adamw", "local_sgd"} <= {*re.findall(r"\w+", page)}
    assert "--" not in page
    assert main(["--help", "optimiser"]) == 1
    assert "section of --help 'optimiser'; did you mean 'optimizer'" in capsys.readouterr().err


def test_a_help_page_that_nobody_reads_any_more_is_not_taken_for_a_bad_file(monkeypatch):
    """As argparse of Python 3.11.2 raises it; later ones do not."""

    def gone(*_: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("argparse.ArgumentParser.parse_args", gone)
    discarded: list[bool] = []
    monkeypatch.setattr("pydtnn.train.discard", lambda: discarded.append(True))
    assert main(["--help"]) == 128 + signal.SIGPIPE
    assert discarded == [True]
