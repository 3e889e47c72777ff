"""Draw line charts and stacked bars as inline SVG without script.

SVG classes take colours and dashes from the page's style, light or dark. A plotting library is missing in the
images of jobs, and its pictures would not follow the reader's colours and width. ElementTree escapes all
text.
"""

import itertools
import math
from dataclasses import dataclass
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import numpy as np

WIDTH, HEIGHT = 460, 260  # units; the page scales them, and keeps the text legible
RIGHT, TOP, BOTTOM = 16, 14, 42
_TICKS = 5  # approximate number on an axis, without the first
_DIGIT = 11.3  # width of a character of the labels on a phone
_GREATEST = 1e100  # greater values are gaps, like infinity
STYLES = 6  # colours and dashes of the page
_LOG_FROM = 300  # an axis is logarithmic from this ratio of greatest to least value
_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_CLOCK = ((86400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds"))
_numbers = itertools.count(1)


@dataclass
class Curve:
    """A curve.

    x, y: float64 [n]; NaN or infinite values are gaps
    style: index of colour and dash
    look: "", "strong" (thicker, and a dot at every point) or "faint"
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    style: int
    look: str = ""


@dataclass
class Mark:
    """A vertical line at x. text: explains it when the pointer is over it."""

    x: float
    text: str
    style: int


class Axis:
    """A map from values to positions between `low` and `high`, with ticks and their labels."""

    def __init__(self, values: np.ndarray, low: float, high: float, form: str):
        self.low, self.high, self.form = low, high, form
        least, greatest = float(values.min()), float(values.max())
        self.log = form == "number" and least > 0 and greatest / least > _LOG_FROM
        if self.log:
            bottom, top = math.floor(math.log10(least)), math.ceil(math.log10(greatest))
            every = math.ceil((top - bottom) / _TICKS)
            self.ticks = [10.0**power for power in range(bottom, top + 1, every)]
            self._ends = float(bottom), float(top)
            return
        if form in ("step", "clock") or least == greatest or 0 < least < 0.5 * greatest:
            least, greatest = min(least, 0.0), max(greatest, 0.0)
        span = greatest - least or 1.0
        self._step = step = _nice(span / _TICKS, whole=form == "step")
        bottom, top = math.floor(least / step + 1e-9), math.ceil(greatest / step - 1e-9)
        top = max(top, bottom + 1)
        self.ticks = [number * step for number in range(bottom, top + 1)]
        self._ends = bottom * step, top * step
        if form in ("step", "clock"):  # these axes end with the run
            self._ends = least, max(greatest, least + step / 2)
            self.ticks = [each for each in self.ticks if least <= each <= self._ends[1] + step * 1e-9]

    def __call__(self, values: np.ndarray | float) -> np.ndarray:
        """Return the positions of values."""
        first, last = self._ends
        values = np.log10(np.maximum(values, 1e-300)) if self.log else np.asarray(values)
        return self.low + (values - first) / (last - first) * (self.high - self.low)

    def label(self, value: float) -> str:
        """Return the text of a tick."""
        size = max(abs(self.ticks[0]), abs(self.ticks[-1]))
        if self.form == "percent" and size <= 10:
            return f"{value * 100:.{_decimals(self._step * 100)}f}%" if value else "0%"
        if self.log or not 1e-3 < size < 1e15:
            return format_short(value)
        for unit, letter in _UNITS:
            if size >= (10 if unit == 1e3 else 1) * unit:
                return f"{value / unit:.{_decimals(self._step / unit)}f}{letter}" if value else "0"
        return f"{value:.{_decimals(self._step)}f}" if value else "0"


def format_short(value: float) -> str:
    """Return a number in about six characters."""
    if value and not 1e-3 <= abs(value) < 1e15:
        digits, _, power = f"{value:.1e}".partition("e")
        return f"{digits.removesuffix('.0')}e{int(power)}"
    for unit, letter in _UNITS:
        if abs(value) >= unit:
            return f"{value / unit:.3g}{letter}"
    return f"{value:.3g}"


def choose_unit(seconds: float) -> tuple[float, str]:
    """Return the (seconds, name) of the unit for a duration."""
    return next((each for each in _CLOCK if seconds >= 2 * each[0]), _CLOCK[-1])


def _nice(step: float, whole: bool) -> float:
    """Return 1, 2 or 5 times a power of ten, at least `step`."""
    if not step > 0:
        return 1.0 if whole else 0.1
    power = 10.0 ** math.floor(math.log10(step))
    found = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * (1 - 1e-9))
    return max(found, 1.0) if whole else found


def _decimals(step: float) -> int:
    return max(0, -math.floor(math.log10(step) + 1e-9))


def draw_lines(
    title: str, about: str, curves: list[Curve], marks: list[Mark], x_name: str = "step", form: str = "number"
) -> str:
    """Return an SVG element; "" without a finite value.

    form: of the y axis: "number" (logarithmic for a wide range), "plain" (never logarithmic), "percent" or
    "step"
    """
    finite = [(np.abs(curve.x) < _GREATEST) & (np.abs(curve.y) < _GREATEST) for curve in curves]
    ys = np.concatenate([curve.y[good] for curve, good in zip(curves, finite, strict=True)] or [np.empty(0)])
    if not len(ys):
        return ""
    xs = np.concatenate([curve.x[good] for curve, good in zip(curves, finite, strict=True)])
    x_form = "step" if x_name == "step" else "clock"
    y_axis = Axis(ys, HEIGHT - BOTTOM, TOP, form)
    x_axis = Axis(xs, _left(y_axis), WIDTH - RIGHT, x_form)
    svg = _frame(title, about + (", logarithmic scale" if y_axis.log else ""))
    _axes(svg, y_axis, x_axis.low, x_name)
    for tick in x_axis.ticks:
        at = float(x_axis(tick))
        _add(svg, "path", d=f"M{at:.1f} {HEIGHT - BOTTOM}v5", class_="axis")
        _label(svg, at, HEIGHT - BOTTOM + 18, x_axis.label(tick), "middle" if at < WIDTH - 30 else "end")
    for mark in marks:
        if math.isfinite(mark.x):
            path = f"M{float(x_axis(mark.x)):.1f} {TOP - 6}V{HEIGHT - BOTTOM}"
            line = _add(svg, "path", d=path, class_=f"mark c{mark.style % STYLES}")
            _add(line, "title").text = mark.text
    for curve, good in zip(curves, finite, strict=True):
        look = f"c{curve.style % STYLES} d{curve.style % STYLES} {curve.look}"
        x, y = x_axis(curve.x), y_axis(np.where(good, curve.y, np.nan))
        _add(svg, "path", d=_path(x, y, good), class_=f"curve {look}")
        alone = good & ~np.r_[False, good[:-1]] & ~np.r_[good[1:], False]  # a point between gaps has no line
        shown = good if curve.look == "strong" and good.sum() <= 60 else alone
        dots = "".join(f"M{a:.1f} {b:.1f}h0" for a, b in zip(x[shown], y[shown], strict=True))
        if dots:
            _add(svg, "path", d=dots, class_=f"dots c{curve.style % STYLES}")
    return _text(svg)


def draw_bars(
    title: str, about: str, labels: list[str], stacks: np.ndarray, names: tuple, x_name: str
) -> str:
    """Return stacked bars as an SVG element; "" without bars.

    stacks: float64 [bars, names], seconds
    x_name: the quantity that the labels count
    """
    if not len(stacks):
        return ""
    unit, unit_name = choose_unit(float(stacks.sum(axis=1).max()))
    heights = stacks / unit
    y_axis = Axis(np.r_[0.0, heights.sum(axis=1)], HEIGHT - BOTTOM, TOP, "clock")
    left = _left(y_axis)
    svg = _frame(title, about)
    _axes(svg, y_axis, left, f"{unit_name} by {x_name}")
    room = (WIDTH - left - RIGHT) / len(labels)
    width = min(room * 0.8, 60)
    every = math.ceil(max(len(label) for label in labels) * 10 / room + 0.3)
    for number, (label, stack) in enumerate(zip(labels, heights, strict=True)):
        middle, below = left + (number + 0.5) * room, 0.0
        group = _add(svg, "g")
        parts = ", ".join(f"{name} {format_short(each)}" for name, each in zip(names, stack, strict=True))
        _add(group, "title").text = f"{label}: {parts} {unit_name}"
        for part, each in enumerate(stack):
            top, bottom = float(y_axis(below + each)), float(y_axis(below))
            below += each
            box = {"x": f"{middle - width / 2:.1f}", "y": f"{top:.1f}", "width": f"{width:.1f}"}
            _add(group, "rect", **box, height=f"{bottom - top:.1f}", class_=f"part p{part}")
        if number % every == 0:
            _label(svg, middle, HEIGHT - BOTTOM + 18, label, "middle")
    _base(svg, left)
    return _text(svg)


def _frame(title: str, about: str) -> Element:
    number = next(_numbers)
    labels = {"aria-labelledby": f"title{number} about{number}"}
    svg = Element("svg", {"viewBox": f"0 0 {WIDTH} {HEIGHT}", "role": "img"} | labels)
    _add(svg, "title", id=f"title{number}").text = title
    _add(svg, "desc", id=f"about{number}").text = about
    return svg


def _axes(svg: Element, y_axis: Axis, left: float, x_name: str) -> None:
    for tick in y_axis.ticks:
        at = float(y_axis(tick))
        _add(svg, "path", d=f"M{left:.1f} {at:.1f}H{WIDTH - RIGHT}", class_="grid")
        _label(svg, left - 7, at + 4.5, y_axis.label(tick), "end")
    _base(svg, left)
    _label(svg, (left + WIDTH - RIGHT) / 2, HEIGHT - 5, x_name, "middle")


def _left(y_axis: Axis) -> float:
    """Return the left end of the chart, right of its labels."""
    return 12 + _DIGIT * max(2, *(len(y_axis.label(tick)) for tick in y_axis.ticks))


def _base(svg: Element, left: float) -> None:
    _add(svg, "path", d=f"M{left:.1f} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}", class_="axis")


def _label(svg: Element, x: float, y: float, text: str, anchor: str) -> None:
    _add(svg, "text", x=f"{x:.1f}", y=f"{y:.1f}", **{"text-anchor": anchor}).text = text


def _path(x: np.ndarray, y: np.ndarray, good: np.ndarray) -> str:
    parts, drawing = [], False
    for a, b, there in zip(x, y, good, strict=True):
        if there:
            parts.append(f"{'L' if drawing else 'M'}{a:.1f} {b:.1f}")
        drawing = bool(there)
    return "".join(parts)


def _add(parent: Element, tag: str, **attributes: str) -> Element:
    return ElementTree.SubElement(parent, tag, {name.rstrip("_"): text for name, text in attributes.items()})


def _text(svg: Element) -> str:
    return ElementTree.tostring(svg, encoding="unicode")
