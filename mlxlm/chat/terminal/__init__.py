"""The chat in a terminal or over a pipe.

`repl.open_repl` opens a conversation, `stream_answer.stream_answer` displays one answer.
"""
