"""The picture of README.md: what is replaced by what, for light and dark pages.

Write docs/img/surgery-light.svg and surgery-dark.svg again after a change: `python tests/helpers/picture.py`.
tests/repo/test_docs.py compares them.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "img"
WIDTH, HEIGHT = 960, 424
SIDE = 144  # of a square matrix, in pixels
TOKENS = 16  # rows of the score matrices
WINDOW = 3
LEAF = 2  # tokens of the smallest block of the log-linear part
COLORS = {
    "light": {"text": "#1f2328", "soft": "#59636e", "line": "#d1d9e0", "old": "#8c959f", "near": "#cf222e", "far": "#0969da", "core": "#1a7f37"},
    "dark": {"text": "#f0f6fc", "soft": "#9198a1", "line": "#3d444d", "old": "#656c76", "near": "#ff7b72", "far": "#58a6ff", "core": "#3fb950"},
}  # fmt: skip
Palette = dict[str, str]


def rectangle(x: float, y: float, width: float, height: float, fill: str, opacity: float = 1.0) -> str:
    """Return a filled rectangle."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" fill-opacity="{opacity:g}"/>'


def label(
    x: float, y: float, text: str, fill: str, size: int = 14, anchor: str = "middle", weight: str = "normal"
) -> str:
    """Return a line of text."""
    return (
        f'<text x="{x:g}" y="{y:g}" fill="{fill}" font-size="{size}" text-anchor="{anchor}" '
        f'font-weight="{weight}">{text}</text>'
    )


def arrow(x: float, y: float, fill: str) -> str:
    """Return an arrow to the right that begins at (x, y)."""
    return f'<path d="M{x:g} {y - 3:g}h34v-7l14 10l-14 10v-7h-34z" fill="{fill}"/>'


def softmax_scores(x: float, y: float, colors: Palette) -> list[str]:
    """Return the score matrix of softmax attention: every query scores every earlier token."""
    cell = SIDE / TOKENS
    return [
        rectangle(x + cell * s, y + cell * t, cell - 1, cell - 1, colors["old"])
        for t in range(TOKENS)
        for s in range(t + 1)
    ]


def hybrid_scores(x: float, y: float, colors: Palette) -> list[str]:
    """Return the mask of log-linear attention beside a window: exact near tokens, blocks that double with the
    distance.
    """
    cell, drawn = SIDE / TOKENS, []
    for t in range(TOKENS):
        start = max(0, t - WINDOW + 1)
        drawn += [
            rectangle(x + cell * s, y + cell * t, cell - 1, cell - 1, colors["near"]) for s in range(start, t + 1)
        ]
        end = start // LEAF * LEAF  # tokens in whole leaves
        if start > end:
            drawn.append(rectangle(x + cell * end, y + cell * t, cell * (start - end) - 1, cell - 1, colors["far"]))
        place = 0
        for level in reversed(range(5)):  # the set bits of the number of tokens: the states of the Fenwick tree
            size = LEAF << level
            if end - place >= size:
                opacity = 0.9 - 0.2 * level
                drawn.append(
                    rectangle(x + cell * place, y + cell * t, cell * size - 1, cell - 1, colors["far"], opacity)
                )
                place += size
    return drawn


def dense_weight(x: float, y: float, colors: Palette) -> list[str]:
    """Return a dense matrix."""
    return [rectangle(x, y, SIDE, SIDE, colors["old"])]


def factors(x: float, y: float, colors: Palette) -> list[str]:
    """Return two factors of low rank, and the two block cores of a block tensor train."""
    thin, gap, half = SIDE / 5, 10, SIDE * 0.62
    drawn = [rectangle(x, y, thin, SIDE, colors["core"]), rectangle(x + thin + gap, y, half, thin, colors["core"])]
    left, top, block = x + thin + 2 * gap + half + 24, y, SIDE / 4
    for place in range(4):
        drawn.append(rectangle(left + place * block, top + place * block, block - 2, block - 2, colors["core"]))
    left += SIDE + gap
    for row in range(4):
        for column in range(4):
            shade = 0.9 if row == column else 0.35
            drawn.append(
                rectangle(left + column * block, top + row * block, block - 2, block / 3, colors["core"], shade)
            )
    return drawn


def draw(theme: str) -> str:
    """Return the picture as SVG."""
    colors = COLORS[theme]
    top, bottom = 62, 244
    old, new = 150, 372
    parts = [
        label(old + SIDE / 2, 26, "a pretrained transformer", colors["soft"]),
        label(new + SIDE * 1.6, 26, "after surgery: fitted to the original, healed by distillation", colors["soft"]),
        label(16, top + 66, "attention", colors["text"], 17, "start", "bold"),
        label(16, top + 88, "softmax(QKᵀ) V", colors["soft"], 13, "start"),
        label(16, bottom + 66, "linears", colors["text"], 17, "start", "bold"),
        label(16, bottom + 88, "y = W x", colors["soft"], 13, "start"),
        *softmax_scores(old, top, colors),
        arrow(old + SIDE + 14, top + SIDE / 2, colors["soft"]),
        *hybrid_scores(new, top, colors),
        *dense_weight(old, bottom, colors),
        arrow(old + SIDE + 14, bottom + SIDE / 2, colors["soft"]),
        *factors(new, bottom, colors),
        rectangle(new + SIDE + 26, top + 22, 12, 12, colors["near"]),
        label(new + SIDE + 46, top + 33, "near tokens: exact softmax", colors["text"], 14, "start"),
        rectangle(new + SIDE + 26, top + 50, 12, 12, colors["far"]),
        label(
            new + SIDE + 46, top + 61, "distant tokens: log2 T states in place of T keys", colors["text"], 14, "start"
        ),
        label(new + SIDE + 26, top + 97, "or one state (Gated DeltaNet, SSD, TBM),", colors["soft"], 13, "start"),
        label(
            new + SIDE + 26, top + 117, "or fewer score dimensions for distant keys (MLR)", colors["soft"], 13, "start"
        ),
        label(new + 66, bottom + SIDE + 22, "low rank", colors["text"], 13),
        label(new + 310, bottom + SIDE + 22, "block tensor train", colors["text"], 13),
        label(new + 486, bottom + 52, "or Monarch,", colors["soft"], 13, "start"),
        label(new + 486, bottom + 72, "Kronecker,", colors["soft"], 13, "start"),
        label(new + 486, bottom + 92, "MLR", colors["soft"], 13, "start"),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="-apple-system, Segoe UI, Helvetica, Arial, sans-serif" role="img" '
        'aria-label="Softmax attention is replaced by exact attention to near tokens and few states for distant ones; '
        "dense weights "
        'by structured factors">\n' + "\n".join(parts) + "\n</svg>\n"
    )


def main() -> None:
    """Write both files."""
    for theme in COLORS:
        (FOLDER / f"surgery-{theme}.svg").write_text(draw(theme), encoding="utf-8")


if __name__ == "__main__":
    main()
