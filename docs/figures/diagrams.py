"""The diagrams of the architecture page, as SVG that needs no script and no network. `python docs/figures/diagrams.py`.

A diagram is a table of boxes, each at a place (x in pixels, row), and of arrows between them.
"""

from dataclasses import dataclass
from html import escape
from pathlib import Path

from llqr.lab import pictures

WIDTH, ROW, LINE, SIZE = 480, 76, 15, 12
STYLE = f"""text {{ font: {SIZE}px system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif; }}
text {{ text-anchor: middle; }}
.name {{ font-weight: 700; }}
@media (prefers-color-scheme: dark) {{
{pictures.dark_rules()}
}}"""
INK, SOFT = f"fill: {pictures.INK}", f"fill: {pictures.SOFT}"


@dataclass(frozen=True)
class Box:
    """Text at a place; with ``named`` the first line is a name. Kinds: a box, a rounded one, and a question."""

    x: float
    row: float
    lines: tuple[str, ...]
    named: bool = False
    kind: str = "box"

    @property
    def y(self) -> float:
        return 34 + ROW * self.row

    @property
    def half(self) -> tuple[float, float]:
        """Half of width and height; letters are about half as wide as high, and a question needs its corners."""
        longest = max(len(line) for line in self.lines)
        wide, high = 0.5 * (0.56 * SIZE * longest + 18), 0.5 * (LINE * len(self.lines) + 12)
        return (wide + 34, high + 8) if self.kind == "question" else (wide, high)

    def edge_towards(self, other: "Box") -> tuple[float, float]:
        """Where the line from the middle of this box to that of another leaves it."""
        dx, dy = other.x - self.x, other.y - self.y
        wide, high = self.half
        if self.kind == "question":
            scale = 1 / (abs(dx) / wide + abs(dy) / high)
        else:
            scale = min(wide / abs(dx) if dx else 9e9, high / abs(dy) if dy else 9e9)
        return self.x + scale * dx, self.y + scale * dy

    def svg(self) -> str:
        wide, high = self.half
        line = f"fill: none; stroke: {pictures.SOFT}"
        if self.kind == "question":
            corners = (
                f"{self.x - wide},{self.y} {self.x},{self.y - high} {self.x + wide},{self.y} {self.x},{self.y + high}"
            )
            shape = f'<polygon points="{corners}" style="{line}"/>'
        else:
            radius = high if self.kind == "round" else 4
            place = f'x="{self.x - wide:.1f}" y="{self.y - high:.1f}" width="{2 * wide:.1f}" height="{2 * high:.1f}"'
            shape = f'<rect {place} rx="{radius:.1f}" style="{line}"/>'
        named = ' class="name"' if self.named else ""
        first = self.y - LINE * (len(self.lines) - 1) / 2 + SIZE / 3
        texts = [
            f'<text x="{self.x}" y="{first + LINE * number:.1f}" style="{INK}"'
            f"{named if number == 0 else ''}>{escape(line)}</text>"
            for number, line in enumerate(self.lines)
        ]
        return "\n".join([shape, *texts])


Arrows = tuple[tuple[str, str, str], ...]


def arrow(start: Box, end: Box, label: str) -> str:
    (x, y), (to_x, to_y) = start.edge_towards(end), end.edge_towards(start)
    style = f"stroke: {pictures.SOFT}; stroke-width: 1.3"
    drawn = f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" style="{style}" marker-end="url(#tip)"/>'
    if label:
        place = f'x="{(x + to_x) / 2 + 8:.1f}" y="{(y + to_y) / 2 + 4:.1f}"'
        drawn += f'\n<text {place} style="{SOFT}; text-anchor: start">{escape(label)}</text>'
    return drawn


def diagram(title: str, boxes: dict[str, Box], arrows: Arrows) -> str:
    height = max(box.y + box.half[1] for box in boxes.values()) + 6
    tip = f'<path d="M0,0 L7,3.5 L0,7 z" style="fill: {pictures.SOFT}"/>'
    size = 'viewBox="0 0 7 7" refX="7" refY="3.5" markerWidth="7" markerHeight="7"'
    marker = f'<marker id="tip" {size} orient="auto">{tip}</marker>'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" role="img">',
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n<defs>{marker}</defs>",
        *(arrow(boxes[start], boxes[end], label) for start, end, label in arrows),
        *(box.svg() for box in boxes.values()),
        "</svg>\n",
    ]
    return "\n".join(parts)


