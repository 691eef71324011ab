"""From a record, or a plan, to what people read; never measures."""
