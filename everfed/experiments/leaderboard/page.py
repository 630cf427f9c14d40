"""The leaderboard's pages, from the records alone: a table and two pictures for every stream, as Markdown between the
marks of a page (`leaderboard: STREAM`, or `leaderboard: all` for accuracies alone, with a page for every stream beside
it), and as one HTML file whose tables can be sorted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from everfed.core.method import needs_boundaries
from everfed.errors import UserError
from everfed.experiments.leaderboard import records, tuning
from everfed.experiments.leaderboard.records import Record
from everfed.methods import registry as methods
from everfed.privacy.reveals import seen
from everfed.recipe import read, settled
from everfed.reports.formats import Html, markdown_table, size, tag
from everfed.reports.html import document
from everfed.store.files import make_folder, marked_names, marked_parts_renewed, write_atomic

ALL = "all"  # the mark of the table of all streams; pages of single streams lie beside it then
MARK = "leaderboard"  # of the marks
PERSONAL = "†"
NOTE = (
    "Mean ± population deviation over the seeds of the test; accuracy, forgetting and learning accuracy in per cent. "
    "Bytes of a whole run, all clients together; kept: by one client at the end. Time: seconds of a run over those of "
    "fedavg, with runs side by side on one machine, so that small differences mean nothing; -: on another kind of "
    "device than fedavg's. "
    f"{PERSONAL}: every client is scored with a model of its own."
)
TUNING = (
    "A try is a learning rate with a value of the method's main weight, scored on validation data; the best of them, "
    "in the last column, was tested on other seeds."
)
SORTING = "A click on a heading sorts the table by it, a second click turns the order round."
COLUMNS = (
    "method", "accuracy", "forgetting", "learning accuracy", "bytes up", "bytes down", "time", "kept by a client",
    "stored samples", "the server sees", "secure aggregation", "boundaries", "chosen",
)  # fmt: skip


@dataclass(frozen=True)
class Sortable:
    """text: as it is shown. value: what the column is sorted by."""

    text: str
    value: float | str


@dataclass(frozen=True)
class MethodFacts:
    """What a method needs and shows, whatever the numbers. sees: what the server sees of single clients."""

    sees: str
    boundaries: bool
    keeps_all: bool

    @property
    def secure(self) -> bool:
        return not self.sees


def write(root: Path, page: Path | None, html: Path | None) -> list[Path]:
    """Write the pages that are named, with the pages and pictures of single streams beside the Markdown one; returns
    the files."""
    found = records.read_all(root)
    texts = {} if page is None else {page: renewed(marked_page(page), found, page.stem), **beside(page, found)}
    return [_save(path, text) for path, text in {**texts, **({html: report(found)} if html else {})}.items()]


def marked_page(page: Path) -> str:
    """The text of a Markdown page. Raises UserError where it cannot be read or no place in it is marked."""
    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"--page {page} cannot be read: {error.strerror or error}") from error
    if not marked_names(text, MARK):
        raise UserError(
            f"--page {page} has no place for the leaderboard; mark it with <!-- {MARK}: STREAM --> and "
            f"<!-- {MARK}: end -->. Streams: {ALL}, {', '.join(tuning.streams())}"
        )
    return text


def renewed(text: str, found: Sequence[Record], pictures: str) -> str:
    """A Markdown page with every marked part written anew. pictures: the folder of the pictures beside the page."""
    return marked_parts_renewed(
        text, MARK, lambda name: _all(found, pictures) if name == ALL else _section(name, found, pictures)
    )


def beside(page: Path, found: Sequence[Record]) -> dict[Path, str]:
    """The files in the folder of a page's name: a page for every stream, and the pictures."""
    texts = {f"{name}.svg": drawing for name, drawing in _pictures(found).items()}
    for stream in tuning.streams() if ALL in marked_names(page.read_text(encoding="utf-8"), MARK) else ():
        texts[f"{stream}.md"] = f"# Leaderboard: {stream}\n\n{_section(stream, found, '.')}\n"
    return {page.parent / page.stem / name: text for name, text in texts.items()}


