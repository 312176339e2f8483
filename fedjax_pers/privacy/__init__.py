"""Noise that is sized for what it is added to."""

from fedjax_pers.privacy.aggregator import private
from fedjax_pers.privacy.gaussian import Noise, private_mean

__all__ = ["Noise", "private", "private_mean"]
