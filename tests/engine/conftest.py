"""Fixtures of the engine tests: the shipped model behind `LLM`, and what transformers says of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from serve.llm import LLM

PROMPTS = [
    "In the beginning God",
    "And the LORD said unto Moses,",
    "Blessed are the",
    "The LORD is my shepherd;",
    "And it came to pass",
    "Now these are the names of the children of Israel",
    "For God so loved",
    "Then answered Jesus and said",
    "Woe unto",
    "And David",
]


@pytest.fixture(scope="session")
def llm(tiny_model: Path) -> Iterator[LLM]:
    """The shipped model on one rank, with defaults but for a shorter context."""
    with LLM(tiny_model, dtype="float32", device="cpu", max_model_len=512) as engine:
        yield engine
