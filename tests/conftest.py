"""Data that tests of every folder use; checkpoints with reference outputs come from `tests/oracles.py`."""

from pathlib import Path

import pytest

import tests.kernels  # noqa: F401  (says how Triton runs, before any kernel is imported)
from tests import REPOSITORY


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """The folder of the trained model that the repository ships."""
    return REPOSITORY / "examples" / "tiny-model"
