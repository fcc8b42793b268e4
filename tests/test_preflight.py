"""Every wrong value is a ValueError that names the field, the value and the way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from configs.mlebench import PRESETS, get_config
from jaxrl_code import preflight


def local(tmp_path: Path) -> Any:
    config = get_config("local")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "data").mkdir()
    config.model.path, config.data.root = str(tmp_path / "model"), str(tmp_path / "data")
    return config


def set_field(config: Any, dotted: str, value: Any) -> None:
    *path, last = dotted.split(".")
    for name in path:
        config = config[name]
    del config[last]  # else a list would be made the tuple that stood there
    config[last] = value


@pytest.mark.parametrize("preset", PRESETS)
def test_the_values_of_every_preset_are_good(preset: str) -> None:
    config = get_config(preset)
    preflight._check_values(config)
    assert preflight.ppo_config(config).temperature == config.rollout.temperature  # of the same distribution


def test_a_good_config_passes_as_it_is(tmp_path: Path) -> None:
    config = local(tmp_path)
    before = config.to_json()
    preflight.check(config)
    assert config.to_json() == before
    (tmp_path / "data").rmdir()  # it is the folders that let it pass
    with pytest.raises(ValueError, match=r"data: data\.root"):
        preflight.check(config)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("ppo.buckets", [1024], ("config.ppo.buckets", "[1024]", "(1024,)")),
        ("steps", 0, ("config.steps = 0", "at least 1")),
        ("rollout.temperature", 0.0, ("config.rollout.temperature = 0.0", "above 0")),
        ("rollout.top_p", 0.9, ("top_p = 0.9", "needs 1")),
        ("rollout.improve_share", 1.5, ("improve_share = 1.5", "[0, 1]")),
        ("rollout.batch", 30, ("30 rows", "minibatches=4")),
        ("ppo.micro_rows", 3, ("micro_rows=3",)),
        ("ppo.clip", -1.0, ("ppo.clip=-1.0",)),
        ("ppo.duration", "log", ("ppo.duration='log'", "inverse_log")),
        ("rollout.response_tokens", 512, ("config.ppo.buckets", "1152")),
        ("sampler.prompt_buckets", (64,), ("config.sampler.prompt_buckets", "640")),
        ("sampler.kind", "tgi", ("config.sampler.kind = 'tgi'",)),
        ("model.path", "/nowhere", ("weights: model.path = '/nowhere'", "hf download", ":local")),
        ("data.root", "/nowhere", ("data: data.root = '/nowhere'", "launch/prepare.py --root /nowhere", ":local")),
        ("mesh.tp", 64, ("devices:", "64 devices", "--config.mesh.fsdp=8")),
    ],
)
def test_a_wrong_value_is_named(tmp_path: Path, field: str, value: Any, words: tuple[str, ...]) -> None:
    config = local(tmp_path)
    set_field(config, field, value)
    with pytest.raises(ValueError) as error:
        preflight.check(config)
    for word in words:
        assert word in str(error.value)


def test_all_that_is_missing_comes_at_once(tmp_path: Path) -> None:
    config = get_config()
    config.data.root = str(tmp_path / "none")
    config.mesh.fsdp = 64
    config.rollout.batch = 512
    config.ppo.micro_rows = 64
    with pytest.raises(ValueError) as error:
        preflight.check(config)
    assert [line.strip().split(":")[0] for line in str(error.value).splitlines()[1:4]] == ["weights", "data", "devices"]
