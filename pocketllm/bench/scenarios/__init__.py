"""One file a scenario: what a slot asks of its target."""
