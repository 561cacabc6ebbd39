"""Files of text for the tests of the data pipeline."""

import json


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
