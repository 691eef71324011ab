"""What people and programs read of goldens."""
