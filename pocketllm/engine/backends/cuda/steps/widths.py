"""How wide captured decode steps are; read without torch."""

WIDTHS = (1, 2, 4, 8, 16, 24, 32)
"""Numbers of sequences that decode steps are captured for; a step takes the next one up, its spare rows change
nothing."""
