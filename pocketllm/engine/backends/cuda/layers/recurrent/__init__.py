"""Recurrent layers: short convolutions and delta rules, whose states lie in slots of GPU memory."""
