"""Folders in and out: every tensor back as it was, and one clear line for a folder that doesn't fit."""

from __future__ import annotations

import json
from pathlib import Path

import golden_models
import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl_code.models import hf
from jaxrl_code.models.qwen2 import Model


def stored(folder: Path) -> dict[str, np.ndarray]:
    return {name: array for file in folder.glob("*.safetensors") for name, array in load_file(file).items()}


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
        assert found[name].dtype == array.dtype, name


@pytest.mark.parametrize("shard_bytes", [10**9, 15_000])
@pytest.mark.parametrize("name", golden_models.SHAPES)
def test_save_gives_back_every_tensor_that_load_read(name: str, shard_bytes: int, tmp_path: Path) -> None:
    config, params = hf.load(golden_models.write(name, tmp_path / "in"))
    shapes = jax.eval_shape(Model(config).init, jax.random.key(0))
    assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, shapes)
    hf.save(tmp_path / "out", config, params, shard_bytes=shard_bytes)
    assert_same(stored(tmp_path / "out"), golden_models.hf_tensors(name))
    again, reloaded = hf.load(tmp_path / "out")
    assert again == config
    jax.tree.map(np.testing.assert_array_equal, reloaded, params)

    files = sorted(file.name for file in (tmp_path / "out").iterdir())
    if shard_bytes == 10**9:
        assert files == ["config.json", "model.safetensors"]
    else:
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(a.nbytes for a in golden_models.hf_tensors(name).values())
        assert set(index["weight_map"].values()) == {file for file in files if file.endswith(".safetensors")}
        largest = max(a.nbytes for a in golden_models.hf_tensors(name).values())
        assert all((tmp_path / "out" / f).stat().st_size < max(shard_bytes, largest) + 4096 for f in files)


def test_saving_over_a_sharded_folder_leaves_nothing_of_it(tmp_path: Path) -> None:
    config, params = hf.load(golden_models.write("gqa_tied", tmp_path / "in"))
    hf.save(tmp_path / "out", config, params, shard_bytes=15_000)
    hf.save(tmp_path / "out", config, params)
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]


def test_bfloat16_is_stored_and_read_as_bfloat16(tmp_path: Path) -> None:
    config, params = hf.load(golden_models.write("gqa_tied", tmp_path / "in"), param_dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(ml_dtypes.bfloat16)}
    hf.save(tmp_path / "out", config, params)
    expected = {k: v.astype(ml_dtypes.bfloat16) for k, v in golden_models.hf_tensors("gqa_tied").items()}
    assert_same(stored(tmp_path / "out"), expected)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    _, wide = hf.load(tmp_path / "out")  # and into float32 params, which Adam wants
    assert {leaf.dtype for leaf in jax.tree.leaves(wide)} == {np.dtype(np.float32)}


def test_a_critic_starts_as_the_policy_and_shares_no_memory_with_it(tmp_path: Path) -> None:
    config, params = hf.load(golden_models.write("mha_untied", tmp_path / "in"))
    params = jax.tree.map(jax.numpy.asarray, params)
    critic = hf.critic_from_policy(params)
    assert critic.keys() == params.keys() - {"lm_head"} | {"value_head"}
    np.testing.assert_array_equal(critic["layers"]["attn"]["q"], params["layers"]["attn"]["q"])
    pointers = [{x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree)} for tree in (params, critic)]
    assert not pointers[0] & pointers[1]
    shapes = jax.eval_shape(Model(config, "value").init, jax.random.key(0))
    assert jax.tree.map(np.shape, critic) == jax.tree.map(np.shape, shapes)
    hf.save(tmp_path / "critic", config, critic)
    _, reloaded = hf.load(tmp_path / "critic", head="value")
    jax.tree.map(np.testing.assert_array_equal, reloaded, critic)
    with pytest.raises(ValueError, match=r"lacks 2 of .*score\.bias.*use critic_from_policy"):
        hf.load(tmp_path / "in", head="value")


