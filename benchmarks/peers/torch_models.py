"""The workloads' models and data in PyTorch."""

from __future__ import annotations

import os

import numpy as np
import torch
from contract import Workload
from torch import Tensor, nn
from torch.nn import functional


def tensors(workload: Workload) -> tuple[Tensor, Tensor]:
    """All examples, images with their channels first, as PyTorch wants them."""
    x = np.moveaxis(workload.x, -1, 1) if workload.x.ndim == 4 else workload.x
    x = x.astype(np.int64) if np.issubdtype(x.dtype, np.integer) else x
    return torch.from_numpy(np.ascontiguousarray(x)), torch.from_numpy(workload.y.astype(np.int64))


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    def __init__(self, before: int, width: int, stride: int):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(before, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.shortcut = nn.Identity()
        if before != width:
            self.shortcut = nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.shortcut(x) + self.norm2(self.conv2(y)))


class Adapted(nn.Linear):
    """A dense layer without a bias that stays as it is, beside a product of two thin matrices that is trained."""

    def __init__(self, before: int, width: int, rank: int):
        super().__init__(before, width, bias=False)
        self.lora_a = nn.Parameter(torch.randn(rank, before) / before**0.5)
        self.lora_b = nn.Parameter(torch.zeros(width, rank))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + functional.linear(functional.linear(x, self.lora_a), self.lora_b)


class Layer(nn.Module):
    """Causal attention and a feed-forward part, each on what comes in normalised."""

    def __init__(self, width: int, heads: int, rank: int):
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.value = Adapted(width, width, rank), Adapted(width, width, rank)
        self.key, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        parts = (part(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value))
        mixed = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.relu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """``[batch, time]`` characters to scores ``[batch, characters, time]``; all but the adapters is frozen."""

    def __init__(self, characters: int, time: int, layers: int = 4, width: int = 128, heads: int = 4, rank: int = 8):
        super().__init__()
        self.places = nn.Parameter(torch.randn(time, width) * 0.02)
        self.embedding, self.norm = nn.Embedding(characters, width), nn.RMSNorm(width)
        self.layers = nn.Sequential(*(Layer(width, heads, rank) for _ in range(layers)))
        self.head = nn.Linear(width, characters, bias=False)
        for name, leaf in self.named_parameters():
            leaf.requires_grad_("lora" in name)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(self.embedding(x) + self.places)
        return self.head(self.norm(x)).transpose(1, 2)


def build(workload: Workload) -> nn.Module:
    """The model, with the same first parameters in every process."""
    torch.manual_seed(0)
    classes = workload.classes
    if workload.model == "transformer":
        return Transformer(classes, workload.x.shape[1])
    if workload.model == "cnn":
        first = [nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
        second = [nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
        dense = [nn.Flatten(), nn.Linear(7 * 7 * 64, 512), nn.ReLU(), nn.Linear(512, classes)]
        return nn.Sequential(*first, *second, *dense)
    if workload.model == "resnet8":
        stem = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
        blocks = [Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2)]
        return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))
    widths = {"mlp64": (64, 32), "mlp784": (784, 200, 200)}[workload.model]
    hidden = [layer for a, b in zip(widths, widths[1:]) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(widths[-1], classes))


def use_threads(workload: Workload, alone: bool) -> None:
    """A second thread helps convolutions, hinders small matrix products, and is in the way where other workers run."""
    torch.set_num_threads(os.cpu_count() if alone and not workload.model.startswith("mlp") else 1)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that are not frozen."""
    return {name: leaf for name, leaf in model.named_parameters() if leaf.requires_grad}


def averaged(model: nn.Module) -> list[Tensor]:
    """What a round averages: trained parameters, then running statistics."""
    return [*trained(model).values(), *(buffer for buffer in model.buffers() if buffer.is_floating_point())]


@torch.no_grad()
def put(model: nn.Module, values: list[Tensor]) -> nn.Module:
    """The model with those values in place of :func:`averaged`."""
    torch._foreach_copy_(averaged(model), values)
    return model


@torch.no_grad()
def mean_loss(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Over all examples; batches are normalised by themselves, as in training."""
    pairs = zip(x.split(100), y.split(100))
    return float(sum(functional.cross_entropy(model(a), b, reduction="sum") for a, b in pairs)) / y.numel()
