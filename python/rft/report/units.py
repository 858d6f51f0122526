"""Numbers as people read them: with a unit, at a sensible length, aligned where they stand in columns."""

from __future__ import annotations

import math


def count(value: float) -> str:
    """1310000 -> "1.31 M"; below 10,000 written out with a thousands comma."""
    if abs(value) < 10_000:
        return f"{value:,.0f}"
    for limit, unit, size in ((1e6, "k", 1e3), (1e9, "M", 1e6), (1e12, "B", 1e9), (math.inf, "T", 1e12)):
        # 999,950 would print as 1000 k: the next unit takes it
        if abs(value) < limit * 0.9995:
            return f"{significant(value / size)} {unit}"
    return str(value)


def significant(value: float, digits: int = 3) -> str:
    """`digits` significant digits without an exponent, never fewer than the integer part has."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    # the exponent after rounding: 0.9996 is 1.00, not 1.000
    exponent = int(f"{value:.{digits - 1}e}".split("e")[1])
    decimals = max(0, digits - 1 - exponent)
    return f"{value:,.{decimals}f}"


def gib(num_bytes: float) -> str:
    """Bytes -> "45.1 GiB"; MiB below a tenth of one, KiB below a MiB."""
    if num_bytes < 2**20:
        return f"{num_bytes / 2**10:.0f} KiB"
    if num_bytes < 0.1 * 2**30:
        return f"{num_bytes / 2**20:.0f} MiB"
    return f"{num_bytes / 2**30:.1f} GiB"


def duration(seconds: float) -> str:
    """Seconds -> "0.4 s", "38 s", "4 min 52 s" or "3 h 07 min"."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def rate(value: float) -> str:
    """Learning rates: "2e-4", "1.67e-4"."""
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def percent(share: float) -> str:
    """0.714 -> "71 %"; two digits after the point are for shares close to 0 or 1."""
    value = 100 * share
    if value in (0, 100) or 1 <= value <= 99:
        return f"{value:.0f} %"
    return f"{value:.1f} %"
