"""Data that tests of every folder use; checkpoints with reference outputs come from `tests/oracles.py`."""

from pathlib import Path

import pytest

from tests import REPOSITORY


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """The folder of the trained model that the repository ships."""
    return REPOSITORY / "examples" / "tiny-model"
