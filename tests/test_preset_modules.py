"""Presets by module and depth on a transformer with adapters."""

from __future__ import annotations

import jax

import fedjax_pers as fp
from fedjax_pers.paths import select
from fedjax_pers.presets import model_of


def test_depth_kind_and_adapters_of_a_transformer():
    """A small decoder: embedding, position, two blocks, a norm, the head."""
    example = (("x", (6,), "int32"), ("y", (6,), "int32"))
    task = fp.tasks.from_model(example, "char_transformer", num_classes=9, width=4, heads=2, hidden=8)
    adapted = fp.adapters.bottleneck(fp.adapters.lora(task, "**/attention/out", rank=2), "**/feed_forward/down", size=2)
    leaves = fp.flatten(jax.eval_shape(adapted.init, jax.random.key(0)))
    model = model_of(adapted)

    def layers_of(selector):
        return {path.removeprefix("params/").rpartition("/")[0] for path in select(selector, leaves, model)}

    blocks = ("block1", "block2")
    heads = {f"{block}/attention/{part}" for block in blocks for part in ("query", "key", "value", "out")}
    factors = {f"{block}/attention/out/lora_{factor}" for block in blocks for factor in "ab"}
    down = {f"{block}/feed_forward/down" for block in blocks}
    narrow = {f"{layer}/bottleneck_{part}" for layer in down for part in ("down", "bias", "up")}
    assert layers_of(fp.attention()) == heads | factors
    assert layers_of(fp.feed_forward()) == down | narrow | {f"{block}/feed_forward/up" for block in blocks}
    assert layers_of(fp.adapter()) == factors | narrow and layers_of(fp.lora()) == factors
    assert layers_of(fp.shallow()) == {"head"}
    assert layers_of(fp.deep()) == layers_of(fp.everything) - {"embedding"}
