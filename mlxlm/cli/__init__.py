"""The command line: one file per family of commands. Each parses, calls the library and renders."""
