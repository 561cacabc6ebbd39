"""Chat: conversations rendered by the model's template, over one key-value cache."""