def report(found: Sequence[Record]) -> str:
    """The whole HTML page."""
    shown = [stream for stream in tuning.streams() if _of(found, stream)]
    return document(
        "everfed leaderboard",
        _file("sort.js"),
        tag("header", tag("h1", "everfed leaderboard"), *(tag("p", line) for line in (TUNING, NOTE, SORTING))),
        tag("main", *(_html_section(stream, _of(found, stream)) for stream in shown)),
        style=_file("leaderboard.css"),
    )


# tables ----------------------------------------------------------------------------------------------------------


def rows(found: Sequence[Record]) -> list[list[Sortable]]:
    """A row for every method of one stream that has test numbers, the most accurate first."""
    tested = [record for record in found if records.finished_tests(record)]
    fedavg = next((record for record in tested if record["method"] == "fedavg"), None)
    lines = [_row(record, fedavg) for record in tested]
    return sorted(lines, key=lambda line: line[1].value, reverse=True)


def _row(record: Record, fedavg: Record | None) -> list[Sortable]:
    facts = facts_of(record["stream"], record["method"])
    kept = records.mean(record, "kept_bytes") or 0.0
    samples = stored_samples(record)
    return [
        Sortable(_named(record), record["method"]),
        *(_percent(record, key) for key in records.SCORES),
        *(_bytes(records.mean(record, key) or 0.0) for key in ("bytes_up", "bytes_down")),
        _time(record, fedavg),
        Sortable("all data", float("inf")) if facts.keeps_all else _bytes(kept),
        Sortable("all", float("inf")) if facts.keeps_all else Sortable(f"{samples:.0f}", samples),
        Sortable(facts.sees or "sums only", facts.sees),
        Sortable("yes" if facts.secure else "no", "yes" if facts.secure else "no"),
        Sortable("needed" if facts.boundaries else "not needed", str(facts.boundaries)),
        Sortable(chosen := chosen_settings(record), chosen),
    ]


def _time(record: Record, fedavg: Record | None) -> Sortable:
    """Seconds over FedAvg's; none where the tests ran on another kind of device than FedAvg's."""
    if fedavg is None or _devices(record) != _devices(fedavg):
        return Sortable("-", float("inf"))
    seconds, base = records.mean(record, "seconds"), records.mean(fedavg, "seconds")
    ratio = seconds / base if seconds and base else float("inf")
    return Sortable(f"{ratio:.2f}" if math.isfinite(ratio) else "-", ratio)


def _devices(record: Record) -> set[str]:
    return {_device(test["environment"]) for test in records.finished_tests(record)}


def _named(record: Record) -> str:
    """The method's name, marked where every client is scored with a model of its own."""
    personal = records.finished_tests(record)[0]["evaluated"] == "personalised"
    return f"{record['method']} {PERSONAL}" if personal else str(record["method"])


def facts_of(stream: str, method: str) -> MethodFacts:
    """From the method itself, with the options that the stream's recipe sets."""
    section = settled(read(f"{tuning.RECIPES}{stream}", method=method)).method
    built = methods.build(section.name, section.model_extra)
    single = dict.fromkeys(value for _, value in seen(built, single=True))
    sees = f"every client's {', '.join(single)}" if single else ""
    return MethodFacts(
        sees, any(map(needs_boundaries, built.parts)), any("history" in part.needs() for part in built.parts)
    )


def stored_samples(record: Record) -> float:
    """Samples that a client keeps; 0 for methods without a buffer."""
    return records.mean(record, "kept_samples") or 0.0


def chosen_settings(record: Record) -> str:
    """The settings of the best try: "lr 0.2, er.batch 16"; of a policy's table only what is not its kind."""
    best = records.best_try(record)
    pairs = [entry.split("=", 1) for entry in best["sets"]] if best else []
    return ", ".join(f"{_short_key(key)} {value}" if "{" not in value else _option(value) for key, value in pairs)


def _short_key(key: str) -> str:
    return key.removeprefix("train.optimizer.").removeprefix("method.").replace('"', "")


def _option(table: str) -> str:
    """'{kind = "re-fed", informative = 0.5}' -> "informative 0.5"."""
    return table.strip("{}").partition(", ")[2].replace(" =", "")


