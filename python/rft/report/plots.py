"""Plots of a run as SVG text for inlining: text stays text, and colours follow the page's light or dark scheme."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rft.report.units import rate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Matplotlib is given colours that nothing else uses; in the SVG each becomes the page's own variable.
INK, MUTED, LINE = "#010203", "#010204", "#010205"
SERIES = ("#010301", "#010302", "#010303", "#010304", "#010305", "#010306")
_VARIABLES = {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    LINE: "var(--line)",
    **{colour: f"var(--series-{number})" for number, colour in enumerate(SERIES, 1)},
}
WIDTH_INCHES, HEIGHT_INCHES = 5.6, 2.5

_STYLE: Any = {
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.edgecolor": LINE,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "text.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.labelcolor": MUTED,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
}


def draw(name: str, title: str, paint: Callable[[Axes], None], *, label: str, x_label: str = "step") -> str:
    """One plot as an `<svg>` element. name: makes its ids unique on the page. label: what it shows, for screen readers."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    # no pyplot: it would pick a backend of the machine and keep the figure alive
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        axes.set_title(title)
        axes.set_xlabel(x_label)
        paint(axes)
        if axes.get_legend_handles_labels()[0]:
            # below the axes, where the layout makes room for it: beside the title it covers a long one
            figure.legend(loc="outside lower left", ncols=5, borderaxespad=0.2, handlelength=1.4, columnspacing=1.4)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _inline(out.getvalue(), name, label)


def _inline(svg: str, name: str, label: str) -> str:
    """Strip what belongs to a file of its own, make ids unique, and hand the colours to the page."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    # groups that nothing refers to: their ids repeat in every figure
    svg = re.sub(r'<g id="(?:figure|axes|patch|line2d|text|matplotlib\.axis|legend|xtick|ytick|\w+?)_\d+"', "<g", svg)
    svg = re.sub(
        r'<svg [^>]*?viewBox="([^"]+)"[^>]*>', rf'<svg viewBox="\1" role="img" aria-label="{label}">', svg, count=1
    )
    svg = svg.replace("xlink:href", "href")
    # the page's font, at the size that matplotlib laid out for
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    svg = re.sub(r"font: (bold|700) ([\d.]+)px [^;\"]*", r"font-weight: 600; font-size: \2px", svg)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, variable)
    return f'<figure class="plot" id="plot-{name}">{svg.strip()}</figure>'


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Centred running mean; at the ends over what there is."""
    half = window // 2
    return [sum(part) / len(part) for i in range(len(values)) if (part := values[max(0, i - half) : i + half + 1])]


def line_over_steps(
    name: str,
    title: str,
    curves: Sequence[tuple[str, Sequence[float], Sequence[float]]],
    *,
    label: str,
    from_zero: bool,
) -> str:
    """Values over steps. curves: (legend or "", steps, values) each."""

    def paint(axes: Axes) -> None:
        for number, (legend, steps, values) in enumerate(curves):
            # a run of one logged step has a point, not an invisible line
            marker = "o" if len(steps) == 1 else None
            axes.plot(steps, values, color=SERIES[number], label=legend or None, marker=marker, markersize=4)
        if from_zero:
            _from_zero(axes, max(max(values) for _, _, values in curves))
        if max(max(abs(v) for v in values) for _, _, values in curves) < 0.01:
            axes.yaxis.set_major_formatter(lambda value, _: rate(value))
        elif max(max(values) for _, _, values in curves) >= 1000:
            axes.yaxis.set_major_formatter("{x:,.0f}")
        _step_axis(axes)

    return draw(name, title, paint, label=label)


def loss(train: tuple[Sequence[float], Sequence[float]], held_out: tuple[Sequence[float], Sequence[float]]) -> str:
    """Train loss, faint as logged and strong as a running mean, and held-out loss with a dot where it was measured."""

    def paint(axes: Axes) -> None:
        steps, values = train
        window = max(1, len(values) // 20)
        if window > 2:
            axes.plot(steps, values, color=SERIES[0], alpha=0.3, linewidth=0.9)
            axes.plot(
                steps, smooth(values, window), color=SERIES[0], label=f"train, mean of {window // 2 * 2 + 1} steps"
            )
        elif steps:
            axes.plot(steps, values, color=SERIES[0], label="train", marker="o" if len(steps) == 1 else None)
        if held_out[0]:
            axes.plot(*held_out, color=SERIES[1], marker="o", markersize=4, label="held-out")
        _step_axis(axes)

    return draw("loss", "Loss per label token (nats)", paint, label="Loss over steps, train and held-out")


def stacked(name: str, title: str, steps: Sequence[float], parts: Mapping[str, Sequence[float]], *, label: str) -> str:
    """Values that add up, over steps."""

    def paint(axes: Axes) -> None:
        axes.stackplot(steps, *parts.values(), labels=list(parts), colors=SERIES[: len(parts)], alpha=0.75, linewidth=0)
        _from_zero(axes, max(map(sum, zip(*parts.values(), strict=True))))
        _step_axis(axes)

    return draw(name, title, paint, label=label)


def histogram(name: str, title: str, edges: Sequence[float], counts: Sequence[int], *, label: str, x_label: str) -> str:
    """Bars of counts between edges (one more than counts)."""

    def paint(axes: Axes) -> None:
        widths = [right - left for left, right in pairwise(edges)]
        axes.bar(
            edges[:-1], counts, width=[0.94 * w for w in widths], align="edge", color=SERIES[0], alpha=0.85, linewidth=0
        )
        axes.set_xlim(edges[0], edges[-1])
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_major_formatter("{x:,.0f}")

    return draw(name, title, paint, label=label, x_label=x_label)


def _from_zero(axes: Axes, top: float) -> None:
    """The axis starts at zero, so that heights compare; a constant curve stays clear of the upper edge."""
    axes.set_ylim(0, 1.1 * top if top > 0 else 1)


def _step_axis(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    axes.margins(x=0.015)
