"""Cache blocks and what keeps track of them."""