def not_run(found: Sequence[Record]) -> list[str]:
    """The methods of the leaderboard that have no record among those of one stream."""
    recorded = {record["method"] for record in found}
    return [method for method in tuning.compared() if method not in recorded]


def failures(found: Sequence[Record]) -> list[tuple[str, str]]:
    """(method, reason) of methods without a number on a stream."""
    return [(record["method"], reason) for record in found if (reason := records.problem(record))]


def _percent(record: Record, key: str) -> Sortable:
    value = records.mean(record, key)
    if value is None:
        return Sortable("-", float("-inf"))
    deviation = records.deviation(record, key)
    count = len(records.finished_tests(record))
    return Sortable(f"{100 * value:.1f}" + (f" ± {100 * deviation:.1f}" if count > 1 else ""), value)


def _bytes(count: float) -> Sortable:
    return Sortable(size(round(count)), count)


# Markdown --------------------------------------------------------------------------------------------------------


def _all(found: Sequence[Record], folder: str) -> str:
    """A row for every method with its accuracy on every stream, the highest mean first; methods without a number on one
    of them come last."""
    tested = {(one["method"], one["stream"]): one for one in found if records.finished_tests(one)}
    streams = [stream for stream in tuning.streams() if any(known == stream for _, known in tested)]
    lines: list[tuple[bool, float, list[str]]] = []
    for method in dict.fromkeys(method for method, _ in tested):
        own = {stream: tested[method, stream] for stream in streams if (method, stream) in tested}
        cells = {stream: _percent(record, "acc") for stream, record in own.items()}
        name = next(iter(map(_named, own.values())))
        mean = sum(float(cell.value) for cell in cells.values()) / len(cells)
        texts = [cells[stream].text if stream in cells else "-" for stream in streams]
        lines.append((len(own) == len(streams), mean, [name, *texts]))
    links = [f"[{stream}]({folder}/{stream}.md)" for stream in streams]
    return markdown_table(["method", *links], [line for *_, line in sorted(lines, reverse=True)])


def _section(stream: str, found: Sequence[Record], pictures: str) -> str:
    own = _of(found, stream)
    if not any(map(records.finished_tests, own)):
        return "No records."
    table = markdown_table(COLUMNS, [[cell.text for cell in row] for row in rows(own)])
    failed = [f"* `{method}`: {reason}" for method, reason in failures(own)]
    missing = not_run(own)
    images = [f"![{about}]({pictures}/{stream}-{kind}.svg)" for kind, about in KINDS.items()]
    listed = ["Methods without a number here:", "\n".join(failed)] if failed else []
    listed += [f"Not run on this stream: {', '.join(f'`{name}`' for name in missing)}."] if missing else []
    return "\n\n".join([table, f"{_conditions(own)} {NOTE}", *listed, *images])


def _conditions(own: Sequence[Record]) -> str:
    """How the numbers were made: tries, seeds, machine."""
    tries = {len(record["tries"]) for record in own if record["tests"]}
    seeds = {len(record["tests"]) for record in own if record["tests"]}
    machines = {_machine(test["environment"]) for record in own for test in records.finished_tests(record)}
    several = [f"{', '.join(map(str, sorted(counts)))} {word}" for counts, word in ((tries, "tries"), (seeds, "seeds"))]
    lost = f"{_lost(own, 'tries')}{_lost(own, 'tests')}"
    return f"{' and '.join(several)} for every method in the table; {'; '.join(sorted(machines))}.{lost}"


REASONS = {"not finite": "diverged", "out of memory": "out of memory", "longer than the limit": "over the time limit"}


def _lost(own: Iterable[Record], kind: str) -> str:
    """Tries or tests without a number, of methods that have one: these were tuned with fewer tries than the others, or
    their rows are of fewer seeds."""
    lost = Counter(
        (next((short for words, short in REASONS.items() if words in entry["problem"]), "failed"), record["method"])
        for record in own
        if records.finished_tests(record)
        for entry in record[kind]
        if entry["problem"]
    )
    kinds = [
        f"{reason}: " + ", ".join(f"{method} {count}" for (why, method), count in sorted(lost.items()) if why == reason)
        for reason in sorted({reason for reason, _ in lost})
    ]
    return f" {kind.capitalize()} that ended without a number: {'; '.join(kinds)}." if kinds else ""


