"""FedAvg of FedJAX, written as its tutorials write it.

``jit`` is its default; ``pmap`` trains a client a device, with as many host devices as cores.
"""

from __future__ import annotations

import os

from contract import Run

RUN = Run(("jit", "pmap"), ("fedjax", "jax", "dm-haiku"))
if RUN.variant == "pmap":  # JAX reads these as it starts
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={os.cpu_count()}"
    os.environ["JAX_PMAP_NO_RANK_REDUCTION"] = "0"  # FedJAX expects a device's part to lack the axis of devices

import fedjax  # noqa: E402
import haiku as hk  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402


def scores(batch: dict[str, jax.Array]) -> jax.Array:
    """The workload's model."""
    x = batch["x"]
    if RUN.workload.model == "cnn":
        for width in (32, 64):
            x = jax.nn.relu(hk.Conv2D(width, 5, padding="SAME")(x))
            x = hk.MaxPool((2, 2, 1), (2, 2, 1), "VALID")(x)
        x = hk.Flatten()(x)
    for width in {"mlp64": (32,), "mlp784": (200, 200), "cnn": (512,)}[RUN.workload.model]:
        x = jax.nn.relu(hk.Linear(width)(x))
    return hk.Linear(RUN.workload.classes)(x)


def main() -> None:
    """One run."""
    workload = RUN.workload
    model = fedjax.create_model_from_haiku(
        hk.transform(scores),
        {"x": workload.x[:1], "y": workload.y[:1]},
        lambda batch, scores: fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], scores),
    )
    rows = {b"%06d" % i: {"x": workload.x[at], "y": workload.y[at]} for i, at in enumerate(workload.spans)}
    clients = fedjax.InMemoryFederatedData(rows)
    with fedjax.for_each_client_backend(RUN.variant):
        algorithm = fedjax.algorithms.fed_avg.federated_averaging(
            grad_fn=fedjax.model_grad(model),
            client_optimizer=fedjax.optimizers.sgd(workload.lr),
            server_optimizer=fedjax.optimizers.sgd(1.0),
            client_batch_hparams=fedjax.ShuffleRepeatBatchHParams(batch_size=workload.batch, num_epochs=1),
        )
    first = model.init(jax.random.PRNGKey(0))
    state = algorithm.init(first)
    for key in jax.random.split(jax.random.PRNGKey(1), RUN.rounds):
        keys = jax.random.split(key, len(workload.sizes))
        cohort = [(name, rows, key) for (name, rows), key in zip(clients.get_clients(rows), keys)]
        state, diagnostics = algorithm.apply(state, cohort)
        jax.block_until_ready((state, diagnostics))
        RUN.round_ended()

    @jax.jit
    def total_loss(params, x, y):
        batch = {"x": x, "y": y}
        return model.train_loss(batch, model.apply_for_train(params, batch, None)).sum()

    def mean_loss(params) -> float:
        batches = [(workload.x[i : i + 100], workload.y[i : i + 100]) for i in range(0, len(workload.x), 100)]
        return float(np.sum([total_loss(params, x, y) for x, y in batches])) / len(workload.x)

    RUN.report(mean_loss(first), mean_loss(state.params))


if __name__ == "__main__":
    main()
