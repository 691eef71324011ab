"""The whole inference engine."""