def _device(environment: dict[str, object]) -> str:
    return str(environment.get("device_name") or f"{environment.get('machine')} CPU, a core for every run")


def _machine(environment: dict[str, object]) -> str:
    device = _device(environment)
    precision = environment.get("precision", "fp32")
    return f"{device}, {environment.get('engine')}, {precision}, torch {environment.get('torch')}"


# HTML and pictures -----------------------------------------------------------------------------------------------


def _html_section(stream: str, own: Sequence[Record]) -> Html:
    head = tag("tr", *(tag("th", tag("button", name, type="button"), scope="col") for name in COLUMNS))
    body = [tag("tr", *(tag("td", cell.text, data_value=str(cell.value)) for cell in row)) for row in rows(own)]
    failed = [tag("li", tag("b", method), f": {reason}") for method, reason in failures(own)]
    missing = not_run(own)
    drawings = [tag("div", Html(drawing(points(own, kind), about)), class_="wide") for kind, about in KINDS.items()]
    return tag(
        "section",
        tag("h2", stream),
        tag("p", _conditions(own)),
        tag("div", tag("table", tag("thead", head), tag("tbody", *body), class_="sortable"), class_="wide"),
        tag("h3", "Methods without a number") if failed else None,
        tag("ul", *failed) if failed else None,
        tag("p", f"Not run on this stream: {', '.join(missing)}.") if missing else None,
        *drawings,
    )


def points(own: Iterable[Record], kind: str) -> list[Point]:
    """Accuracy of every tested method against its bytes, or against the samples that a client keeps."""
    found = []
    for record in own:
        accuracy = records.mean(record, "acc")
        unbounded = kind == SAMPLES and facts_of(record["stream"], record["method"]).keeps_all
        if accuracy is None or unbounded:
            continue
        traffic = sum(records.mean(record, key) or 0.0 for key in ("bytes_up", "bytes_down"))
        cost = traffic if kind == BYTES else stored_samples(record)
        found.append(Point(_named(record), cost, accuracy))
    return found


def _pictures(found: Sequence[Record]) -> dict[str, str]:
    """{file name: SVG} of all streams with test numbers."""
    return {
        f"{stream}-{kind}": drawing(points(own, kind), about, alone=True)
        for stream in tuning.streams()
        if any(map(records.finished_tests, own := _of(found, stream)))
        for kind, about in KINDS.items()
    }


def _of(found: Sequence[Record], stream: str) -> list[Record]:
    return [record for record in found if record["stream"] == stream]


def _file(name: str) -> str:
    return resources.files("everfed.experiments.leaderboard").joinpath(name).read_text(encoding="utf-8")


def _save(path: Path, text: str) -> Path:
    make_folder(path.parent)
    write_atomic(path, text.encode(), shared=True)
    return path


# accuracy against cost -----------------------------------------------------------------------------------------------
BYTES, SAMPLES = "bytes", "samples"
KINDS = {
    BYTES: "Accuracy against the bytes of a run, up and down",
    SAMPLES: "Accuracy against the samples that a client stores",
}
FRONT, OTHERS = "#0b6e99", "#999"
LETTER, LINE = 6.5, 14  # width and height of a label's letters, about
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 420, 60, 130, 30, 50


@dataclass(frozen=True)
class Point:
    """cost: at least 0, the less the better. accuracy: a fraction."""

    name: str
    cost: float
    accuracy: float


def front(points: Iterable[Point]) -> list[Point]:
    """The points that no other one matches in cost and beats in accuracy, by cost; of equals in cost the best."""
    found: list[Point] = []
    for point in sorted(points, key=lambda one: (one.cost, -one.accuracy)):
        if not found or point.accuracy > found[-1].accuracy:
            found.append(point)
    return found


