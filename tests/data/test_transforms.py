"""Planted rotations and noise, scaling, missing values."""

import numpy as np
import pytest

from fedjax_pers.data import from_clients, impute, noise, rotate, standardise


def images(count=2, shape=(4, 4), dtype=np.float32):
    size = count * int(np.prod(shape))
    return {"x": np.arange(size).reshape(count, *shape).astype(dtype), "y": np.zeros(count, int)}


def test_quarter_turns_are_exact_and_counter_clockwise():
    one = {"x": np.array([[[1.0, 2.0], [3.0, 4.0]]]), "y": [0]}
    federation = rotate(from_clients({k: {"train": one, "test": one} for k in range(5)}), [0, 90, 180, 270])
    turned = [federation.train.client(k)["x"][0].tolist() for k in range(5)]
    assert turned == [[[1, 2], [3, 4]], [[2, 4], [1, 3]], [[4, 3], [2, 1]], [[3, 1], [4, 2]], [[1, 2], [3, 4]]]
    assert federation.test.data["x"].tolist() == federation.train.data["x"].tolist()


@pytest.mark.parametrize(("shape", "dtype"), [((5, 5), np.float32), ((5, 5, 2), np.float32), ((5, 5, 1), np.uint8)])
def test_other_angles_turn_the_same_way(shape, dtype):
    federation = from_clients({0: images(3, shape, dtype)})
    near, exact = (rotate(federation, [angle]).train.data["x"] for angle in (90 - 1e-6, 90))
    assert near.dtype == exact.dtype == dtype
    inner = (slice(None), slice(1, 4), slice(1, 4))
    np.testing.assert_allclose(near[inner].astype(float), exact[inner].astype(float), atol=1e-3)


def test_a_dot_turned_by_45_degrees_lies_on_the_diagonal():
    image = np.zeros((1, 21, 21), np.float32)
    image[0, 10, 17] = 1  # 7 to the right of the middle; turned by 45 degrees: 4.95 to the right, 4.95 up
    turned = rotate(from_clients({0: {"x": image, "y": [0]}}), [45]).train.data["x"][0]
    assert np.unravel_index(turned.argmax(), turned.shape) == (5, 15)


def test_unseen_clients_are_turned_as_those_after_the_last():
    federation = from_clients({k: images(1) for k in range(4)}).with_unseen([1])
    turned = rotate(federation, [0, 0, 0, 180])
    assert np.array_equal(turned.train.data["x"], federation.train.data["x"])
    assert np.array_equal(turned.unseen.train.data["x"], federation.unseen.train.data["x"][:, ::-1, ::-1])


@pytest.mark.parametrize("degrees", [[], [0, 90, 180], [[0]], [float("nan")]])
def test_refuses_angles(degrees):
    with pytest.raises(ValueError, match="degrees: found .*expected 1 to 2 finite numbers"):
        rotate(from_clients({k: images() for k in range(2)}), degrees)


@pytest.mark.parametrize("shape", [(6,), (4, 5), (2, 2, 2, 2)])
def test_refuses_what_is_no_square_image(shape):
    with pytest.raises(ValueError, match="expected square images"):
        rotate(from_clients({0: images(2, shape)}), [90])


def test_noise_has_the_deviation_of_the_client_and_does_not_depend_on_others():
    clients = {k: {"x": np.zeros((4000, 1), np.float32), "y": np.zeros(4000, int)} for k in ("a", "b", "c")}
    noisy = noise(from_clients(clients), [0.0, 2.0, 0.5], seed=1)
    found = [noisy.train.client(k)["x"].std() for k in range(3)]
    np.testing.assert_allclose(found, [0, 2, 0.5], rtol=0.05)
    alone = noise(from_clients({"b": clients["b"]}), [2.0], seed=1)
    assert np.array_equal(alone.train.data["x"], noisy.train.client(1)["x"])
    moved = noise(from_clients(clients).with_unseen(["b"]), [0.0, 0.5, 2.0], seed=1)
    assert np.array_equal(alone.train.data["x"], moved.unseen.train.data["x"])
    assert not np.array_equal(
        noise(from_clients({"b": clients["b"]}), [2.0], seed=2).train.data["x"], alone.train.data["x"]
    )


def test_noise_refuses():
    whole = from_clients({0: {"x": [[1]], "y": [0]}})
    with pytest.raises(ValueError, match="std: found"):
        noise(whole, [-1.0])
    with pytest.raises(ValueError, match="found dtype int.*expected floats"):
        noise(whole, [1.0])


def test_standardise_by_hand():
    train = {"x": [[0.0, 5.0], [2.0, 5.0]], "y": [0, 1]}
    other = {"train": {"x": [[4.0, 5.0], [np.nan, 5.0]], "y": [0, 1]}, "test": {"x": [[2.0, 6.0]], "y": [0]}}
    federation = standardise(from_clients({"a": {"train": train}, "b": other}, allow_missing=True))
    step = np.sqrt(1.5)  # the known values 0, 2, 4: mean 2, deviation sqrt(8 / 3)
    np.testing.assert_allclose(federation.train.client(0)["x"], [[-step, 0], [0, 0]], rtol=1e-6)
    np.testing.assert_allclose(federation.train.client(1)["x"], [[step, 0], [np.nan, 0]], rtol=1e-6)
    assert federation.test.client(1)["x"].tolist() == [[0, 1]]


def test_impute_by_hand():
    nan = np.nan
    clients = {
        "a": {"train": {"x": [[1.0, nan], [3.0, nan]], "y": [0, 1]}, "test": {"x": [[nan, nan]], "y": [0]}},
        "b": {"train": {"x": [[nan, 7.0]], "y": [0]}, "test": {"x": [[5.0, nan]], "y": [0]}},
    }
    federation = from_clients(clients, allow_missing=True)
    filled = impute(federation)
    assert filled.train.data["x"].tolist() == [[1, 0], [3, 0], [0, 7]]
    assert filled.test.data["x"].tolist() == [[2, 0], [5, 7]]
    marked = impute(federation, indicator=True)
    assert marked.train.data["x"].tolist() == [[1, 0, 0, 1], [3, 0, 0, 1], [0, 7, 1, 0]]
    assert marked.test.data["x"].tolist() == [[2, 0, 1, 1], [5, 7, 0, 1]] and marked.validation.data["x"].shape == (
        0,
        4,
    )
    with pytest.raises(ValueError, match="expected one row of features each"):
        impute(from_clients({0: images()}))
