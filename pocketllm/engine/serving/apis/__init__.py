"""What is answered at each address, and the APIs that are written from a chat."""
