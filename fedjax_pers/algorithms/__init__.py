"""One file a paper; :func:`methods` lists them."""

from fedjax_pers.algorithms.registry import Method, method, methods, register

__all__ = ["Method", "method", "methods", "register"]
