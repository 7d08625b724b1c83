"""The files that pydtnn reads, whole, damaged and malicious: what reading them must give.

Run as a program it prepares one kind of file, limits its memory, and reads a seed per line. For
each it damages the file, reads it, and answers one line of JSON: the outcome, what was done, and
the error. A sentence is right, and so are the values that the bytes stand for; all else is wrong,
such as an access to a file outside of the folder, more memory than `ROOM`, or more time than
`SECONDS`.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import os
import pickle
import re
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pydtnn.callbacks import EarlyStopping
from pydtnn.cli.config import TrainConfig
from pydtnn.cli.parser import Arguments, parse
from pydtnn.cli.run_directory import NOT_INHERITED, OF_THE_MESH, read_run, start_values
from pydtnn.data import (
    ArrayDataset,
    Dataset,
    Tokenizer,
    cifar,
    load_cifar10,
    load_cifar100,
    load_folder,
    load_mnist,
    load_text,
)
from pydtnn.data.cifar import LAYOUTS_10, LAYOUTS_100
from pydtnn.data.inputs import inputs_of
from pydtnn.data.mnist import FILES
from pydtnn.kernels.autotuner import AutotunerFile, Winner
from pydtnn.model import Model
from pydtnn.saving import load, save_model
from pydtnn.saving.folder import MODEL
from pydtnn.saving.weights import WEIGHTS, encode, load_weights, save_weights
from pydtnn.tools.interchange import (
    export_onnx,
    import_onnx,
    load_keras_weights,
    load_state_dict,
    state_dict,
)
from pydtnn.tools.perfmodel import Platform
from pydtnn.tools.search import make_space
from pydtnn.tools.search.lines import describe_trial
from pydtnn.tools.search.study import JOURNAL, SharedStudy
from pydtnn.tools.shards import load_shards, pack_shards
from pydtnn.tools.shards.reading import INDEX
from pydtnn.tools.tracing import RankTrace, build_timeline, read_traces
from pydtnn.tools.tracing.summary import summarize
from pydtnn.training.checkpoint import find_checkpoints, load_checkpoint
from pydtnn.training.checkpoint.folder import STATE
from pydtnn.training.checkpoint.layout import ARRAYS
from pydtnn.training.trainer import Trainer
from pydtnn.utils import plain_yaml
from pydtnn.utils.errors import EXPLAINED
from pydtnn.utils.files import fill_folder
from pydtnn.utils.imports import import_object
from tests.data.image_files import write_images
from tests.data.pickles import array, numbers, pickled, string
from tests.fuzz.damage import Rng, change_json, damage
from tests.small_tokenizer import write_tokenizer
from tests.small_training import checksums, small_model, small_trainer, trained
from tests.tools.interchange import test_keras, test_torch_files
from tests.tools.tracing.synthetic import write_run

ROOM = 256 << 20
"""Memory that reading small files may take, in B."""

SECONDS = 20
"""Time of the processor that reading small files may take, in s."""

SECRET = "secret.tar"
"""A file beside the folder, which no name in a file of the folder may reach."""


KINDS: dict[str, type[Kind]] = {}


class Kind:
    """Files of one kind in a folder, which its class registers.

    Attributes
    ----------
    files : dict of str to bytes
        Undamaged, by name.
    objects : str
        One of them that holds JSON objects, of which values are changed, too; none if empty.
    """

    files: dict[str, bytes]
    objects = ""

    def __init_subclass__(cls) -> None:
        KINDS[cls.__name__] = cls

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.prepare()
        self.files = {
            str(path.relative_to(folder)): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }

    def prepare(self) -> None:
        """Write the undamaged files."""

    def read(self) -> Any:
        """Read the files; raise an explained error where they are refused."""

    def check(self, found: Any, name: str, data: bytes) -> None:
        """Raise AssertionError where what was read is not right for a file of these bytes."""

    def refused(self) -> None:
        """Raise AssertionError where a refusal has changed anything."""

    def spoil(self, rng: Rng) -> tuple[str, bytes, str]:
        """Damage one of the files; return its name, its bytes and what was done."""
        name = str(rng.choice(list(self.files)))
        if self.objects and rng.random() < 0.6:
            name = self.objects
            objects = re.split(rb"(?<=\})\n(?=\{)", self.files[name])
            place = int(rng.integers(len(objects)))
            objects[place], done = change_json(objects[place], rng)
            data = b"\n".join(objects)
        else:
            data, done = self.damage(self.files[name], rng)
        (self.folder / name).write_bytes(data)
        return name, data, f"{name}: {done}"

    def damage(self, data: bytes, rng: Rng) -> tuple[bytes, str]:
        return damage(data, rng, [*self.files.values(), FOREIGN, PROGRAM])

    def spoil_with_sums(self, place: Path, names: list[str], rng: Rng) -> tuple[str, bytes, str]:
        """Damage the last of some files, a JSON object, or another; sums in the folder fit."""
        files = {key: self.files[str((place / key).relative_to(self.folder))] for key in names}
        key = str(rng.choice(names, p=[0.25, 0.75]))
        change = change_json if key == names[-1] and rng.random() < 0.8 else self.damage
        files[key], done = change(files[key], rng)
        shutil.rmtree(place)
        fill_folder(place, files)
        return f"{place.name}/{key}", files[key], f"{key}, whose sum fits: {done}"

    def attack(self, rng: Rng) -> tuple[str, bytes, str]:
        """Put something else that has a name in the place of a file; return as `spoil`."""
        name = str(rng.choice(list(self.files)))
        way, path = NO_FILES[rng.integers(len(NO_FILES))], self.folder / name
        path.unlink()
        way(path)
        return name, b"", f"{name}: {getattr(way, '__name__', way)}"

    def restore(self) -> None:
        """Make the folder as it was."""
        for name, data in self.files.items():
            path = self.folder / name
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            elif path.is_symlink() or (path.exists() and not path.is_file()):
                path.unlink()
            changed = not path.exists() or path.stat().st_size != len(data)  # one may be a hole
            if changed or path.read_bytes() != data:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)


def a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_circle(path: Path) -> None:
    path.symlink_to(path)


def nothing(path: Path) -> None:
    """The file is missing."""


def a_hole(path: Path) -> None:
    """20 GB without a block on the disk."""
    path.touch()
    os.truncate(path, 20 << 30)


NO_FILES: list[Callable[[Path], object]] = [os.mkfifo, Path.mkdir, Path.touch]
NO_FILES += [a_device, a_circle, nothing, a_hole]

PROGRAM = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(x) run\n%%EOF\n"
"""A picture that Ghostscript executes."""

FOREIGN = gzip.compress(bytes(range(256)) * 4) + pickle.dumps({"data": [1.5, "x" * 99]})


class Configuration(Kind):
    objects = "json.yaml"

    def prepare(self) -> None:
        changed = {"lr": 1e-3, "model_options": {"hidden": [3, 4], "name": "a: b"}, "epochs": 7}
        values = {**vars(TrainConfig()), **changed}
        lines = [f"{name}: {plain_yaml.dump(value)}\n" for name, value in values.items()]
        (self.folder / "run.yaml").write_text("".join(lines))
        (self.folder / "short.yaml").write_text(
            "# a comment\nepochs: 3\nmodel-options:\n  hidden:\n    - 5\n    - 6\nsave: 'x'\n"
        )
        (self.folder / "json.yaml").write_text(json.dumps({**vars(TrainConfig()), **changed}))

    def read(self) -> Any:
        return {name: parse([f"--config={self.folder / name}"]) for name in self.files}

    def check(self, found: dict[str, TrainConfig], name: str, data: bytes) -> None:
        """Other words may be a configuration, too: it comes back from what is printed of it."""
        for config in found.values():
            text = "".join(f"{key}: {plain_yaml.dump(v)}\n" for key, v in vars(config).items())
            assert plain_yaml.load(text) == vars(config)


class RunFile(Kind):
    objects = "run.json"

    def prepare(self) -> None:
        config = TrainConfig(
            lr=1e-3, epochs=7, model_options={"hidden": [3, 4]}, global_batch_size=8
        )
        content = {"configuration": vars(config), "ranks": 2, "global_batch_size": 8, "x": [None]}
        (self.folder / "run.json").write_text(json.dumps(content))

    def read(self) -> TrainConfig:
        arguments = Arguments(["--resume", str(self.folder)])
        return arguments.configure(start_values(read_run(str(self.folder)), set(), 4))

    def check(self, found: TrainConfig, name: str, data: bytes) -> None:
        """Other words may be a configuration, too; its mesh is not that of these ranks."""
        kept = json.loads(data)["configuration"]
        for option in {*kept} - {"global_batch_size", *NOT_INHERITED, *OF_THE_MESH}:
            value = getattr(found, option)
            same = float(kept[option]) if isinstance(value, float) else kept[option]
            assert value == same, option


class Weights(Kind):
    def prepare(self) -> None:
        self.model = small_model(seed=1, dtype="float32")
        self.before = encode(self.model.state())
        self.initial = {name: value.copy() for name, value in self.model.state().items()}
        saved = small_model(dtype="float32")
        self.saved = encode(saved.state())
        save_weights(saved, self.folder / "w.safetensors")

    def read(self) -> Model:
        self.model.load(self.initial)
        load_weights(self.model, self.folder / "w.safetensors")
        return self.model

    def check(self, found: Model, name: str, data: bytes) -> None:
        assert encode(found.state()) == self.saved, "other weights were taken"

    def refused(self) -> None:
        assert encode(self.model.state()) == self.before, "the model has changed"


class SavedModels(Kind):
    def prepare(self) -> None:
        x = images(0, 9, 5, 5, 2)
        model = small_model(dtype="float32")
        model.inputs = inputs_of(ArrayDataset(x, np.arange(9) % 3, class_names=["a", "b", "c"]))
        save_model(model, self.folder / "m")
        self.x, self.saved, self.predicted = x, encode(model.state()), model.predict(x)

    def spoil(self, rng: Rng) -> tuple[str, bytes, str]:
        self.sums_fit = rng.random() < 0.7
        if self.sums_fit:
            return self.spoil_with_sums(self.folder / "m", [WEIGHTS, MODEL], rng)
        return super().spoil(rng)

    def read(self) -> tuple[Model, Any]:
        model = load(self.folder / "m", backend="numpy")
        return model, model.predict(self.x, check_range=False)

    def check(self, found: tuple[Model, Any], name: str, data: bytes) -> None:
        """A changed description may be that of another model, with the same weights."""
        model, predicted = found
        assert encode(model.state()) == self.saved, "other weights were taken"
        if not self.sums_fit:
            assert predicted.tobytes() == self.predicted.tobytes(), "another model was taken"


class Checkpoints(Kind):
    def prepare(self) -> None:
        trained(self.folder)
        self.old, self.new = find_checkpoints(self.folder)
        self.loaded = {}
        for path in (self.old, self.new):
            alone = self.folder.with_name(f"{self.folder.name}-{path.name}")
            shutil.copytree(path, alone / path.name)
            trainer = self.trainer()
            load_checkpoint(alone, trainer)
            self.loaded[path] = everything(trainer)
            shutil.rmtree(alone)
        self.before = everything(self.trainer())

    def trainer(self) -> Trainer:
        return small_trainer(None, EarlyStopping(), model=small_model(seed=1))

    def spoil(self, rng: Rng) -> tuple[str, bytes, str]:
        self.sums_fit = rng.random() < 0.5
        if self.sums_fit:
            return self.spoil_with_sums(self.new, [ARRAYS, STATE], rng)
        return super().spoil(rng)

    def read(self) -> tuple[Trainer, Path | None]:
        self.last = self.trainer()
        return self.last, load_checkpoint(self.folder, self.last)

    def check(self, found: tuple[Trainer, Path | None], name: str, data: bytes) -> None:
        trainer, path = found
        assert path in (self.old, self.new), f"{path} was taken"
        if path == self.new and self.sums_fit:
            assert all(np.isfinite(value).all() for value in trainer.model.state().values())
            assert trainer.optimizer.iterations >= 0
            return  # other numbers make a checkpoint, too
        assert everything(trainer) == self.loaded[path], "another state was taken"

    def refused(self) -> None:
        assert everything(self.last) == self.before, "the trainer has changed"

    def restore(self) -> None:
        shutil.rmtree(self.folder)
        super().restore()


def everything(trainer: Trainer) -> list[Any]:
    """All that loading a checkpoint may change."""
    state = trainer.state()
    return [
        checksums(trainer.model.state()),
        checksums(trainer.optimizer.state()),
        {**state, "totals": state["totals"].tobytes()},
        [callback.state() for callback in trainer.callbacks],
    ]


def images(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)


class Mnist(Kind):
    zipped = False

    def prepare(self) -> None:
        for name, shape in zip(FILES, ((7, 28, 28), (7,), (5, 28, 28), (5,)), strict=True):
            values = images(len(name), *shape)
            if len(shape) == 1:
                values %= 10
            header = bytes([0, 0, 8, len(shape)]) + np.array(shape, ">u4").tobytes()
            data = header + values.tobytes()
            zipped = gzip.compress(data, mtime=0)
            path = self.folder / (f"{name}.gz" if self.zipped else name)
            path.write_bytes(zipped if self.zipped else data)

    def read(self) -> tuple[Dataset, Dataset]:
        return load_mnist(data_dir=self.folder)

    def check(self, found: tuple[Dataset, Dataset], name: str, data: bytes) -> None:
        for part, (x_name, y_name) in zip(found, (FILES[:2], FILES[2:]), strict=True):
            x, y = part.read(np.arange(len(part)))
            assert x.tobytes() == self.body(x_name, 16)
            assert y.astype(np.uint8).tobytes() == self.body(y_name, 8)

    def body(self, name: str, header: int) -> bytes:
        path = self.folder / name
        if not self.zipped:
            return path.read_bytes()[header:]
        whole = gzip.decompress(self.files[f"{name}.gz"])[header:]
        try:
            return gzip.decompress(Path(f"{path}.gz").read_bytes())[header:]
        except (OSError, EOFError):  # what follows a whole file does not matter
            return whole


class MnistZipped(Mnist):
    zipped = True


class Cifar(Kind):
    """CIFAR-10 in its binary version."""

    counts = (4, 3, 4, 2, 4, 5)

    def prepare(self) -> None:
        cifar.COUNTS_10 = self.counts  # type: ignore[assignment]
        for number, name in enumerate(LAYOUTS_10[0].files):
            records = images(number, self.counts[number], 3073)
            records[:, 0] %= 10
            (self.folder / name).write_bytes(records.tobytes())

    def read(self) -> tuple[Dataset, Dataset]:
        return load_cifar10(data_dir=self.folder)

    def check(self, found: tuple[Dataset, Dataset], name: str, data: bytes) -> None:
        files = [(self.folder / file).read_bytes() for file in LAYOUTS_10[0].files]
        for part, content in zip(found, (b"".join(files[:5]), files[5]), strict=True):
            records = np.frombuffer(content, np.uint8).reshape(-1, 3073)
            x, y = part.read(np.arange(len(part)))
            planes = records[:, 1:].reshape(-1, 3, 32, 32)
            np.testing.assert_array_equal(x, planes.transpose(0, 2, 3, 1))
            np.testing.assert_array_equal(y, records[:, 0])
        assert (len(found[0]), len(found[1])) == (17, 5)


class CifarPickles(Kind):
    """CIFAR-100 as pickles of Python 2; pixels and labels have no checksum."""

    counts = (6, 5)

    def prepare(self) -> None:
        cifar.COUNTS_100 = self.counts  # type: ignore[assignment]
        for number, name in enumerate(LAYOUTS_100[1].files):
            count = self.counts[number]
            labels = list(range(count))
            content = {"data": images(number, count, 3072), "fine_labels": labels}
            data = pickle.dumps({**content, "coarse_labels": labels}, protocol=4)
            if number == 0:
                data = pickled(
                    data=array(content["data"]),  # type: ignore[arg-type]
                    batch_label=string(b"training batch"),
                    fine_labels=numbers(labels),
                    coarse_labels=numbers(labels),
                )
            (self.folder / name).write_bytes(data)

    def read(self) -> tuple[Dataset, Dataset]:
        return load_cifar100(data_dir=self.folder)

    def check(self, found: tuple[Dataset, Dataset], name: str, data: bytes) -> None:
        for part, count in zip(found, self.counts, strict=True):
            x, y = part.read(np.arange(len(part)))
            assert x.shape == (count, 32, 32, 3)
            assert x.dtype == np.uint8
            assert y.min() >= 0
            assert y.max() < 100


class Choices(Kind):
    """What was measured: a damaged file is measured again, so nothing is refused."""

    def prepare(self) -> None:
        os.environ["PYDTNN_CACHE"] = str(self.folder)
        file = AutotunerFile("this machine")
        choice = Winner("winograd4", {"winograd4": 1e-3, "direct": 2e-3})
        for batch in (16, 64):
            file.add("avx2, 1 thread", "conv.forward 3x3", batch, choice)
        file.path.write_bytes(file.path.read_bytes().strip().replace(b"\n\n", b"\n"))
        self.objects = file.path.name

    def read(self) -> Any:
        file = AutotunerFile("this machine")
        names = ["winograd4", "direct"]
        found = file.find("avx2, 1 thread", "conv.forward 3x3", 64, names)
        file.add(
            "avx2, 1 thread", "conv.forward 5x5", 8, Winner("direct", dict.fromkeys(names, 1.0))
        )
        again = AutotunerFile("this machine")
        stored = again.find("avx2, 1 thread", "conv.forward 5x5", 8, names) is not None
        assert stored or not file.path.is_file(), "a choice was not stored"
        return found

    def check(self, found: Winner | None, name: str, data: bytes) -> None:
        assert found is None or found.name in found.seconds


class OwnCode(Kind):
    """Code, of which anything may be imported that is called so."""

    SOURCE = (
        '"""A network."""\n\nfrom pydtnn.layers import Flatten, Linear, Sequential\n\n\n'
        "def net(classes, input_shape, hidden=(8,)):\n"
        "    # café\n"
        "    return Sequential(Flatten(), *(Linear(n) for n in hidden), Linear(classes))\n"
    )

    def prepare(self) -> None:
        (self.folder / "own.py").write_text(self.SOURCE)

    def read(self) -> Any:
        sys.dont_write_bytecode = True
        return import_object(f"{self.folder / 'own.py'}:net", "--model")


class Shards(Kind):
    """Images in tar files, with checksums of all; half of the time those of a changed index fit."""

    def prepare(self) -> None:
        images = self.folder.with_name("images")
        pack_shards(write_images(images), self.folder, shard_bytes=600)
        shutil.rmtree(images)
        self.right = [part.read(np.arange(len(part))) for part in self.read()]

    def spoil(self, rng: Rng) -> tuple[str, bytes, str]:
        if rng.random() < 0.5:
            return super().spoil(rng)
        name = f"{rng.choice(['train', 'test'])}/{INDEX}"
        if rng.random() < 0.3:
            data, done = self._lead_out(name, rng)
        else:
            data, done = change_json(self.files[name], rng)
        content = json.loads(data)
        content.pop("sha256", None)
        text = json.dumps(content, separators=(",", ":"))
        content["sha256"] = hashlib.sha256(text.encode()).hexdigest()
        data = json.dumps(content, separators=(",", ":")).encode()
        (self.folder / name).write_bytes(data)
        return name, data, f"{name}, whose sum fits: {done}"

    def _lead_out(self, name: str, rng: Rng) -> tuple[bytes, str]:
        """Let a shard be the file beside the folder, by its name or by a link."""
        content = json.loads(self.files[name])
        shard = content["shards"][rng.integers(len(content["shards"]))]
        secret = self.folder.with_name(SECRET)
        shutil.copy(self.folder / Path(name).parent / shard["name"], secret)
        if rng.random() < 0.5:
            path = self.folder / Path(name).parent / shard["name"]
            path.unlink()
            path.symlink_to(secret)
            return json.dumps(content).encode(), "a link out of the folder"
        shard["name"] = str(rng.choice([f"../../{SECRET}", str(secret), f"x/../../../{SECRET}"]))
        return json.dumps(content).encode(), shard["name"]

    def read(self) -> tuple[Dataset, Dataset]:
        both = load_shards(data_dir=self.folder)
        assert len(both[0].read(np.arange(len(both[0])))[0])
        return both

    def check(self, found: tuple[Dataset, Dataset], name: str, data: bytes) -> None:
        """Without a checksum, classes may have other names, and images other labels and numbers."""
        for part, right in zip(found, self.right, strict=True):
            x, y = part.read(np.arange(len(part)))
            assert y.min() >= 0
            assert y.max() < part.classes
            assert sorted(map(np.ndarray.tobytes, x)) == sorted(map(np.ndarray.tobytes, right[0]))


class Images(Kind):
    """PNG files in folders; each part of a PNG file has a checksum."""

    def prepare(self) -> None:
        write_images(self.folder)
        self.right = [part.read(np.arange(len(part)))[0] for part in self.read()]

    def read(self) -> tuple[Dataset, Dataset]:
        both = load_folder(data_dir=self.folder)
        for part in both:
            part.read(np.arange(len(part)))
        return both

    def check(self, found: tuple[Dataset, Dataset], name: str, data: bytes) -> None:
        for part, right in zip(found, self.right, strict=True):
            x, _ = part.read(np.arange(len(part)))
            different = sum(one.tobytes() not in map(np.ndarray.tobytes, right) for one in x)
            assert different <= 1, "other images have changed, too"


class Text(Kind):
    """Bytes, whatever they are."""

    def prepare(self) -> None:
        for name in ("a.txt", "b/c.txt"):
            (self.folder / name).parent.mkdir(exist_ok=True)
            (self.folder / name).write_bytes(images(len(name), 3000).tobytes())

    def read(self) -> tuple[Dataset, Dataset]:
        return load_text(self.folder, length=16)

    def check(self, found: tuple[Dataset, Dataset], name: str, data: bytes) -> None:
        paths = [path for path in sorted(self.folder.rglob("*")) if path.is_file()]
        text = b"\n".join(path.read_bytes() for path in paths)
        assert b"".join(part.tokens.tobytes() for part in found) == text


class StateDicts(Kind):
    """A file of ``torch.save``, a zip file in which each array has a checksum."""

    file = "w.pt"

    def prepare(self) -> None:
        self.model, other = self.new(1), self.new(2)
        self.initial = {name: value.copy() for name, value in self.model.state().items()}
        self.write(other)
        self.saved = encode(other.state())

    def new(self, seed: int) -> Model:
        return small_model(seed=seed, dtype="float32")

    def write(self, model: Model) -> None:
        test_torch_files.compress(self.folder / self.file, state_dict(model))

    def load(self) -> None:
        load_state_dict(self.model, self.folder / self.file)

    def read(self) -> Model:
        self.model.load(self.initial)
        self.load()
        return self.model

    def check(self, found: Model, name: str, data: bytes) -> None:
        """The pickle has a checksum, too, which is not compared: other names may fit."""
        assert all(np.isfinite(value).all() for value in found.state().values())

    def refused(self) -> None:
        for name, value in self.model.state().items():
            assert value.tobytes() == self.initial[name].tobytes(), "the model has changed"


class KerasWeights(StateDicts):
    """An HDF5 file, without checksums."""

    file = "w.h5"

    def new(self, seed: int) -> Model:
        return test_keras.model(seed)

    def write(self, model: Model) -> None:
        test_keras.write(self.folder / self.file, test_keras.kernels(model))

    def load(self) -> None:
        load_keras_weights(self.model, self.folder / self.file)


class OnnxNetworks(Kind):
    """A network in a file without checksums: another may be that of the bytes."""

    def prepare(self) -> None:
        export_onnx(small_model(dtype="float32"), self.folder / "net.onnx")

    def read(self) -> Model:
        return import_onnx(self.folder / "net.onnx")

    def check(self, found: Model, name: str, data: bytes) -> None:
        assert all(np.isfinite(value).all() for value in found.state().values())


class Traces(Kind):
    """The files of two ranks; each member of the archives has a checksum."""

    sums_fit = False

    def spoil(self, rng: Rng) -> tuple[str, bytes, str]:
        self.sums_fit = rng.random() < 0.6
        if not self.sums_fit:
            return super().spoil(rng)
        name = str(rng.choice(list(self.files)))
        with np.load(self.folder / name) as file:
            records, names, text = file["records"], file["names"], str(file["about"])
        done = "records"
        if rng.random() < 0.5:
            changed, done = change_json(text.encode(), rng)
            text = changed.decode()
        else:
            field = str(rng.choice(records.dtype.names))
            rows = rng.integers(len(records), size=rng.integers(1, 9))
            limits = np.iinfo(records.dtype[field])
            records[field][rows] = rng.choice([limits.min, limits.max, 0, 1, 2, 1 << 7], len(rows))
            done = f"{field} of {len(rows)} records"
        with (self.folder / name).open("wb") as file:
            np.savez_compressed(file, records=records, names=names, about=np.array(text))
            if rng.random() < 0.1:
                bomb = np.zeros((72 << 20) // records.itemsize, records.dtype)
                file.seek(0)
                np.savez_compressed(file, records=bomb, names=names, about=np.array(text))
                done = "a bomb"
        return name, (self.folder / name).read_bytes(), f"{name}, whose sums fit: {done}"

    def prepare(self) -> None:
        write_run(self.folder, ranks=2, steps=2)
        self.right = read_traces(self.folder)

    def read(self) -> list[RankTrace]:
        traces = read_traces(self.folder)
        summarize(build_timeline(traces))
        return traces

    def check(self, found: list[RankTrace], name: str, data: bytes) -> None:
        if self.sums_fit:
            return  # other numbers make a trace, too
        for trace, right in zip(found, self.right, strict=True):
            np.testing.assert_array_equal(trace.records, right.records)
            assert (trace.names, trace.about) == (right.names, right.about)


class Platforms(Kind):
    """A cluster in numbers with units."""

    def prepare(self) -> None:
        Platform.load("laptop").save(self.folder / "platform.yaml")

    def read(self) -> Platform:
        return Platform.load(self.folder / "platform.yaml")

    def check(self, found: Platform, name: str, data: bytes) -> None:
        network = found.network(4)
        assert all(route.bandwidth > 0 for route in network.routes.values())


class Studies(Kind):
    """The journal of a search, a JSON object per line, as its jobs and its page read it."""

    objects = JOURNAL

    def prepare(self) -> None:
        self.space = make_space(
            {"x": {"low": 0.0, "high": 1.0}, "n": [1, 2]}, objective={"minimize": "y"}, trials=4
        )
        own = SharedStudy(self.folder, self.space)
        while (taken := own.take({"host": "here", "job": 1, "ranks": [0]})) is not None:
            own.tell(taken.number, {"y": float(taken.number)}, {})
        own.close()

    def read(self) -> list[Any]:
        own = SharedStudy(self.folder, self.space)
        own.close()
        trials = list(own.study.get_trials(deepcopy=False))
        for one in trials:
            if one.state.is_finished():
                describe_trial(self.space, trials, one.number)
        return trials

    def check(self, found: list[Any], name: str, data: bytes) -> None:
        assert len(found) <= len(self.files[JOURNAL])


class Tokenizers(Kind):
    """A tokenizer of Hugging Face, which a library in Rust reads."""

    objects = "t.json"

    def prepare(self) -> None:
        write_tokenizer(b"one two three, two three four\n" * 9, self.folder / "t.json", 280)

    def read(self) -> Any:
        return Tokenizer(self.folder / "t.json").encode(b"one two " * 99)

    def check(self, found: Any, name: str, data: bytes) -> None:
        assert found.dtype == np.int32


def try_one(kind: Kind, seed: int) -> dict[str, str]:
    """Damage, read and compare once."""
    rng, place = np.random.default_rng(seed), kind.folder.parent
    before = {*place.iterdir(), place / "copy"}
    name, data, done = (kind.attack if rng.random() < 0.1 else kind.spoil)(rng)
    OPENED.clear()
    STARTED.clear()
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    answer = {"done": f"{done} ({hashlib.sha256(data).hexdigest()[:8]})"}
    try:
        try:
            found = kind.read()
        except EXPLAINED as error:
            text = str(error)
            assert text.strip(), "an error without words"
            assert "\n" not in text, "more than one line"
            kind.refused()
            return {**answer, "outcome": "refused", "error": text}
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            for path in OPENED:
                assert Path(path).name != SECRET, "a file outside of the folder was opened"
            assert not STARTED, f"a program was started: {STARTED}"
        kind.check(found, name, data)
        return {**answer, "outcome": "read"}
    except BaseException as error:
        return {**answer, "outcome": "wrong", "error": f"{type(error).__name__}: {error}"}
    finally:
        place.joinpath(SECRET).unlink(missing_ok=True)
        shutil.rmtree(place / "copy", ignore_errors=True)
        kind.restore()
        assert before >= {*place.iterdir()}, "a file outside of the folder was written"


OPENED: list[str] = []
"""Files that were opened since the last case began."""


STARTED: list[str] = []
"""Programs that were started since the last case began."""

STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.fork", "os.posix_spawn", "pty.spawn")

PROGRAMS = ("gs", "ssh", "sh", "bash", "convert", "xdg-open")
"""Put on the path, so that whoever looks for them finds them."""


def record(event: str, arguments: tuple[Any, ...]) -> None:
    """Record the files that Python opens, and the programs that it starts."""
    if event in STARTS:
        STARTED.append(f"{event}{arguments!r:.200}")
    if event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
        OPENED.append(os.path.realpath(os.fsdecode(arguments[0])))


def too_long(number: int, frame: Any) -> None:
    """Interrupt a case that takes too long."""
    raise KeyboardInterrupt(f"it takes more than {SECONDS} s")


def main(name: str, folder: str) -> None:
    """Answer seeds until there are no more."""
    logging.disable()
    kind = KINDS[name](Path(folder))
    signal.signal(signal.SIGPROF, too_long)
    programs = Path(folder).parent / "programs"
    programs.mkdir(exist_ok=True)
    for program in PROGRAMS:
        (programs / program).write_text("#!/bin/true\n")
        (programs / program).chmod(0o755)
    os.environ["PATH"] = f"{programs}:{os.environ.get('PATH', '')}"
    sys.addaudithook(record)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + ROOM, now + ROOM))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        print(json.dumps(try_one(kind, int(line))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
