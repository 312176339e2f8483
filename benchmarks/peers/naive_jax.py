"""FedAvg as a careful user of JAX writes it without a framework: one compiled round, clients padded to the largest.

``scan`` trains one client after another, ``vmap`` all at once. The models are ordinary Flax modules.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from contract import Run, Workload
from flax import linen as nn


class Mlp(nn.Module):
    widths: tuple[int, ...]
    classes: int

    @nn.compact
    def __call__(self, x):
        for width in self.widths:
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(self.classes)(x)


class Cnn(nn.Module):
    classes: int

    @nn.compact
    def __call__(self, x):
        for width in (32, 64):
            x = nn.max_pool(nn.relu(nn.Conv(width, (5, 5))(x)), (2, 2), strides=(2, 2))
        x = nn.relu(nn.Dense(512)(x.reshape(len(x), -1)))
        return nn.Dense(self.classes)(x)


class ResNet8(nn.Module):
    classes: int

    @nn.compact
    def __call__(self, x):
        def conv(x, width, kernel=3, stride=1):
            x = nn.Conv(width, (kernel, kernel), (stride, stride), use_bias=False)(x)
            return nn.BatchNorm(use_running_average=False, momentum=0.9)(x)

        x = nn.relu(conv(x, 16))
        for width, stride in ((16, 1), (32, 2), (64, 2)):
            y = conv(nn.relu(conv(x, width, stride=stride)), width)
            x = nn.relu(y + (x if x.shape == y.shape else conv(x, width, 1, stride)))
        return nn.Dense(self.classes)(x.mean((1, 2)))


def build(workload: Workload) -> nn.Module:
    """The workload's model."""
    widths = {"mlp64": (32,), "mlp784": (200, 200)}
    if workload.model in widths:
        return Mlp(widths[workload.model], workload.classes)
    return {"cnn": Cnn, "resnet8": ResNet8}[workload.model](workload.classes)


def padded(workload: Workload) -> dict[str, np.ndarray]:
    """``[clients, rows, ...]``, rows a multiple of the batch; ``real`` marks those that count."""
    rows = -(-workload.sizes.max() // workload.batch) * workload.batch
    real = np.arange(rows) < workload.sizes[:, None]
    x, y = np.zeros((*real.shape, *workload.x.shape[1:]), np.float32), np.zeros(real.shape, np.int32)
    x[real], y[real] = workload.x, workload.y
    return {"x": x, "y": y, "real": real}


def main() -> None:
    """One run."""
    run = Run(("scan", "vmap"), ("jax", "flax", "optax"))
    workload, model = run.workload, build(run.workload)
    optimiser = optax.sgd(workload.lr)

    def loss(parameters, statistics, batch):
        scores, changed = model.apply({"params": parameters, **statistics}, batch["x"], mutable=["batch_stats"])
        losses = optax.softmax_cross_entropy_with_integer_labels(scores, batch["y"])
        return (losses * batch["real"]).sum() / jnp.maximum(batch["real"].sum(), 1), changed

    def train(shared, client, key):
        order = jnp.argsort(jnp.where(client["real"], jax.random.uniform(key, client["real"].shape), 2))
        batches = jax.tree.map(lambda field: field[order].reshape(-1, workload.batch, *field.shape[1:]), client)

        def step(carry, batch):
            parameters, statistics, state = carry
            gradients, statistics = jax.grad(loss, has_aux=True)(parameters, statistics, batch)
            updates, state = optimiser.update(gradients, state)
            return (optax.apply_updates(parameters, updates), statistics, state), None

        parameters, statistics = shared
        (*trained, _), _ = jax.lax.scan(step, (parameters, statistics, optimiser.init(parameters)), batches)
        return tuple(trained)

    def scan_round(shared, clients, weights, key):
        def add(total, one):
            client, weight, key = one
            trained = train(shared, client, key)
            return jax.tree.map(lambda a, b: a + weight * b, total, trained), None

        keys = jax.random.split(key, len(weights))
        return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, shared), (clients, weights, keys))[0]

    def vmap_round(shared, clients, weights, key):
        trained = jax.vmap(train, (None, 0, 0))(shared, clients, jax.random.split(key, len(weights)))
        return jax.tree.map(lambda leaves: jnp.tensordot(weights, leaves, 1), trained)

    clients = jax.tree.map(jnp.asarray, padded(workload))
    weights = jnp.asarray(workload.sizes / workload.sizes.sum(), jnp.float32)
    variables = jax.jit(model.init)(jax.random.key(0), clients["x"][0, :1])
    first = last = variables["params"], {name: leaf for name, leaf in variables.items() if name != "params"}
    one_round = jax.jit({"scan": scan_round, "vmap": vmap_round}[run.variant])
    for key in jax.random.split(jax.random.key(1), run.rounds):
        last = jax.block_until_ready(one_round(last, clients, weights, key))
        run.round_ended()
    mean_loss = jax.jit(lambda shared: weights @ jax.lax.map(lambda client: loss(*shared, client)[0], clients))
    run.report(float(mean_loss(first)), float(mean_loss(last)))


if __name__ == "__main__":
    main()
