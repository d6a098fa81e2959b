"""Data that tests of every folder use; checkpoints with reference outputs come from `tests/oracles.py`."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from xdist.scheduler import LoadScopeScheduling

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


class _ByFile(LoadScopeScheduling):
    """A file's tests stay together, for their fixtures, and so do all of tests/serving, which share a Ray session."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return "serving" if path.startswith("tests/serving/") else path


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """How several test processes (-n 2) share the tests."""
    return _ByFile(config, log)
