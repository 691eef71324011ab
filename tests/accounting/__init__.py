"""What a run of the tests is held to beyond its own asserts: reasons of skips, and the list of known failures."""
