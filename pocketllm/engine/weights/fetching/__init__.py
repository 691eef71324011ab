"""How a checkpoint gets here: out of packages of a Python index, or from the Hugging Face hub."""

FETCHING = "fetching "
"""How the line of progress begins that says what is fetched: those who show no other line show this one."""
