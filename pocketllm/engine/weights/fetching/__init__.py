"""How a checkpoint gets here: out of packages of a Python index, or from the Hugging Face hub."""
