"""Adapters: small leaves beside those of any model, as transforms of a task."""

from fedjax_pers.adapters.adapting import starting_from
from fedjax_pers.adapters.bottleneck import bottleneck
from fedjax_pers.adapters.low_rank import FACTOR_A, FACTOR_B, Slot, lora, scale_of, slots

__all__ = ["FACTOR_A", "FACTOR_B", "Slot", "bottleneck", "lora", "scale_of", "slots", "starting_from"]
