"""What goes wrong is told in one sentence, with a non-zero exit on every rank and no traceback."""

from __future__ import annotations

import contextlib
import errno
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from pydtnn.train import main
from tests import gpu
from tests.ahead import mpiexec
from tests.each import each
from tests.launch import Finished, Program, why_not
from tests.ranks import wait_for
from tests.small_run import TINY, TRAIN, only_line, processes_in

OWN = Path(__file__).with_name("failing.py")


class Failure(NamedTuple):
    """What a command that has failed printed, and the sentence."""

    printed: str
    sentence: str


@pytest.fixture
def fail(tmp_path, capsys, monkeypatch) -> Callable[..., Failure]:
    """`fail("--lr=-1")` runs a command that must fail in one line, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Failure:
        capsys.readouterr()
        assert main(arguments) != 0
        printed, told = capsys.readouterr()
        return Failure(printed, only_line(told))

    return run


ARGUMENTS = [
    # names, with the nearest ones
    (["--model=resnet4"], "unknown model 'resnet4'; did you mean 'resnet44'"),
    (["--model=resnet20", "--model-options.shortcutt=A"], "'shortcutt'; did you mean 'shortcut'?"),
    (["--dataset=cifer10"], "unknown data set 'cifer10'; did you mean 'cifar10'"),
    (["--epochz=3"], "unknown option '--epochz'; did you mean '--epochs'"),
    (["-x"], "unknown option '-x'; see --help"),
    # numbers and words
    (["--lr=-1"], "--lr must be above 0, got -1"),
    (["--threads=100000"], "--threads must be at most 1024"),
    (["--epochs"], "--epochs requires a value"),
    (["--augment=crop:100000"], "at most 12 pixels for images of 12 x 12, got 100000"),
    (["--mixup=0.2", "--loss=hinge"], "Hinge: the target must be integer classes of shape (1,)"),
    (["--model=mlp", "--model-options.hidden=5"], 'model mlp {"hidden": 5}: '),
    # what does not go together
    (["--resume"], "--resume requires --output-dir; name the folder of the run"),
    (["--global-batch-size=200"], "must be at most the 120 samples of synthetic, got 200"),
    # models and schemes of one's own
    (["--model=own.py"], "expected path/to/file.py:name, got own.py; use own.py:n"),
    (["--model=nowhere.py:net"], "file nowhere.py does not exist; use path/to/"),
    (["--model=failing.py:grups"], "name in failing.py 'grups'; did you mean 'groups'?"),
    (["--model=failing.py:number"], "number: expected a layer, a block or a function of (classes"),
    (["--model=wrong.py:net"], "wrong.py cannot be imported: line 2: "),
    (["--model=failing.py:fault"], "KeyError: 'thing' ("),
    (["--scheme=failing.py:number"], "expected a subclass of GradientExchange, got 3"),
    (["--model=failing.py:shapes"], "Add: inputs must be two or more of equal shape, got (10, 10"),
    (["--model=failing.py:narrow"], "use one output of the model per class"),
    # files and folders
    (["--dataset=mnist", "--dataset-options={}", "--data-dir=no"], "mnist: expected train-images-"),
    (["--output-dir=failing.py"], "--output-dir: expected a folder, got the file failing.py; ch"),
    (["--output-dir=/proc/run"], "cannot write /proc/run: "),
    (["--save=."], "--save: expected the name of a new folder, got .; name one"),
    (["--save=failing.py"], "--save: failing.py is a file, and a mod"),
    (["--config=nowhere.yaml"], "--config: file nowhere.yaml does not exist"),
]


@each(("arguments", "words"), ARGUMENTS)
def test_a_bad_argument_is_one_sentence(arguments, words, fail, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(OWN, tmp_path)
    (tmp_path / "wrong.py").write_text("x = 1\nif x\n")
    failure = fail(*TINY, *arguments)
    assert words in failure.sentence
    assert not failure.sentence.startswith(("--", "unknown option '", "unknown value"))
    assert all(line.startswith("pydtnn ") for line in failure.printed.splitlines())
    assert failure.printed.count("\n") <= 1
    assert {path.name for path in tmp_path.iterdir()} <= {OWN.name, "wrong.py", "__pycache__"}


YAML = [
    ("epochz: 3", "unknown key in the configuration file 'epochz'; did you mean"),
    ("", "--config: expected lines such as 'epochs: 3'"),
    ("epochs: many", "--epochs must be a whole number, got 'many'"),
    ("model: [resnet44]", "model must be text, got ['resnet44']; quote it"),
    ("lr: 1\nepochs: 2\nlr: 2", "key 'lr' occurs twice; remove one of them (line 3)"),
    ("model_options: {a: 1, a: 2}", "key 'a' occurs twice; remove one of them"),
    ("seed: 010", "--seed must be a whole number, got '010'"),
    (f"epochs: {'9' * 5000}", "--epochs must be a whole number, got '9999"),
    ("model_options: &a {x: *a}", "aliases are not supported; repeat the value"),
    ("model_options: " + "[" * 100_000, "nesting is deeper than 50 levels"),
    ("lr: !!float 1", "the tag tag:yaml.org,2002:float is not supported; remove it (line 1)"),
    ("lr: !!python/object/apply:os.getpid []", "valid YAML: the tag tag:yaml.org,2002:python"),
    ('output_dir: "\\0"', "--output-dir must contain only characters"),
    ("lr: 1\n---\nlr: 2", "but found another document (line 2)"),
    ("\x01", "the file is not valid YAML: unacceptable character #x0001"),
]


@each(("text", "words"), YAML)
def test_a_bad_configuration_file_is_one_sentence(text, words, fail, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(text, newline="")
    assert words in fail("--config=run.yaml").sentence


def test_a_variable_of_the_environment_can_be_bad_too(fail, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert "OMP_NUM_THREADS: expected a number from 1 to 1024, got 'many'" in fail(*TINY).sentence


@each(
    ("options", "place"),
    [
        (["--lr=1e30"], "at epoch 1, step 2"),
        (["--lr=1e30", "--epochs=1", "--steps-per-epoch=1"], "in the evaluation"),
    ],
)
def test_a_loss_that_is_not_finite_names_the_step_and_the_first_layer(options, place, fail):
    failure = fail(*TINY, *options)
    assert f"the loss is not finite {place}: first in the output of " in failure.sentence
    assert "use a lower learning rate" in failure.sentence


def test_a_run_of_which_no_checkpoint_could_be_written_has_a_status_of_its_own(
    tmp_path, monkeypatch, capsys
):
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pydtnn.training.checkpoint.saving._flush", full)
    assert main([*TINY, "--epochs=1", f"--output-dir={tmp_path / 'run'}"]) == 74
    assert capsys.readouterr().err.splitlines()[-1].startswith("no checkpoint could be written: ")


# -- on several ranks


def assert_one_line(done: Finished, words: str) -> None:
    assert done.returncode != 0
    ours = done.stderr.partition("\n-----")[0]  # Open MPI's launcher adds paragraphs of its own
    assert words in only_line(ours)


AGREED = [
    (["--global-batch-size=1"], "per sample of the global batch (1), got 2 ranks"),
    (["--output-dir=/proc/run"], "rank 0: train: --output-dir: cannot write /proc/run"),
    (["--lr=1e30"], "(Linear) on rank 0; use a lower learning rate"),
]


def train_on_two(arguments: list[str], folder: Path) -> Finished:
    return mpiexec(2, [*TRAIN, *TINY, f"--output-dir={folder / 'run'}", *arguments])


@pytest.mark.few(1)
@pytest.mark.ahead(call=train_on_two)
@pytest.mark.parametrize(("arguments", "words"), AGREED)
def test_all_ranks_end_together(ahead, arguments, words):
    assert_one_line(ahead, words)


def train_on_gpus(ranks: int, option: list[str], folder: Path) -> tuple[Finished, list[Path]]:
    """Train where there is no GPU; return what it left in the folder, too."""
    options = ["--device=cuda", "--dataset=nowhere", "--output-dir=run", *option]
    return mpiexec(ranks, [*TRAIN, *TINY, *options], directory=folder), [*folder.iterdir()]


@pytest.mark.few(1)
@pytest.mark.skipif(not gpu.why_not(), reason="there is a GPU")
@pytest.mark.ahead(call=train_on_gpus)
@pytest.mark.parametrize(
    ("ranks", "option"), [(2, []), (1, ["--comm=mpi", "--cuda-aware"]), (2, ["--comm=nccl"])]
)
def test_without_a_gpu_all_ranks_end_before_any_work(ahead, ranks, option):
    done, left = ahead
    assert_one_line(done, "backend cuda")
    assert done.stdout.startswith("pydtnn ")
    assert done.stdout.count("\n") == 1
    assert not left


THING = "rank 1: KeyError: 'thing' ("
WAYS = [
    ("forward", "", THING),
    ("loader", "", THING),
    ("exit", "", "rank 1: RuntimeError: sys.exit(3) was called"),
    ("forward", "--allreduce=ring", THING),
    ("backward", "--scheme=local_sgd", THING),
    ("", f"--scheme={OWN}:FailsInUpdate", THING),
    ("", f"--scheme={OWN}:FailsInAThread", THING),
    ("", f"--scheme={OWN}:FailsInACollective", "rank 1: allreduce: expected a "),
    ("", f"--scheme={OWN}:FailsToReceive", "rank 1: recv: expected a message of 792 bytes"),
    ("kill", "", "rank 1: terminated unexpectedly; it crashed, was killed or called os._exit"),
    ("kill", "--scheme=sharded", "rank 1: terminated unexpectedly; it crashed"),
]
"""What a model does, an option, and what is told."""


def failing_run(ranks: int, way: tuple[str, str, str], folder: Path) -> tuple[Finished, list[int]]:
    """Train a model or by a scheme that fails on rank 1; return which processes are left, too."""
    what, option, _ = way
    model = [f"--model={OWN}:bad", f'--model-options={{"what": "{what}"}}']
    arguments = [*TRAIN, *TINY, *model, *filter(None, [option])]
    done = mpiexec(ranks, arguments, directory=folder)
    with contextlib.suppress(AssertionError):
        wait_for(lambda: not processes_in(folder))
    return done, processes_in(folder)


@pytest.mark.few(2)
@pytest.mark.ahead(call=failing_run)
@pytest.mark.parametrize(("ranks", "way"), [(2 + i % 2, way) for i, way in enumerate(WAYS)])
def test_a_rank_that_fails_ends_all(ahead, ranks, way):
    done, left = ahead
    assert_one_line(done, way[2])
    assert done.stderr.startswith("rank 1: ")
    assert not left


@pytest.mark.few(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_mpiexec_ends_all_ranks(number, tmp_path):
    if why_not():
        pytest.skip(why_not())
    long = ["--epochs=100000", "--checkpoint-epochs=0", "--output-dir=run"]
    with Program(2, [*TRAIN, *TINY, *long], directory=tmp_path) as program:
        wait_for(lambda: (tmp_path / "run" / "best.safetensors").exists())
        assert len(processes_in(tmp_path)) >= 3  # the launcher, two ranks and who watches them
        program.signal(number)
        assert program.wait()
        done = program.finished()
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    wait_for(lambda: not processes_in(tmp_path))
