"""Generators: small networks that make leaves of a model, on the server or with the client."""

from fedjax_pers.generators.generated import CODE_LEAF, GENERATOR_LEAVES, generated
from fedjax_pers.generators.networks import Generator, mlp

__all__ = ["CODE_LEAF", "GENERATOR_LEAVES", "Generator", "generated", "mlp"]
