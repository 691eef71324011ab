"""Is B faster than A, on this machine, today?"""
