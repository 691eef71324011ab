"""One step: gathered, launched, drawn from, collected."""
