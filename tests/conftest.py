"""Data that tests of every folder use; checkpoints with reference outputs come from `tests/oracles.py`."""

import os
from pathlib import Path

import pytest
import torch

import tests.kernels  # noqa: F401  (says how Triton runs, before any kernel is imported)
from configs.engine import EngineConfig
from tests import REPOSITORY

if "PYTEST_XDIST_WORKER" in os.environ:  # threads of several test processes would only wait for each other
    torch.set_num_threads(1)
    EngineConfig.model_fields["cpu_threads"].default = 1
    EngineConfig.model_rebuild(force=True)


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """The folder of the trained model that the repository ships."""
    return REPOSITORY / "examples" / "tiny-model"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several test processes (-n 2 --dist loadgroup) a file's tests stay together, for their fixtures, and so do
    all of tests/serving, which share a Ray session."""
    for item in items:
        is_serving = item.path.parent.name == "serving"
        item.add_marker(pytest.mark.xdist_group("serving" if is_serving else item.path.stem))
