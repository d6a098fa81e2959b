"""What every settings model shares."""

from pydantic import BaseModel, ConfigDict, ValidationError


class ConfigError(ValueError):
    """A setting that cannot work; the message names the field and what to do."""


class Settings(BaseModel):
    """A frozen pydantic model whose unknown keys are errors. It travels as JSON, which has no infinity."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def explain(error: ValidationError, *, where: str) -> str:
    """One line for each problem of a pydantic error: `where: field.path: what is wrong`."""
    lines = []
    for item in error.errors(include_url=False):
        field = ".".join(str(part) for part in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "missing":
            message = "is missing"
        elif item["type"] == "extra_forbidden":
            message = "unknown setting (check its spelling)"
        lines.append(f"{where}: {field}: {message}" if field else f"{where}: {message}")
    return "\n".join(lines)
