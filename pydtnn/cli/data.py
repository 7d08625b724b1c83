"""The data sets of a run."""

from __future__ import annotations

import logging

from pydtnn.cli.config import TrainConfig
from pydtnn.cli.parts import find, require_parameter
from pydtnn.comm import Communicator
from pydtnn.data import Dataset, load_dataset, split_validation
from pydtnn.data.shards import stage_shards, staged_folder
from pydtnn.utils import clock

_log = logging.getLogger("pydtnn.train")


def create_data(config: TrainConfig) -> tuple[Dataset, Dataset]:
    """Load the training set and the validation set: the test set, or a split of the former."""
    found, options = find(config, "dataset")
    if config.image_size is not None:
        require_parameter(found, "image_size", "--image-size")
        options = options | {"image_size": config.image_size}
    folder = config.data_dir
    if config.stage is not None:
        folder = str(staged_folder(folder, config.stage))
    train, test = load_dataset(found, folder, config.download, **options)
    if config.validation_split:
        return split_validation(train, config.validation_split, config.seed)
    return train, test


def fetch_data(config: TrainConfig, comm: Communicator) -> None:
    """Download or stage the data on one rank of each host, before all ranks read them."""
    if comm.local_rank > 0:
        return
    if config.stage is not None:
        check = bool(config.dataset_options.get("check", True))
        stage_shards(config.data_dir, config.stage, check=check)
    else:
        create_data(config)


def share_data(config: TrainConfig, comm: Communicator) -> tuple[Dataset, Dataset]:
    """Load the data sets once for all ranks that are threads of this process.

    Collective: all ranks call it.
    """
    begin = clock.now()
    train, validation = comm.share(lambda: create_data(config))
    _log.debug("data %s: %.2f s", train.name, clock.now() - begin)
    return train, validation
