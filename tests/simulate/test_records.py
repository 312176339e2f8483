"""What is written down of a state at the end of a round."""

from __future__ import annotations

import numpy as np
import pytest

from fedjax_pers.simulate.records import clusters
from tests import toys


@pytest.mark.parametrize(
    ("aux", "members", "empty"),
    [
        ({"counts": np.array([1, 0, 0])}, [2, 0, 1], [1]),  # IFCA's last round had one client
        ({"clusters": np.array(4), "made": np.array([0, 1, 2, 2, -1])}, [2, 0, 1, 0], [1, 3]),
    ],
)
def test_clusters_that_collapsed_are_named(aux, members, empty):
    algorithm = toys.every_method("fedavg")
    state = toys.start(algorithm, 5)
    assert clusters(state) == {}
    found = clusters(state._replace(aux=aux | {"members": np.array([0, 2, -1, 0, -1])}))
    assert found == {"clusters": {"members": members, "empty": empty, "clients_without": 2}}
