"""From slot values to a verdict: estimates, intervals, validity, the words. Pure."""
