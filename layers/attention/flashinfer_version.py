"""Whether a FlashInfer is installed that has what a backend calls."""

from importlib import metadata

from packaging.version import Version

from configs.base import ConfigError


def require_flashinfer(setting: str, minimum: str, instead: str) -> None:
    """Raises ConfigError, naming the setting with its value and what to use instead, unless one is installed."""
    try:
        installed = metadata.version("flashinfer-python")
    except metadata.PackageNotFoundError:
        raise ConfigError(
            f"{setting} needs flashinfer-python >= {minimum}, which is not installed: "
            f"install shoal[gpu], or use {instead}"
        ) from None
    if Version(installed) < Version(minimum):
        raise ConfigError(
            f"{setting} needs flashinfer-python >= {minimum}, installed is {installed}: upgrade it, or use {instead}"
        )
