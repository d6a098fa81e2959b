"""Errors of the engine that its callers must tell apart."""


class EngineDeadError(RuntimeError):
    """The engine can serve no more; the message says why, for the operator."""
