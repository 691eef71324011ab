"""Groups of operations; `ops` joins them."""
