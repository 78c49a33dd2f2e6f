"""Experiment trackers that `report_to` may name, and the package that each needs."""

from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from types import MappingProxyType

#: Tracker → the packages of which one is enough, the one to install first. Trackers that are not listed need none.
PACKAGES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "azure_ml": ("azureml",),
        "clearml": ("clearml",),
        "codecarbon": ("codecarbon",),
        "comet_ml": ("comet_ml",),
        "dagshub": ("dagshub",),
        "dvclive": ("dvclive",),
        "flyte": ("flytekit",),
        "mlflow": ("mlflow",),
        "neptune": ("neptune",),
        "swanlab": ("swanlab",),
        "tensorboard": ("tensorboard", "tensorboardX"),
        "trackio": ("trackio",),
        "wandb": ("wandb",),
    }
)
_INSTALLED_AS = {"azureml": "azureml-sdk", "comet_ml": "comet-ml"}


def check_trackers(names: Iterable[str]) -> None:
    """Refuse a tracker whose package is missing, before a model is loaded."""
    for name in names:
        packages = PACKAGES.get(name, ())
        if packages and not any(find_spec(package) for package in packages):
            install = _INSTALLED_AS.get(packages[0], packages[0])
            raise ValueError(
                f"`report_to` must name trackers that are installed. Got {name!r}, which needs the package {packages[0]}: "
                f"pip install {install}. Without `report_to` the run logs to the terminal alone."
            )
