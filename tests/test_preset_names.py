"""What presets make of the names of leaves and layers alone, and of the types of layers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fedjax_pers.paths import Model, Selector, select
from fedjax_pers.presets import adapter, attention, bias, embedding, feed_forward, lora, norm, norm_statistics, places


@pytest.mark.parametrize(
    "name", "bn bn1 ln_f norm norm_0 LayerNorm_3 final_norm norm_hidden FrozenBatchNorm_1 gn2a rms_norm".split()
)
def test_names_of_norms(name: str) -> None:
    assert select(norm(), {f"net/{name}/scale": 0}) == {f"net/{name}/scale"}


@pytest.mark.parametrize(
    "name", "normal_dense dense abnormal spectral_norm SpectralNorm_0 WeightNorm_0 lane kernel_norms".split()
)
def test_names_of_no_norms(name: str) -> None:
    assert select(norm(), {f"net/{name}/scale": 0}) == frozenset()


@pytest.mark.parametrize(
    "kind", "BatchNorm BatchNorm1d LayerNorm RMSNorm SyncBN InstanceNorm EvoNormS0 BatchNormalization".split()
)
def test_types_of_norms(kind: str) -> None:
    assert select(norm(), {"net/dense/w": 0}, Model(kinds=(("net", "Net"), ("net/dense", kind)))) == {"net/dense/w"}


def test_names_of_statistics() -> None:
    statistics = {"bn/~/mean_ema/average": 0, "bn1/running_mean": 0, "norm/var": 0, "batch_norm/moving_variance": 0}
    others = {"bn/scale": 0, "dense/mean": 0, "norm/variation": 0}
    assert select(norm_statistics(), statistics | others) == set(statistics)


def test_a_norm_type_covers_its_own_leaves_and_not_those_of_layers_within() -> None:
    leaves = {"pre/norm/scale": 0, "pre/dense/kernel": 0, "pre/scale": 0}
    kinds = (("pre", "PreNorm"), ("pre/dense", "Dense"), ("pre/norm", "Identity"))
    assert select(norm(), leaves, Model(kinds=kinds)) == {"pre/scale"}


@pytest.mark.parametrize(
    ("path", "preset"),
    {
        "block1/attention/query/kernel": attention,
        "self_attn/c_proj/w": attention,
        "MultiHeadDotProductAttention_0/out/bias": attention,
        "block1/feed_forward/up/kernel": feed_forward,
        "ffn2/w": feed_forward,
        "encoder/MlpBlock_3/Dense_0/kernel": feed_forward,
        "block1/adapter_1/down/kernel": adapter,
        "dense/lora_a": adapter,
        "block1/norm_attention/scale": None,
        "block1/attention_norm/scale": None,
        "block1/ln_ffn/scale": None,
        "attentive/kernel": None,
        "forward/kernel": None,
        "adapted/kernel": None,
    }.items(),
)
def test_names_of_modules(path: str, preset: Callable[[], Selector] | None) -> None:
    found = [each for each in (attention, feed_forward, adapter) if select(each(), {f"params/{path}": 0})]
    assert found == ([preset] if preset else [])


def test_modules_by_type_are_found_below_any_collection() -> None:
    leaves = {"params/odd/dense/kernel": 0, "batch_stats/odd/norm/mean": 0, "params/other/kernel": 0}
    kinds = (("params/odd", "SelfAttention"), ("params/odd/dense", "Dense"))
    assert select(attention(), leaves, Model(kinds=kinds)) == {"params/odd/dense/kernel", "batch_stats/odd/norm/mean"}


@pytest.mark.parametrize(
    ("path", "found"),
    {
        "lora_a": True,
        "dense/lora_B": True,
        "dense/lora/a": True,
        "lora/down/kernel": True,
        "dense/lora_a/kernel": True,
        "LoRA_0/b": True,
        "lora_linear/kernel": False,
        "lora/base_module/kernel": False,
        "explora/a": False,
        "dense/kernel": False,
    }.items(),
)
def test_names_of_low_rank_factors(path: str, found: bool) -> None:
    leaves = {f"net/{path}": 0}
    assert select(lora(), leaves) == frozenset(leaves if found else ())
    assert select(bias(), leaves) == frozenset()


@pytest.mark.parametrize(
    ("path", "found"),
    {
        "embed/kernel": True,
        "token_embedding/weight": True,
        "wte/w": True,
        "pos_embedding": True,
        "Embed_0/embedding": True,
        "embedded/kernel": False,
        "embed_dense/kernel": False,
    }.items(),
)
def test_names_of_embeddings(path: str, found: bool) -> None:
    leaves = {f"net/{path}": 0}
    assert select(embedding(), leaves) == frozenset(leaves if found else ())


@pytest.mark.parametrize(
    ("name", "found"), {"bias": 1, "b": 1, "b_2": 1, "bias_ih_l0": 1, "out_bias": 1, "base": 0, "beta2": 0}.items()
)
def test_names_of_biases(name: str, found: int) -> None:
    assert len(select(bias(), {f"net/{name}": 0})) == found


def test_places() -> None:
    assert places(["params/kernel", "params/a/b/kernel", "batch_stats/a/mean"]) == {
        "params/kernel": ("params", "", "kernel"),
        "params/a/b/kernel": ("params", "a/b", "kernel"),
        "batch_stats/a/mean": ("batch_stats", "a", "mean"),
    }
    assert places(["a/kernel/value", "b/value"]) == {"a/kernel/value": ("", "a", "kernel"), "b/value": ("", "", "b")}
    assert places(["a/value", "a/kernel"])["a/value"] == ("", "a", "value")
