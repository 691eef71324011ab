"""How chat models mark up what they write: reasoning and tool calls, one file a family."""