def edit_config(folder: Path, **changes: object) -> None:
    raw = json.loads((folder / "config.json").read_text())
    raw = {key: value for key, value in (raw | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize(
    ("changes", "theta"),
    [
        ({"rope_parameters": ..., "rope_theta": 5e5}, 5e5),  # transformers before 5
        ({"rope_parameters": ..., "rope_theta": 5e5, "rope_scaling": None}, 5e5),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 2e4}}, 2e4),
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": 3e4}, 3e4),
        ({"rope_parameters": ...}, 1e4),  # transformers' default
    ],
)
def test_rope_theta_is_found_wherever_transformers_wrote_it(changes: dict, theta: float, tmp_path: Path) -> None:
    edit_config(golden_models.write("gqa_tied", tmp_path), **changes)
    assert hf.read_config(tmp_path).rope_theta == theta


def test_head_dim_and_kv_heads_may_be_left_out(tmp_path: Path) -> None:
    edit_config(golden_models.write("mha_untied", tmp_path), head_dim=..., num_key_value_heads=...)
    config = hf.read_config(tmp_path)
    assert (config.head_dim, config.kv_heads) == (16, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "'model_type': 'llama'"),
        ({"model_type": ...}, "'model_type': None"),
        ({"hidden_act": "gelu"}, "'hidden_act': 'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "'rope scaling': {'rope_type': 'yarn'"),
        (
            {"rope_parameters": ..., "rope_scaling": {"type": "linear", "factor": 2}},
            "'rope scaling': {'type': 'linear'",
        ),
        ({"use_sliding_window": True}, "'use_sliding_window': True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "'layer_types': {'sliding_attention'}"),
        ({"quantization_config": {"bits": 4}}, "'quantization_config'"),
        ({"hidden_size": ...}, "lacks ['hidden_size']"),
    ],
)
def test_a_model_that_is_not_implemented_is_refused(changes: dict, message: str, tmp_path: Path) -> None:
    edit_config(golden_models.write("gqa_tied", tmp_path), **changes)
    with pytest.raises(ValueError) as error:
        hf.load(tmp_path)
    assert message in str(error.value)


def test_weights_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no model at .*nowhere.*config\.json is missing"):
        hf.load(tmp_path / "nowhere")

    folder = golden_models.write("gqa_tied", tmp_path / "model")
    tensors = golden_models.hf_tensors("gqa_tied")

    def refused(changed: dict[str, np.ndarray], message: str) -> None:
        save_file(changed, folder / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            hf.load(folder)

    without = {k: v for k, v in tensors.items() if k != "model.norm.weight"}
    refused(without, r"lacks 1 of 38 tensors, the first: \['model\.norm\.weight'\]")
    refused(tensors | {"model.layers.0.self_attn.q_norm.weight": np.ones(10)}, r"1 tensors that a Qwen2 doesn't have")
    refused(
        tensors | {"model.norm.weight": np.ones(41, np.float32)}, r"norm\.weight of shape \(41,\) does not fit \(40,\)"
    )
    turned = np.ascontiguousarray(tensors["model.layers.1.mlp.up_proj.weight"].T)
    refused(
        tensors | {"model.layers.1.mlp.up_proj.weight": turned}, r"up_proj\.weight of shape \(40, 72\) does not fit"
    )

    (folder / "model.safetensors").write_bytes(b"half a file")
    with pytest.raises(ValueError, match="damaged or not a safetensors file"):
        hf.load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="has no weights"):
        hf.load(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    config, params = hf.load(golden_models.write("gqa_tied", tmp_path / "in"))
    hf.save(tmp_path / "out", config, params, shard_bytes=15_000)
    next((tmp_path / "out").glob("model-00002-*")).unlink()
    with pytest.raises(ValueError, match=r"is incomplete: .* names \['model-00002-of-"):
        hf.load(tmp_path / "out")


def test_a_stored_head_of_a_tied_model_is_ignored_as_transformers_does(tmp_path: Path) -> None:
    folder = golden_models.write("gqa_tied", tmp_path)
    tensors = golden_models.hf_tensors("gqa_tied")
    save_file(tensors | {"lm_head.weight": np.zeros((97, 40), np.float32)}, folder / "model.safetensors")
    _, params = hf.load(folder)
    assert "lm_head" not in params
