"""The deployment files: Ray ignores keys that it does not know, so their spelling is checked here."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import HTTPOptionsSchema, ServeApplicationSchema, ServeDeploySchema

from configs.base import ConfigError
from configs.engine import ServeConfig
from tests import REPOSITORY

FILES = sorted((REPOSITORY / "configs" / "deploy").glob("*.yaml"))
each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


def load(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder that passes for a checkpoint."""
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def args_of(path: Path, model: Path) -> dict[str, Any]:
    [application] = load(path)["applications"]
    application["args"]["engine"]["model"] = str(model)
    return application["args"]


def test_the_files_are_those_the_readme_names() -> None:
    assert [path.stem for path in FILES] == ["eight-gpu-tp-ep", "one-gpu", "tiny-cpu"]


@each_file
def test_ray_accepts_the_file_and_knows_every_key(path: Path) -> None:
    document = load(path)
    ServeDeploySchema.model_validate(document)
    assert set(document) <= set(ServeDeploySchema.model_fields)
    assert set(document["http_options"]) <= set(HTTPOptionsSchema.model_fields)
    [application] = document["applications"]
    assert set(application) <= set(ServeApplicationSchema.model_fields)
    assert application["import_path"] == "serve.app:build"


@pytest.mark.parametrize(
    ("name", "tp_size", "ep_size", "device"),
    [("tiny-cpu", 2, 1, "cpu"), ("one-gpu", 1, 1, "cuda"), ("eight-gpu-tp-ep", 8, 8, "cuda")],
)
def test_args_validate(name: str, tp_size: int, ep_size: int, device: str, checkpoint: Path) -> None:
    config = ServeConfig.from_args(args_of(REPOSITORY / "configs" / "deploy" / f"{name}.yaml", checkpoint))
    assert (config.engine.parallel.tp_size, config.engine.parallel.ep_size) == (tp_size, ep_size)
    assert config.engine.device == device
    assert config.engine.model == checkpoint


def test_the_tiny_model_is_where_the_file_says() -> None:
    [application] = load(REPOSITORY / "configs" / "deploy" / "tiny-cpu.yaml")["applications"]
    assert (REPOSITORY / application["args"]["engine"]["model"] / "config.json").is_file()


@each_file
@pytest.mark.parametrize("section", ["engine", "engine.parallel", "deployment", ""])
def test_an_unknown_key_is_named(path: Path, section: str, checkpoint: Path) -> None:
    args = args_of(path, checkpoint)
    target = args
    for part in filter(None, section.split(".")):
        target = target.setdefault(part, {})
    target["tp_sizes"] = 2
    with pytest.raises(ConfigError) as caught:
        ServeConfig.from_args(args)
    field = f"{section}.tp_sizes" if section else "tp_sizes"
    assert str(caught.value) == f"args: {field}: unknown setting (check its spelling)"


@each_file
def test_the_placeholder_is_refused_with_what_to_do(path: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"engine\.model: .* is not a folder: give the folder that holds config\.json"
    ):
        ServeConfig.from_args(args_of(path, tmp_path / "absent"))
