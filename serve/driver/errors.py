"""Errors of the driver."""


class EngineFailure(RuntimeError):
    """The engine cannot go on. The message is one line for whoever runs it."""
