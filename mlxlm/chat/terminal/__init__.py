"""The chat in a terminal or over a pipe.

`repl.open_repl` opens a conversation, `screen.stream_answer` displays one answer.
"""
