"""What a slot is run against: one file a kind of target."""