ROOMS = {
    "lab": Box(60, 0, ("lab/", "recipes, runs,", "benches"), named=True),
    "theory": Box(172, 0, ("theory/", "two-scale", "pothole model"), named=True),
    "integrations": Box(290, 0, ("integrations/", "Lightning, ...,", "Accelerate"), named=True),
    "lqr": Box(408, 0, ("lqr/", "exact LQR", "(stands alone)"), named=True),
    "methods": Box(130, 1.1, ("methods.py", "SAM, LLQRSAM, ..."), named=True),
    "optimizer": Box(220, 2, ("optimizer.py", "the one wrapper"), named=True),
    "step": Box(90, 3, ("step/", "AMP, snapshot, buffers"), named=True),
    "probes": Box(240, 3, ("probes/", "SAM, ASAM, ..."), named=True),
    "geometry": Box(372, 3, ("geometry/", "what a user holds"), named=True),
    "refresh": Box(372, 4, ("refresh/", "the inner loop, guards"), named=True),
    "solvers": Box(372, 5, ("solvers/", "objective J, heavy ball, cg"), named=True),
    "curvature": Box(236, 6, ("curvature/", "quadratic model, engines"), named=True),
    "metric": Box(404, 6, ("metric/", "U, its structures"), named=True),
}
ROOM_ARROWS = (
    ("lab", "methods", ""),
    ("theory", "methods", ""),
    ("integrations", "optimizer", ""),
    ("methods", "optimizer", ""),
    ("optimizer", "step", ""),
    ("optimizer", "probes", ""),
    ("optimizer", "geometry", ""),
    ("geometry", "refresh", ""),
    ("refresh", "solvers", ""),
    ("solvers", "curvature", ""),
    ("solvers", "metric", ""),
)
STEP = {
    "start": Box(300, 0, ("step(closure, batch=...)",), kind="round"),
    "due": Box(300, 0.9, ("refresh due?",), kind="question"),
    "learn": Box(106, 1.45, ("geometry.refresh_if_due(batch)", "learn U")),
    "centre": Box(300, 2.3, ("closure()", "loss and gradient g at the weights θ")),
    "probe": Box(300, 3.2, ("probe: θ⁺ = θ + ε", "ε from g and U, of radius ρ")),
    "second": Box(300, 4.05, ("closure()", "gradient g̃ at θ⁺")),
    "restore": Box(300, 4.7, ("θ and buffers restored from the copy",)),
    "transport": Box(300, 5.4, ("transport: g̃ becomes U g̃",)),
    "base": Box(300, 6.2, ("base.step()", "momentum, weight decay")),
    "done": Box(300, 6.95, ("returns the loss at θ",), kind="round"),
}
STEP_ARROWS = (
    ("start", "due", ""),
    ("due", "learn", "yes"),
    ("due", "centre", "no"),
    ("learn", "centre", ""),
    ("centre", "probe", ""),
    ("probe", "second", ""),
    ("second", "restore", ""),
    ("restore", "transport", ""),
    ("transport", "base", ""),
    ("base", "done", ""),
)
REFRESH = {
    "batch": Box(240, 0, ("inner batch",), kind="round"),
    "problem": Box(
        240, 0.9, ("curvature.Problem", "model, loss and batch as a function", "of the weights, in eval mode"), True
    ),
    "engine": Box(240, 1.8, ("curvature.Engine.linearise",), named=True),
    "quadratic": Box(240, 2.5, ("QuadraticModel", "loss, g, v ↦ H v"), named=True),
    "ranks": Box(240, 3.3, ("mean over the ranks, if there are several",)),
    "loop": Box(120, 4.2, ("refresh.InnerLoop", "the steps of Inner.plan()"), named=True),
    "objective": Box(360, 4.2, ("solvers.Objective", "δ = −U g, J(U),", "its gradient in the factors"), named=True),
    "solver": Box(360, 5.2, ("solvers.Solver", "moves the factors"), named=True),
    "blend": Box(120, 5.3, ("moving average", "with the old factors")),
    "guards": Box(220, 6.4, ("refresh.guards: finite, J", "did not rise, g·Ug > 0?"), kind="question"),
    "accept": Box(110, 7.5, ("metric.assign", "U changes"), named=True),
    "reject": Box(340, 7.5, ("the old metric stays,", "failures += 1, one warning")),
    "report": Box(220, 8.4, ("Refresh: the report",), kind="round"),
}
REFRESH_ARROWS = (
    ("batch", "problem", ""),
    ("problem", "engine", ""),
    ("engine", "quadratic", ""),
    ("quadratic", "ranks", ""),
    ("ranks", "loop", ""),
    ("loop", "objective", ""),
    ("objective", "solver", ""),
    ("solver", "loop", ""),
    ("loop", "blend", ""),
    ("blend", "guards", ""),
    ("guards", "accept", "yes"),
    ("guards", "reject", "no"),
    ("accept", "report", ""),
    ("reject", "report", ""),
)
RUN = {
    "toml": Box(130, 0, ("TOML layers", "extends, @variant, --set")),
    "own": Box(356, 0, ("own.Experiment", "a user's model, loss, data"), named=True),
    "recipe": Box(240, 0.8, ("config.Recipe",), named=True),
    "run": Box(240, 1.6, ("config.Run", "everything but the seed"), named=True),
    "planned": Box(240, 2.4, ("runs.PlannedRun",), named=True),
    "training": Box(240, 3.2, ("training.Training", "one loop for all tasks"), named=True),
    "folder": Box(240, 4.1, ("run folder", "config.json, log.jsonl,", "checkpoint.pt, result.json"), named=True),
    "stored": Box(240, 5, ("runs.StoredRun",), named=True),
    "report": Box(120, 5.8, ("report.html",), kind="round"),
    "kept": Box(330, 5.8, ("results/*.jsonl",)),
    "table": Box(330, 6.6, ("llqr table", "measured beside paper"), named=True),
    "pages": Box(330, 7.5, ("README and docs", "(make tables)"), kind="round"),
}
RUN_ARROWS = (
    ("toml", "recipe", ""),
    ("own", "recipe", ""),
    ("recipe", "run", "method"),
    ("run", "planned", "seed, folder"),
    ("planned", "training", ""),
    ("training", "folder", ""),
    ("folder", "stored", ""),
    ("stored", "report", ""),
    ("stored", "kept", "--keep"),
    ("kept", "table", ""),
    ("table", "pages", ""),
)
DIAGRAMS: dict[str, tuple[str, dict[str, Box], Arrows]] = {
    "rooms": ("Which room of llqr imports which", ROOMS, ROOM_ARROWS),
    "step": ("What happens in a step", STEP, STEP_ARROWS),
    "refresh": ("What happens in a refresh", REFRESH, REFRESH_ARROWS),
    "run": ("A run, from recipe to table", RUN, RUN_ARROWS),
}


def main() -> None:
    for name, (title, boxes, arrows) in DIAGRAMS.items():
        Path(__file__).with_name(f"architecture-{name}.svg").write_text(diagram(title, boxes, arrows))


if __name__ == "__main__":
    main()
