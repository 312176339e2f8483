"""Generators: small networks that make leaves of a model."""

from fedjax_pers.generators.networks import Generator, mlp

__all__ = ["Generator", "mlp"]
