"""The built-in agent: one conversation at a time, request by request."""
