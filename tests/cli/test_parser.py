"""Reading the command line and YAML files, and the help page (what is refused: test_errors.py)."""

from __future__ import annotations

import json
import re
import shlex
import signal

import pytest

from pydtnn.cli.config import GROUPS, REMOVED, TrainConfig, flags
from pydtnn.cli.parser import ESSENTIAL, parse
from pydtnn.cli.report import not_default
from pydtnn.models import MODELS
from pydtnn.train import _given_timeout, main
from tests.each import each

EXACT = {"exact": True, "global_batch_size": 32}

PROMISED = """
    model dataset data-dir epochs steps-per-epoch batch-size global-batch-size optimizer lr momentum
    weight-decay schedule loss metrics augment validation-split dtype device threads seed
    output-dir save load resume evaluate-only lr-scaling download comm
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
        # options in the value of another one
        (["--model=resnet8:shortcut=A"], {"model": "resnet8", "model_options": {"shortcut": "A"}}),
        (
            ["--model", "own.py:net:widths=[1, 2],mode=a:b", "--model=:mode=c,text='x y'"],
            {"model": "own.py:net"}
            | {"model_options": {"widths": [1, 2], "mode": "c", "text": "x y"}},
        ),
        (
            ['--model=:options={"a b": "c,d=e"}', '--model=:quoted="f,g=h"'],
            {"model_options": {"a b": "c,d=e", "quoted": "f,g=h"}},
        ),
        (
            ["--loss=cross_entropy:auxiliary_weights=0.3,0.3,label_smoothing=0.1"],
            {"auxiliary_weights": "0.3,0.3", "label_smoothing": 0.1},
        ),
        (["--exact", "shards=16", "--global-batch-size=32"], EXACT | {"shards": 16}),
        (["--exact", "--no-exact"], {}),
        (
            ["--trace=a:steps=5:7,kernels=true", "--device=:graph=no"],
            {"trace": "a", "trace_steps": "5:7", "trace_kernels": True, "graph": False},
        ),
        (["--keep=3", "--scheme=:bucket_bytes=9"], {"keep": 3, "bucket_bytes": 9}),
    ],
)
def test_arguments_become_values(arguments, values):
    assert parse(arguments) == TrainConfig(**values)


FORMER = {
    own.name: {int: "3", float: "0.5", str: "5min", dict: "{a: 1}"}.get(own.kind, "true")
    for own in flags(TrainConfig).values()
    if own.owner
} | {
    **{"trace_steps": "1:2", "tf32": "true", "pipeline_schedule": "gpipe", "teacher_weight": "1"},
    "survive_stages": "recycle",
}
PARTNERS = {
    **{"load": "w", "compress": "sign", "exact": "true", "survive": "true", "trace": "t"},
    **{"tensorboard": "true", "virtual_ranks": "2", "lr_scaling": "sqrt", "parallel": "pipeline=2"},
    **{"device": "cuda", "comm": "mpi", "dataset": "shards", "plateau_factor": "[plateau]"},
    "teacher": "t",
}


@each("name", FORMER)
def test_an_option_in_the_value_of_another_one_may_be_typed_as_before(name, tmp_path):
    own, text = flags(TrainConfig)[name], FORMER[name]
    lines = {"epochs": "9", "global_batch_size": "32", "platform": "cpu-1gbit", own.owner: ""}
    if own.owner in PARTNERS:
        lines[own.owner] = PARTNERS[own.owner]
    if name == "cuda_aware":
        lines["device"] = "cuda"
    if name == "plateau_factor":
        lines["plateau"] = "2"
    if name == "mtbf":
        lines["survive"] = "true"
    lines = {key: value for key, value in lines.items() if value}
    (tmp_path / "run.yaml").write_text("".join(f"{key}: {text}\n" for key, text in lines.items()))
    config = [f"--config={tmp_path / 'run.yaml'}"]
    value = {"true": []}.get(text, [text])
    before = parse([*config, own.spelling, *value])
    start = "" if flags(TrainConfig)[own.owner].kind is bool else ":"
    now = parse([*config, flags(TrainConfig)[own.owner].spelling, f"{start}{own.key}={text}"])
    assert before == now
    assert getattr(now, name) != own.default or text == "true"
    with (tmp_path / "run.yaml").open("a") as file:
        file.write(f"{name}: {text}\n")
    assert parse(config) == now
    shown = [f"--model={now.model}", f"--dataset={now.dataset}", *shlex.split(not_default(now))]
    assert parse(shown) == now


@each(
    ("arguments", "words"),
    [
        (["--trace=a:step=1:2"], "unknown value of --trace 'step'; did you mean 'steps'?"),
        (["--exact=3"], "--exact: expected values of shards such as shards=..., with commas"),
        (["--survive=min_ranks=0"], "--survive min_ranks must be at least 1, got 0"),
        (["--keep=3:every"], "--keep must be a whole number, got '3:every'"),
        (["--epoc=3"], "unknown option '--epoc'; did you mean '--epochs'"),
        (["--device=cuda:tf32=1"], "--device tf32 must be true or false, got 1"),
    ],
)
def test_what_is_wrong_in_the_value_of_an_option_is_named(arguments, words):
    with pytest.raises((TypeError, ValueError), match=f"^train: .*{re.escape(words)}"):
        parse([*arguments, "--global-batch-size=8"])


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
        assert not own.owner or f" {own.key}={own.metavar or 'true|false'}: " in words
    assert {*MODELS} <= {*re.findall(r"\w+", page)}
    assert "--[no-]download download the data" in words
    assert "mpirun -np 2 python -m pydtnn.train" in page
    shown = set(re.findall(r"^  --(?:\[no-\])?([a-z0-9-]+)", page, re.MULTILINE))
    names = {own.spelling[2:] for own in flags(TrainConfig).values() if not own.owner}
    assert len(re.findall(r"^ *--", page, re.MULTILINE)) <= 80
    assert shown == names | {"recipe", "config", "print-config", "version"}
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
    own = [o for o in flags(TrainConfig).values() if o.group == titles[0] and not o.owner]
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


@each("name", REMOVED)
def test_an_option_that_was_removed_is_answered_with_what_to_use(name, tmp_path):
    option = "--" + name.replace("_", "-")
    with pytest.raises(ValueError, match=f"^{option} has been removed: {REMOVED[name]}$"):
        parse([f"{option}=1"])
    file = tmp_path / "run.yaml"
    file.write_text(f"{name}: null\nepochs: 3\n")  # as an earlier version printed it
    assert parse([f"--config={file}"]).epochs == 3
    file.write_text(f"{name}: true\n")
    with pytest.raises(ValueError, match=f"train: --config: {name} has been removed: "):
        parse([f"--config={file}"])


@each(
    ("options", "seconds"), [("--timeout=5", 5), ("--timeout 3 --timeout=2.5", 2.5), ("-t 1", None)]
)
def test_the_deadline_of_the_start_is_the_last_one_that_is_given(options, seconds, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", *options.split()])
    assert _given_timeout(None) == _given_timeout(options.split()) == seconds
