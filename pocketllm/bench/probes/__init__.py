"""What scenarios without requests measure with: single operations, the machine's ceilings, its page cache."""
