"""The frames of an animated SVG: classes of elements that appear, vanish or change their colours at a frame."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

#: Seconds of one frame, and of the last one.
FRAME_S, REST_S = 0.6, 2.8
CSS = (
    "svg{--card:#fffefb;--ink:#1c2430;--soft:#5a6473;--line:#e2dccf;--edge:#c3bdae;--green:#1a7341;--green-wash:#d5efde;"
    "--red:#b23427;--red-wash:#f9deda;--gold:#c98f00;--blue:#255f84;--blue-wash:#dcebf4;"
    "font:15px ui-sans-serif,system-ui,sans-serif;fill:var(--ink)}"
    "@media(prefers-color-scheme:dark){svg{--card:#181e26;--ink:#e8ecf1;--soft:#9ba6b4;--line:#2c3541;--edge:#445060;"
    "--green:#77d69c;--green-wash:#1b3b2a;--red:#ff968a;--red-wash:#46241f;--gold:#f0bd36;--blue:#8cc4e8;--blue-wash:#1a3242}}"
    ".card{fill:var(--card);stroke:var(--line)}.soft{fill:var(--soft)}.title{fill:var(--soft);font-weight:600}"
    ".note{font-weight:600;font-size:17px}.good{fill:var(--green)}.bad{fill:var(--red)}"
    ".word{font-family:ui-monospace,monospace;white-space:pre}.prompt{fill:var(--soft)}.given{fill:var(--blue)}"
    ".strike{stroke:var(--red);stroke-width:2}.wash{fill:var(--red-wash)}.axis{stroke:var(--line)}"
    ".p,.v,.jump{fill:none;stroke-width:2;stroke-linecap:round}.p{stroke:var(--red)}.v{stroke:var(--blue)}"
    ".dot{stroke:none}.dot.p{fill:var(--red)}.dot.v{fill:var(--blue)}.zone{fill:var(--red-wash);fill-opacity:.6}"
    ".label{font:12px ui-monospace,monospace;text-anchor:middle}.label.cut{fill:var(--red);font-family:sans-serif}"
    ".edge{stroke:var(--edge);stroke-width:2}.disc{fill:var(--card);stroke:var(--edge);stroke-width:2}"
    ".name{font-weight:600;text-anchor:middle;dominant-baseline:central}.goal{fill:none;stroke:var(--gold);stroke-width:3.5}"
    ".jump{stroke:var(--green);stroke-dasharray:7 6}.walker{fill:var(--green);fill-opacity:.28}"
)


@dataclass
class Picture:
    """Elements, and the rules that animate them. A class is named once for all elements that change in the same frame."""

    frames: int
    rules: dict[str, str] = field(default_factory=dict)
    body: list[str] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """The time of one round."""
        return FRAME_S * (self.frames - 1) + REST_S

    def share(self, frame: float) -> str:
        """The start of a frame, in percent of a round."""
        hundredths = math.floor(1e4 * (FRAME_S * frame) / self.seconds + 0.5)
        return f"{hundredths // 100}.{hundredths % 100:02d}%"

    def animate(self, name: str, still: str, stops: str, timing: str = "step-end") -> str:
        """A class with these keyframes; `still` is shown where animations are not."""
        self.rules[name] = (
            f".{name}{{{still}animation:{name} {number(self.seconds)}s {timing} infinite}}@keyframes {name}{{{stops}}}"
        )
        return name

    def since(self, frame: int) -> str:
        """The class of what is seen from a frame on."""
        if frame == 0:
            return "s0"
        return self.animate(f"s{frame}", "", f"0%{{opacity:0}}{self.share(frame)}{{opacity:1}}")

    def until(self, frame: int) -> str:
        """The class of what is seen before a frame."""
        return self.animate(f"u{frame}", "opacity:0;", f"0%{{opacity:1}}{self.share(frame)}{{opacity:0}}")

    def during(self, frame: int) -> str:
        """The class of what is seen in one frame; the last one stays."""
        is_last = frame == self.frames - 1
        before = "" if frame == 0 else "0%{opacity:0}"
        after = "" if is_last else f"{self.share(frame + 1)}{{opacity:0}}"
        return self.animate(
            f"f{frame}", "" if is_last else "opacity:0;", f"{before}{self.share(frame)}{{opacity:1}}{after}"
        )

    def changing(self, name: str, states: Sequence[str], styles: Mapping[str, str]) -> str:
        """The class of an element with a state in each frame."""
        if len(set(states)) == 1:
            self.rules[name] = f".{name}{{{styles[states[0]]}}}"
            return name
        stops = [
            f"{self.share(frame)}{{{styles[state]}}}"
            for frame, state in enumerate(states)
            if frame == 0 or state != states[frame - 1]
        ]
        return self.animate(name, styles[states[-1]] + ";", "".join(stops))


def escape(text: str) -> str:
    """Text as XML, without the characters that XML can't hold."""
    text = re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff\ud800-\udfff]", "�", text)
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def tenth(x: float) -> float:
    """A number rounded to one digit after the point; halves go up, as in the browser."""
    return math.floor(10 * x + 0.5) / 10


def number(x: float) -> str:
    """A coordinate as text."""
    return f"{tenth(x):g}"
