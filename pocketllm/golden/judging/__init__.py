"""From cases to judged rows: who is asked, what a divergence really is, and what it is called."""
