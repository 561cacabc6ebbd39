"""The evaluation suite: what a model knows of grammar and can do with its context, without a download."""
