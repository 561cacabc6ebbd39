"""A built-in corpus of simple English: stories, questions about them, sums, spelling, opposites, small talk."""
