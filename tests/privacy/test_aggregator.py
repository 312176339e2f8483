"""DP-FedAvg: what is clipped, how large the noise is and on what it lies; what cannot be combined with it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedjax_pers as fp
from fedjax_pers.aggregators import aggregate, fair, hypotheses, krum, mean, median, minimax, norm_clipping, tilted
from fedjax_pers.privacy import private
from tests import toys

WIDE = 50_000


def after(aggregator, uploads, key=0, start=0.0):
    """The shared leaves after one round of these uploads."""
    uploads = {name: jnp.asarray(x, jnp.float32) for name, x in uploads.items()}
    first = {name: jnp.full(x.shape[1:], start, jnp.float32) for name, x in uploads.items()}
    server = aggregator.init(first, frozenset(first), 4)
    server, info = jax.jit(lambda server: aggregate(aggregator, server, uploads, key=key))(server)
    return server.shared, info


def test_one_norm_over_all_leaves_and_a_constant_denominator():
    """Client 0 has norm 5 over both leaves and is cut to 1, client 1 has norm 0.5; three were expected."""
    aggregator = private(mean(), clip_norm=1.0, noise_multiplier=0.0, clients=3)
    found, _ = after(aggregator, {"a": [[3.0], [0.3]], "b": [[4.0], [0.4]]})
    np.testing.assert_allclose([found["a"][0], found["b"][0]], [(0.6 + 0.3) / 3, (0.8 + 0.4) / 3], rtol=1e-6)


def test_the_noise_of_a_round_and_of_one_without_anybody():
    """Standard deviation ``z C / clients`` a coordinate: 1.5 * 2 / 30 = 0.1."""
    aggregator = private(mean(), clip_norm=2.0, noise_multiplier=1.5, clients=30)
    everybody, _ = after(aggregator, {"w": np.zeros((2, WIDE))})
    nobody, info = after(aggregator, {"w": np.full((2, WIDE), np.nan)})
    assert info["rejected"].all()
    for found in (everybody["w"], nobody["w"]):
        values = np.asarray(found, float)
        assert abs(values.std() - 0.1) < 4 * 0.1 / np.sqrt(2 * WIDE)
        assert abs(values.mean()) < 4 * 0.1 / np.sqrt(WIDE)
    other, _ = after(aggregator, {"w": np.zeros((2, WIDE))}, key=1)
    assert abs(np.corrcoef(other["w"], everybody["w"])[0, 1]) < 4 / np.sqrt(WIDE)


def test_a_tighter_bound_of_the_aggregator_holds_too():
    found, _ = after(private(norm_clipping(0.25), clip_norm=1.0, noise_multiplier=0.0, clients=1), {"w": [[8.0]]})
    np.testing.assert_allclose(found["w"], [0.25], rtol=1e-6)


def test_clients_count_alike_whatever_their_size():
    algorithm = fp.compose(
        toys.softmax_regression(), aggregator=private(mean(), clip_norm=1.0, noise_multiplier=0.0, clients=2)
    )
    _, history = fp.run(algorithm, None, toys.federation((9, 3)), 1, evaluate_every=0)
    assert history.metrics.weight.tolist() == [[0.5, 0.5]]


def test_noise_needs_a_key():
    aggregator = private(mean(), clip_norm=1.0, noise_multiplier=1.0, clients=2)
    with pytest.raises(ValueError, match=r"key: found none, but this aggregator draws \(noise\)"):
        after(aggregator, {"w": np.zeros((2, 3))}, key=None)


def test_without_noise_and_bound_it_is_the_uniform_mean_with_any_server_optimiser():
    uploads = {"w": np.random.default_rng(0).normal(size=(4, 6))}
    for optimizer in (None, optax.sgd(0.5)):
        plain, _ = after(mean(optimizer, weights="uniform"), uploads)
        found, _ = after(private(mean(optimizer), clip_norm=1e9, noise_multiplier=0.0, clients=4), uploads)
        np.testing.assert_allclose(found["w"], plain["w"], rtol=1e-6)


def test_in_rounds_personal_leaves_have_no_noise_and_other_seeds_other_noise():
    federation = toys.federation((5, 3, 4))

    def run(noise, seed=0):
        algorithm = fp.compose(
            toys.softmax_regression(),
            layout=fp.by_role(personal="bias"),
            client=fp.train(0.1, steps=1),
            aggregator=private(mean(), clip_norm=0.1, noise_multiplier=noise, clients=3),
            secure_aggregation=True,
        )
        return fp.run(algorithm, None, federation, 1, seed, evaluate_every=0)[0]

    quiet, noisy, again = run(0.0), run(1.0), run(1.0)
    toys.same_bits(again, noisy)
    np.testing.assert_array_equal(quiet.rows["bias"], noisy.rows["bias"])
    assert not np.allclose(quiet.shared["kernel"], noisy.shared["kernel"])


@pytest.mark.parametrize(
    ("aggregator", "words"),
    [
        (krum(1), "must see each client's upload"),
        (median(), "must see each client's upload"),
        (hypotheses(2), "must see which model each client chose"),
        (minimax(), "must see each client's loss"),
        (tilted(1.0), "must see each client's loss"),
        (fair(1.0, 0.1), r"clients say \['loss'\] to it"),
    ],
    ids=["krum", "median", "ifca", "afl", "term", "qffl"],
)
def test_what_needs_single_clients_is_refused(aggregator, words):
    with pytest.raises(ValueError, match=words):
        private(aggregator, clip_norm=1.0, noise_multiplier=1.0, clients=10)


def test_a_sum_of_another_form_is_refused():
    odd = mean()._replace(lift=lambda weight, received, upload, sender: (upload, weight, weight))
    with pytest.raises(ValueError, match="aggregator: found one that adds up something else"):
        private(odd, clip_norm=1.0, noise_multiplier=1.0, clients=10).init({"w": jnp.zeros(2)}, frozenset({"w"}), 2)
    private(norm_clipping(1.0), clip_norm=1.0, noise_multiplier=1.0, clients=10).init(
        {"w": jnp.zeros(2)}, frozenset({"w"}), 2
    )


@pytest.mark.parametrize(("setting", "value"), [("clip_norm", 0.0), ("noise_multiplier", -1.0), ("clients", 0)])
def test_impossible_settings(setting, value):
    settings = {"clip_norm": 1.0, "noise_multiplier": 1.0, "clients": 10, setting: value}
    with pytest.raises(ValueError, match=f"{setting}: found"):
        private(mean(), **settings)
