"""Fixtures of the layer tests."""

from collections.abc import Iterator

import pytest

from tests.layers.ranks import TwoRanks


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[TwoRanks]:
    """Two tensor-parallel processes, started once."""
    ranks = TwoRanks()
    yield ranks
    ranks.close()
