"""Where images come from, by name; all become one `Dataset`."""

from collections.abc import Callable

from comet_core.config import RunConfig
from comet_core.datasets import cifar10, digits, fashion_mnist, image_folder
from comet_core.datasets.base import DatasetError, Images
from comet_core.datasets.batches import Dataset

DATASETS: dict[str, Callable[[RunConfig], Images]] = {
    "digits": digits.load,
    "fashion_mnist": fashion_mnist.load,
    "cifar10": cifar10.load,
    "image_folder": image_folder.load,
}


def load_dataset(config: RunConfig) -> Dataset:
    """Load what `config` names. Raises DatasetError (a ValueError) with a sentence where it cannot be trained on."""
    dataset = Dataset(DATASETS[config.dataset](config), config)
    if config.batch_size > dataset.num_train:
        raise DatasetError(
            f"batch_size is {config.batch_size:,}, but there are {dataset.num_train:,} training images; "
            "choose a smaller batch."
        )
    return dataset