def drawing(points: Sequence[Point], title: str, *, alone: bool = False) -> str:
    """An SVG; costs on a logarithmic axis that begins at 0. alone: as a file of its own."""
    if not points:
        return ""
    best, scale = front(points), _Scale(points)
    line = " ".join(f"{scale.x(point.cost):.1f},{scale.y(point.accuracy):.1f}" for point in best)
    return str(
        tag(
            "svg",
            tag("title", title),
            *scale.axes(title),
            tag("polyline", points=line, fill="none", stroke=FRONT, stroke_width=2, class_="front"),
            *(_dot(point, scale, point in best) for point in points),
            *_labels(best, scale),
            xmlns="http://www.w3.org/2000/svg" if alone else None,
            viewBox=f"0 0 {WIDTH} {HEIGHT}",
            role="img",
            font_family="sans-serif",
            font_size=12,
            **({"style": "background:#fff"} if alone else {"class_": "pareto"}),
        )
    )


class _Scale:
    """From cost and accuracy to places in the picture."""

    def __init__(self, points: Sequence[Point]) -> None:
        costs, accuracies = ([getattr(point, key) for point in points] for key in ("cost", "accuracy"))
        self._integer = max(costs) < 1e4
        self._from, self._to = (math.log10(1 + bound) for bound in (min(costs), max(costs)))
        self._to = max(self._to, self._from + 0.1)
        self._low, self._high = math.floor(10 * min(accuracies)) / 10, math.ceil(10 * max(accuracies)) / 10
        self._high = max(self._high, self._low + 0.1)

    def x(self, cost: float) -> float:
        share = (math.log10(1 + cost) - self._from) / (self._to - self._from)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, accuracy: float) -> float:
        return TOP + (self._high - accuracy) / (self._high - self._low) * (HEIGHT - TOP - BOTTOM)

    def axes(self, title: str) -> list[Html]:
        """A line for every ten per cent, and five costs."""
        lines: list[Html] = []
        for step in range(round(10 * self._low), round(10 * self._high) + 1):
            y = self.y(step / 10)
            lines.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, stroke="currentColor", stroke_opacity=0.2))
            lines.append(tag("text", f"{10 * step} %", x=LEFT - 8, y=y + 4, text_anchor="end", fill="currentColor"))
        for place in range(5):
            cost = 10 ** (self._from + place / 4 * (self._to - self._from)) - 1
            shown = f"{cost:.0f}" if self._integer else size(round(cost))
            x = LEFT + place / 4 * (WIDTH - LEFT - RIGHT)
            lines.append(tag("text", shown, x=x, y=HEIGHT - 28, text_anchor="middle", fill="currentColor"))
        lines.append(tag("text", title, x=LEFT, y=HEIGHT - 8, fill="currentColor"))
        return lines


def _dot(point: Point, scale: _Scale, on_front: bool) -> Html:
    x, y = scale.x(point.cost), scale.y(point.accuracy)
    about = tag("title", f"{point.name}: {100 * point.accuracy:.1f} %, {point.cost:,.0f}")
    place = {"cx": f"{x:.1f}", "cy": f"{y:.1f}"}
    if on_front:
        return tag("circle", about, **place, r=5, fill=FRONT, class_="front")
    return tag("circle", about, **place, r=3.5, fill=OTHERS)


def _labels(best: Sequence[Point], scale: _Scale) -> list[Html]:
    """The names of the front's points, each beside its point where no other label is."""
    placed: list[tuple[float, float, str]] = []
    for point in best:
        x, y = scale.x(point.cost) + 8, scale.y(point.accuracy)
        rows = (y - 6 + LINE * step for step in (0, 1.5, -1, 2.5, -2))
        free = (row for row in rows if not any(_overlap((x, row, point.name), other) for other in placed))
        placed.append((x, next(free, y - 6), point.name))
    return [tag("text", name, x=f"{x:.1f}", y=f"{y:.1f}", fill="currentColor") for x, y, name in placed]


def _overlap(one: tuple[float, float, str], other: tuple[float, float, str]) -> bool:
    left, right = sorted((one, other))
    return abs(one[1] - other[1]) < LINE and right[0] < left[0] + LETTER * len(left[2])
