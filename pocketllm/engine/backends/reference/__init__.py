"""Plain torch, device-agnostic, obviously right: every other backend is held to it."""
