"""From requests to accepted answers: record proposes, a person accepts."""
