"""Questions to many records: frames, SQL, what differs, how a ratio moved over time, whether a file is whole."""
