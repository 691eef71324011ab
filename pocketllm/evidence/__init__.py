"""Run records: schema, provenance, store, and the ladder computed from them."""
