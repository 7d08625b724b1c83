"""The first reading of images from files, on several ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pydtnn import Model, Trainer
from pydtnn.comm import Communicator
from pydtnn.data import load_folder, split_validation
from pydtnn.data.statistics import pixel_sums
from pydtnn.layers import Flatten, Linear, Sequential
from pydtnn.optimizers import SGD
from pydtnn.parallel import AllReduce
from pydtnn.training.examination import examine
from pydtnn.utils.errors import AgreedError
from tests.data.image_files import pixels_of, write_images
from tests.each import each


def written(folder: Path, comm: Communicator) -> Path:
    """Write the images on one rank, before any reads them."""
    if comm.rank == 0:
        write_images(folder)
    comm.barrier()
    return folder


@pytest.mark.threads(1, 3)
def test_ranks_read_each_sample_once_and_get_the_statistics_of_all(comm, tmp_path):
    root = written(tmp_path, comm)
    train, test = load_folder(data_dir=root)
    counts = []
    for data in (train, test):
        encoded, read = data.encoded, []
        data.encoded = lambda index, encoded=encoded, read=read: (
            read.append(index) or encoded(index)
        )
        counts.append(read)
    examine(comm, train, test, threads=2)
    for data, read in zip((train, test), counts, strict=True):
        everywhere = [index for own in comm.gather_object(sorted(read)) for index in own]
        assert everywhere == list(range(len(data)))
        read.clear()
    x = pixels_of(root / "train")[0]
    expected = pixel_sums(lambda i: (x[i], i), x.shape[1:], range(len(x))).statistics()
    for data in (train, test):
        assert data.mean.tobytes() == expected.mean.tobytes()
        assert data.std.tobytes() == expected.std.tobytes()
    examine(comm, train, test)
    assert counts == [[], []]


@pytest.mark.threads(2)
@each("part", ["train", "val"])
def test_a_damaged_image_is_told_on_all_ranks(comm, tmp_path, part):
    root = written(tmp_path, comm)
    if comm.rank == 0:
        path = root / part / "bee" / "1.png"
        path.write_bytes(path.read_bytes()[:60])
    comm.barrier()
    data = load_folder(data_dir=root)
    with pytest.raises(AgreedError, match=rf"rank \d: folder: .*{part}/bee/1\.png"):
        examine(comm, *data)


@pytest.mark.threads(2)
def test_a_trainer_begins_with_it_and_parts_are_examined_as_a_whole(comm, tmp_path):
    root = written(tmp_path, comm)
    train, test = load_folder(data_dir=root)
    rest, held = split_validation(train, 0.25)
    net = Sequential(Flatten(), Linear(3))
    model = Model(net, train.input_shape)
    trainer = Trainer(model, SGD(), exchange=AllReduce(comm))
    trainer.fit(rest, held, batch_size=3)
    assert (train.examined, test.examined) == (True, False)
    assert np.isfinite(trainer.history[-1]["val_loss"])
