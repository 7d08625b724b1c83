"""What goes wrong is told in one sentence, with a non-zero exit on every rank and no traceback."""

from __future__ import annotations

import contextlib
import shutil
import signal
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pydtnn.train import main
from tests import gpu
from tests.ahead import mpiexec
from tests.bad_data import DATA
from tests.each import each
from tests.launch import Finished, Program, why_not
from tests.ranks import wait_for
from tests.small_run import TINY, TRAIN, only_line, processes_in

OWN = Path(__file__).with_name("failing.py")


@dataclass(frozen=True)
class Failure:
    """How a command has failed: its exit status, what it printed, and the sentence."""

    status: int
    printed: str
    sentence: str


Fail = Callable[..., Failure]


@pytest.fixture
def fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Fail:
    """`fail("--lr=-1")` runs a command that must fail in one line, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Failure:
        capsys.readouterr()
        status = main(arguments)
        printed, told = capsys.readouterr()
        assert status != 0
        return Failure(status, printed, only_line(told))

    return run


ARGUMENTS = {
    # names, with the nearest ones
    "model": (["--model=resnet4"], "unknown model 'resnet4'; did you mean 'resnet44'"),
    "model option": (
        ["--model=resnet20", '--model-options={"shortcutt": "A"}'],
        "unknown option of resnet20 'shortcutt'; did you mean 'shortcut'?",
    ),
    "model option's value": (
        ["--model=resnet20", '--model-options={"shortcut": "B"}'],
        "unknown shortcut of resnet20 'B'",
    ),
    "data set": (["--dataset=cifer10"], "unknown data set 'cifer10'; did you mean 'cifar10'"),
    "data set option": (['--dataset-options={"sampels": 9}'], "'sampels'; did you mean 'samples'"),
    "optimizer": (["--optimizer=adamm"], "unknown optimizer 'adamm'; did you mean 'adam'"),
    "optimizer option": (['--optimizer-options={"nesterow": true}'], "did you mean 'nesterov'?"),
    "schedule": (["--schedule=cosin"], "unknown schedule 'cosin'; did you mean 'cosine'"),
    "schedule option": (['--schedule-options={"rice": 0.3}'], "'rice'; did you mean 'rise'?"),
    "loss": (["--loss=cross_entropi"], "'cross_entropi'; did you mean 'cross_entropy'"),
    "metric": (["--metrics=accuracy,acuracy"], "unknown metric 'acuracy'; did you mean 'accuracy'"),
    "augmentation": (["--augment=crop:4,flop"], "unknown augmentation 'flop'; did you mean 'flip'"),
    "scheme": (["--scheme=allreduse"], "unknown scheme 'allreduse'; did you mean 'allreduce'?"),
    "monitor": (["--monitor=val_acuracy"], "'val_acuracy'; did you mean 'val_accuracy'"),
    "choice": (["--dtype=float8"], "unknown value of --dtype 'float8'; did you mean 'float64'"),
    "option": (["--epochz=3"], "unknown option '--epochz'; did you mean '--epochs'"),
    "option like none": (["-x"], "unknown option '-x'; see --help"),
    # numbers and words
    "negative learning rate": (["--lr=-1"], "--lr must be above 0, got -1"),
    "learning rate 0": (["--lr=0"], "--lr must be above 0"),
    "infinite learning rate": (["--lr=.inf"], "--lr must be above 0, got inf"),
    "no number": (["--lr=fast"], "--lr must be a number, got 'fast'"),
    "no whole number": (["--epochs=1.5"], "--epochs must be a whole number, got 1.5"),
    "more threads than a process bears": (["--threads=100000"], "--threads must be at most 1024"),
    "a number beyond 64 bits": ([f"--epochs={2**64}"], "--epochs must be at most 1844674407370"),
    "a number of 400 digits": (
        [f"--epochs={10**400}"],
        "--epochs must be a whole number",
    ),
    "too small": (["--epochs=0"], "--epochs must be at least 1, got 0"),
    "no dictionary": (["--model-options=A"], "--model-options must be names and values"),
    "no value": (["--epochs"], "--epochs requires a value"),
    "a value too many": (["--download=yes"], "--download must have no value, got 'yes'"),
    "a stray word": (["resnet44"], "unexpected argument 'resnet44'; options begin with --"),
    "a step that is no number": (
        ["--schedule=step", '--schedule-options={"boundaries": ["a"]}'],
        "Step: each of boundaries must be a whole number, got 'a'",
    ),
    "steps that are a word": (
        ["--schedule=step", '--schedule-options={"boundaries": "abc"}'],
        "Step: boundaries must be a whole number, got 'abc'",
    ),
    "neither true nor false": (
        ['--optimizer-options={"nesterov": "often"}'],
        "SGD: nesterov must be true or false, got 'often'",
    ),
    "a crop beside the image": (
        ["--augment=crop:100000"],
        "RandomCrop: padding must be at most 12 pixels for images of 12 x 12, got 100000",
    ),
    "a digit that is none": (["--augment=cutout:²"], "numbers, as in cutout:SIZE, got 'cutout:²'"),
    "augmentation's number": (["--augment=crop:x"], "augmentation: expected a name and"),
    "a mixture of no strength": (["--mixup=0"], "--mixup must be above 0, got 0"),
    "a mixture that is no number": (["--cutmix=x"], "--cutmix must be a number, got 'x'"),
    "a mixture for a hinge": (
        ["--mixup=0.2", "--loss=hinge"],
        "Hinge: the target must be integer classes of shape (1,), got float64 of shape (1, 4)",
    ),
    "momentum of adam": (
        ["--optimizer=adam", "--momentum=0.5"],
        "--momentum: adam has no parameter `momentum`; omit it or use ",
    ),
    "smoothing of mse": (
        ["--loss=mse", "--label-smoothing=0.1"],
        "--label-smoothing: mse has no parameter `label_smoothing`; omit it or use cross_entropy",
    ),
    "an option in the wrong place": (
        ['--optimizer-options={"lr": 0.1}'],
        "--optimizer-options: lr cannot be set here; use --lr",
    ),
    "an option of a wrong type": (
        ["--model=mlp", '--model-options={"hidden": 5}'],
        'model mlp {"hidden": 5}: ',
    ),
    "top 5 of 4": (["--metrics=top5_accuracy"], "at most the number of classes 4, got 5"),
    # what does not go together
    "warm-up": (["--warmup-epochs=2"], "--warmup-epochs must be below --epochs 2, got 2"),
    "resume what": (
        ["--resume"],
        "--resume requires the folder of the run to continue",
    ),
    "NCCL without GPUs": (["--comm=nccl"], "--comm nccl requires --device cuda"),
    "evaluate what": (["--evaluate-only"], "--evaluate-only requires weights; add --load"),
    "a batch larger than the data": (
        ["--global-batch-size=200"],
        "Loader: the global batch must be at most the 120 samples of synthetic, got 200; use a "
        "batch of at most 120",
    ),
    "more steps than data": (["--steps-per-epoch=9"], "steps_per_epoch must be in 1..8"),
    "images too small": (
        ['--dataset-options={"shape": [8, 8, 1]}', "--model=alexnet"],
        "alexnet: ",
    ),
    # models and schemes of one's own
    "no name in a file": (
        ["--model=own.py"],
        "expected path/to/file.py:name, got own.py; use own.py:n",
    ),
    "no such file": (["--model=nowhere.py:net"], "file nowhere.py does not exist; use path/to/"),
    "no such name": (
        ["--model=failing.py:grups"],
        "name in failing.py 'grups'; did you mean 'groups'?",
    ),
    "no function": (
        ["--model=failing.py:number"],
        "number: expected a layer, a block or a function of (classes, input_shape), got 3",
    ),
    "one argument": (
        ["--model=failing.py:one_argument"],
        "too many positional arguments; expected a layer, a block or a function of (classes, i",
    ),
    "no model": (
        ["--model=failing.py:nothing"],
        "nothing: expected a layer, a block or a function of (classes, input_shape), got None",
    ),
    "no parameters": (["--model=failing.py:no_parameters"], "the model has no parameters to train"),
    "no Python": (["--model=wrong.py:net"], "wrong.py cannot be imported: line 2: "),
    "a fault of one's own": (["--model=failing.py:fault"], "KeyError: 'thing' ("),
    "no scheme": (["--scheme=failing.py:number"], "expected a subclass of GradientExchange, got 3"),
    "option of another scheme": (
        ["--scheme=failing.py:Plain", "--no-overlap"],
        "--no-overlap: failing.py:Plain has no parameter `overlap`; omit it or use allreduce",
    ),
    "channels and groups": (
        ["--model=failing.py:groups"],
        "Conv2d: channels and filters must be divisible by groups=3, got 1 channels and 8 filters",
    ),
    "kernel and input": (
        ["--model=failing.py:kernel"],
        "Conv2d: kernel 15 must have an extent of at most the padded input 14, got 15; use a",
    ),
    "padding and kernel": (
        ["--model=failing.py:padding"],
        "Conv2d: padding must be smaller than kernel 3, got 4; use padding=1 to keep the size",
    ),
    "shapes in Add": (
        ["--model=failing.py:shapes"],
        "Add: inputs must be two or more of equal shape, got (10, 10, 8) and (12, 12, 1); add",
    ),
    "outputs and classes": (["--model=failing.py:narrow"], "use one output of the model per class"),
    "outputs and loss": (
        ["--model=failing.py:image"],
        "predictions must have shape (samples, classes)",
    ),
    # files and folders
    "data folder": (
        ["--dataset=mnist", "--dataset-options={}", "--data-dir=nowhere"],
        "mnist: the data folder nowhere does not exist; specify the folder that contains them with "
        "--data-dir or $PYDTNN_DATA, or download them with --download",
    ),
    "data files": (
        ["--dataset=cifar10", "--dataset-options={}", "--data-dir=."],
        "or download them with --download",
    ),
    "weights": (["--load=nowhere.safetensors"], "file nowhere.safetensors does not exist"),
    "no weights": (["--load=failing.py"], "load_weights: failing.py: "),
    "output folder is a file": (
        ["--output-dir=failing.py"],
        "--output-dir: expected a folder, got the file failing.py; choose",
    ),
    "output folder in a file": (
        ["--output-dir=failing.py/run"],
        "cannot write failing.py/run: not a dir",
    ),
    "output folder nowhere": (["--output-dir=/proc/run"], "cannot write /proc/run: "),
    "weights nowhere": (["--save=/proc/w.safetensors"], "--save: cannot write /proc: "),
    "model in place of a folder": (
        ["--save=."],
        "--save: expected the name of a new folder, got .; name one",
    ),
    "model in place of a file": (["--save=failing.py"], "--save: failing.py is a file, and a mod"),
    "configuration file": (["--config=nowhere.yaml"], "--config: file nowhere.yaml does not exist"),
}


@each(("arguments", "words"), ARGUMENTS.values())
def test_a_bad_argument_is_one_sentence(
    arguments: list[str], words: str, fail: Fail, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(OWN, tmp_path)
    (tmp_path / "wrong.py").write_text("x = 1\nif x\n")
    failure = fail(*TINY, *arguments)
    assert words in failure.sentence
    assert not failure.sentence.startswith(("--", "unknown option '", "unknown value"))
    assert all(line.startswith("pydtnn ") for line in failure.printed.splitlines())
    assert failure.printed.count("\n") <= 1
    assert {path.name for path in tmp_path.iterdir()} <= {OWN.name, "wrong.py", "__pycache__"}


YAML = {
    "unknown key": ("epochz: 3", "unknown key in the configuration file 'epochz'; did you mean"),
    "no YAML": ("lr: [1, 2", "--config: the file is not valid YAML: "),
    "no names": ("- lr", "--config: expected lines such as 'epochs: 3'"),
    "empty": ("", "--config: expected lines such as 'epochs: 3'"),
    "no number": ("epochs: many", "--epochs must be a whole number, got 'many'"),
    "no word": ("model: [resnet44]", "model must be text, got ['resnet44']; quote it"),
    "neither true nor false": ("resume: 3", "--resume must be true or false, got 3"),
    "out of limits": ("lr: -1", "--lr must be above 0, got -1"),
    "a misspelt key": ("optimizer_option: {}", "configuration file 'optimizer_option'; did you me"),
    "a key twice": (
        "lr: 1\nepochs: 2\nlr: 2",
        "key 'lr' occurs twice; remove one of them (line 3)",
    ),
    "a key in two spellings": ("batch-size: 1\nbatch_size: 2", "key 'batch_size' occurs twice"),
    "an inner key twice": (
        "model_options: {a: 1, a: 2}",
        "key 'a' occurs twice; remove one of them",
    ),
    "a time": ("keep: '12:30:00'", "--keep must be a whole number, got '12:30:00'"),
    "a time without quotes": ("keep: 12:30:00", "--keep must be a whole number, got '12:30:00'"),
    "a quoted number": ("threads: '0x10'", "--threads must be a whole number, got '0x10'"),
    "an octal number": ("seed: 010", "--seed must be a whole number, got '010'"),
    "true for a number": ("epochs: true", "--epochs must be a whole number, got True"),
    "infinite": ("lr: .inf", "--lr must be above 0, got inf"),
    "no number at all": ("lr: .nan", "--lr must be above 0, got nan"),
    "too many digits": (f"epochs: {'9' * 5000}", "--epochs must be a whole number, got '9999"),
    "too many threads": (
        "threads: 99999999999999999999",
        "--threads must be at most 1024",
    ),
    "an alias of itself": (
        "model_options: &a {x: *a}",
        "aliases are not supported; repeat the value",
    ),
    "many aliases": (
        "a: &a [x, x, x]\nb: &b [*a, *a, *a]\nc: [*b, *b, *b]",
        "aliases are not supported; repeat the value (line 2)",
    ),
    "deep": ("model_options: " + "[" * 100_000, "nesting is deeper than 50 levels"),
    "a number as a name": ("model_options: {1: 2}", "a key must be text; quote it (line 1)"),
    "a list as a name": ("? [a]\n: 2", "a key must be text; quote it (line 1)"),
    "a tag": (
        "lr: !!float 1",
        "the tag tag:yaml.org,2002:float is not supported; remove it (line 1)",
    ),
    "a character that files cannot have": (
        'output_dir: "\\0"',
        "--output-dir must contain only characters",
    ),
    "half a character": ('save: "\\ud800"', "--save must contain only characters that file names"),
    "a tab": ("\tlr: 1", "found character '\\t' that cannot start any token (line 1)"),
    "two documents": ("lr: 1\n---\nlr: 2", "but found another document (line 2)"),
    "binary": ("\x01", "the file is not valid YAML: unacceptable character #x0001"),
    "null": ("augment: null", "--augment must be text, got None"),
    "code": (
        "lr: !!python/object/apply:os.getpid []",
        "valid YAML: the tag tag:yaml.org,2002:python",
    ),
}


@each(("text", "words"), YAML.values())
def test_a_bad_configuration_file_is_one_sentence(
    text: str, words: str, fail: Fail, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(text, newline="")
    assert words in fail("--config=run.yaml").sentence


@each(("dataset", "files", "bad", "words"), DATA.values())
def test_a_bad_data_file_is_one_sentence(
    dataset: str,
    files: dict[str, bytes],
    bad: tuple[str, bytes | None],
    words: str,
    fail: Fail,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    (folder / bad[0].removesuffix(".gz")).unlink()
    if bad[1] is not None:
        (folder / bad[0]).write_bytes(bad[1])
    failure = fail("--model=mlp", f"--dataset={dataset}", f"--data-dir={folder}", "--batch-size=8")
    assert words in failure.sentence
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_a_variable_of_the_environment_can_be_bad_too(
    fail: Fail, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert "OMP_NUM_THREADS: expected a number from 1 to 1024, got 'many'" in fail(*TINY).sentence


def test_weights_that_do_not_fit_are_listed(fail: Fail, tmp_path: Path) -> None:
    assert main([*TINY, "--epochs=1", f"--save={tmp_path / 'w.safetensors'}"]) == 0
    failure = fail(*TINY, '--model-options={"hidden": [31]}', "--load=w.safetensors")
    for words in ("fc3.w is unknown", "fc1.w has shape (512, 144) instead of (31, 144)"):
        assert words in failure.sentence


@each("lr", ["1e30", "1e38"])
def test_a_loss_that_is_not_finite_names_the_step_and_the_first_layer(lr: str, fail: Fail) -> None:
    failure = fail(*TINY, f"--lr={lr}")
    assert "the loss is not finite at epoch 1, step 2: first in the output of " in failure.sentence
    assert "use a lower learning rate" in failure.sentence


def test_a_loss_that_is_not_finite_after_the_last_step_is_told_too(fail: Fail) -> None:
    failure = fail(*TINY, "--lr=1e30", "--epochs=1", "--steps-per-epoch=1")
    assert "the loss is not finite in the evaluation: first in the output of " in failure.sentence


def test_a_folder_with_checkpoints_is_not_written_over(fail: Fail) -> None:
    assert main([*TINY, "--epochs=1", "--output-dir=run"]) == 0
    failure = fail(*TINY, "--output-dir=run")
    assert "run contains checkpoints of an earlier run; add --resume" in failure.sentence


def test_a_damaged_checkpoint_is_left_and_the_one_before_it_taken(
    fail: Fail, caplog: pytest.LogCaptureFixture
) -> None:
    run = [*TINY, "--output-dir=run", "--resume"]
    assert main(run) == 0
    first, second = sorted(Path("run").glob("checkpoint-*"))
    (second / "arrays.safetensors").write_bytes(b"damaged")
    assert main(run) == 0
    assert "not a safetensors file, or truncated; checkpoint-00000008 is used" in caplog.text
    for path in (first, second):
        (path / "arrays.safetensors").write_bytes(b"damaged")
    assert "no checkpoint in run is valid" in fail(*run).sentence


# -- on several ranks


def assert_one_line(done: Finished, words: str) -> None:
    assert done.returncode != 0
    ours = done.stderr.partition("\n-----")[0]  # Open MPI's launcher adds paragraphs of its own
    assert words in only_line(ours)


def alternately(
    ranks: list[int],
    cases: Iterable[Any],
    names: Iterable[str] | None = None,
    rare: Collection[str] = (),
) -> list[Any]:
    """Every case on every number of ranks; all but one number, in turn, and `rare` are long."""
    cases = [*cases]
    long = pytest.mark.long
    return [
        pytest.param(
            n, case, id=f"{name}-{n}", marks=[long] * (i % len(ranks) != k or name in rare)
        )
        for i, (case, name) in enumerate(zip(cases, names or map(str, cases), strict=True))
        for k, n in enumerate(ranks)
    ]


AGREED = {
    "option": (["--model=resnet4"], "unknown model 'resnet4'"),
    "more ranks than samples": (
        ["--global-batch-size=1"],
        "per sample of the global batch (1), got 2 ranks",
    ),
    "output folder": (
        ["--output-dir=/proc/run"],
        "rank 0: train: --output-dir: cannot write /proc/run",
    ),
    "not finite": (["--lr=1e30"], "(Linear) on rank 0; use a lower learning rate"),
}


def train_on_two(arguments: list[str], folder: Path) -> Finished:
    return mpiexec(2, [*TRAIN, *TINY, f"--output-dir={folder / 'run'}", *arguments])


@pytest.mark.few(1)
@pytest.mark.ahead(call=train_on_two)
@pytest.mark.parametrize(("arguments", "words"), AGREED.values(), ids=AGREED)
def test_all_ranks_end_together(ahead: Finished, arguments: list[str], words: str) -> None:
    assert_one_line(ahead, words)


def train_on_gpus(ranks: int, option: list[str], folder: Path) -> tuple[Finished, list[Path]]:
    """Train where there is no GPU; return what it left in the folder, too."""
    options = ["--device=cuda", "--dataset=nowhere", "--output-dir=run", *option]
    return mpiexec(ranks, [*TRAIN, *TINY, *options], directory=folder), [*folder.iterdir()]


@pytest.mark.few(1)
@pytest.mark.skipif(not gpu.why_not(), reason="there is a GPU")
@pytest.mark.ahead(call=train_on_gpus)
@pytest.mark.parametrize(
    ("ranks", "option"),
    alternately([2, 1], [[], ["--comm=mpi", "--cuda-aware"], ["--comm=nccl", "--exact"]]),
)
def test_without_a_gpu_all_ranks_end_before_any_work(
    ahead: tuple[Finished, list[Path]], ranks: int, option: list[str]
) -> None:
    done, left = ahead
    assert_one_line(done, "backend cuda")
    assert done.stdout.startswith("pydtnn ")
    assert done.stdout.count("\n") == 1
    assert not left


THING = "rank 1: KeyError: 'thing' ("
LENGTH = "rank 1: recv: expected a message of 792 bytes"
KILLED = "rank 1: terminated unexpectedly; it crashed, was killed or called os._exit"
WAYS = {
    "in forward": ("forward", "", THING),
    "in backward": ("backward", "", THING),
    "in the loader": ("loader", "", THING),
    "by sys.exit": ("exit", "", "rank 1: RuntimeError: sys.exit(3) was called"),
    "with a schedule": ("forward", "--allreduce=ring", THING),
    "with compression": ("backward", "--compress=float16", THING),
    "with the sharded optimizer": ("forward", "--scheme=sharded", THING),
    "with gossip": ("forward", "--scheme=gossip", THING),
    "with local SGD": ("backward", "--scheme=local_sgd", THING),
    "in update": ("", f"--scheme={OWN}:FailsInUpdate", THING),
    "in bucket_ready": ("", f"--scheme={OWN}:FailsInBucketReady", THING),
    "in a thread": ("", f"--scheme={OWN}:FailsInAThread", THING),
    "in a compressor": ("", f"--scheme={OWN}:FailsToCompress", THING),
    "in a collective": ("", f"--scheme={OWN}:FailsInACollective", "rank 1: allreduce: expected a "),
    "in a message": ("", f"--scheme={OWN}:FailsToReceive", LENGTH),
    "killed": ("kill", "", KILLED),
    "killed with a schedule": ("kill", "--allreduce=ring", KILLED),
    "killed with a parameter server": ("kill", "--scheme=parameter_server", KILLED),
}


RARE = ("with compression", "with gossip", "in bucket_ready", "in a compressor", "with a schedule")
"""Ways of long tests only, beside one that takes the same path."""


def failing_run(ranks: int, way: tuple[str, str, str], folder: Path) -> tuple[Finished, list[int]]:
    """Train a model or by a scheme that fails on rank 1; return which processes are left, too."""
    what, option, _ = way
    model = [f"--model={OWN}:bad", f'--model-options={{"what": "{what}"}}']
    arguments = [*TRAIN, *TINY, *model, *filter(None, [option])]
    done = mpiexec(ranks, arguments, timeout=60, directory=folder)
    with contextlib.suppress(AssertionError):
        wait_for(lambda: not processes_in(folder))
    return done, processes_in(folder)


@pytest.mark.few(2)
@pytest.mark.ahead(call=failing_run)
@pytest.mark.parametrize(("ranks", "way"), alternately([2, 3], WAYS.values(), WAYS, RARE))
def test_a_rank_that_fails_ends_all(
    ahead: tuple[Finished, list[int]], ranks: int, way: tuple[str, str, str]
) -> None:
    done, left = ahead
    assert_one_line(done, way[2])
    assert done.stderr.startswith("rank 1: ")
    assert not left


@pytest.mark.few(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_mpiexec_ends_all_ranks(number: int, tmp_path: Path) -> None:
    if why_not():
        pytest.skip(why_not())
    long = ["--epochs=100000", "--checkpoint-epochs=0", "--output-dir=run"]
    with Program(2, [*TRAIN, *TINY, *long], directory=tmp_path) as program:
        wait_for(lambda: (tmp_path / "run" / "best.safetensors").exists())
        assert len(processes_in(tmp_path)) >= 3  # the launcher, two ranks and who watches them
        program.signal(number)
        assert program.wait(60)
        done = program.finished()
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    wait_for(lambda: not processes_in(tmp_path))


@pytest.mark.long
def test_a_disk_that_is_full_keeps_the_checkpoint_before(tmp_path: Path) -> None:
    run = [*TINY, f"--model={OWN}:limited", "--optimizer=adam", "--resume"]
    run.append(f"--output-dir={tmp_path / 'run'}")
    assert main([*run, "--epochs=1"]) == 0
    (checkpoint,) = (tmp_path / "run").glob("checkpoint-*")
    # Room for the weights alone, but not for them and two moments.
    room = 2 * (tmp_path / "run" / "best.safetensors").stat().st_size
    done = mpiexec(2, [*TRAIN, *run, f'--model-options={{"room": {room}}}'])
    assert done.returncode == 74
    assert (
        "file too large; free some space or choose another folder; training continues, and the "
        in (done.stderr)
    )
    assert f"the last good checkpoint is {checkpoint}" in done.stderr
    assert done.stderr.count("no checkpoint could be written: ") == 1
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "run").glob("*checkpoint*")) == [checkpoint]
    assert main(run) == 0
    assert len(list((tmp_path / "run").glob("checkpoint-*"))) == 2
