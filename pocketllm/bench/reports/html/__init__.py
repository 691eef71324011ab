"""One page that explains a record by itself."""
