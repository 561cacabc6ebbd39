"""HTTP API on top of the engine, and a chat page."""
