"""N implementations; deliberately not one."""
