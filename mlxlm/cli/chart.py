"""A line chart of characters, for terminals."""

from __future__ import annotations

from collections.abc import Sequence

# Bits of the eight dots of a braille character, by column and row from the top (Unicode block U+2800).
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))


def line_chart(points: Sequence[tuple[float, float]], width: int = 60, height: int = 10) -> list[str]:
    """Draw y over x with two by four dots a character, and the largest and smallest y at the left.

    Columns show the mean of the points that fall into them. Returns the lines; [] without points.
    """
    width = max(1, width)
    if not points:
        return []
    columns: list[list[float]] = [[] for _ in range(2 * width)]
    x_low, x_high = points[0][0], max(points[-1][0], points[0][0] + 1e-9)
    for x, y in points:
        columns[min(2 * width - 1, int((x - x_low) / (x_high - x_low) * 2 * width))].append(y)
    means = [sum(c) / len(c) if c else None for c in columns]
    known = [m for m in means if m is not None]
    low, high = min(known), max(known)
    cells = [[0] * width for _ in range(height)]
    for column, mean in enumerate(means):
        if mean is None:
            continue
        level = 0.0 if high == low else (high - mean) / (high - low)
        row = min(4 * height - 1, int(level * 4 * height))
        cells[row // 4][column // 2] |= _DOTS[column % 2][row % 4]
    labels = [f"{high:.2f}", *[""] * (height - 2), f"{low:.2f}"]
    pad = max(map(len, labels))
    return [
        f"{label:>{pad}} │" + "".join(chr(0x2800 + cell) for cell in row)
        for label, row in zip(labels, cells, strict=True)
    ]
