"""Random graphs: a dataflow that is drawn from the seed, with a sequential interpreter of the same graph as its oracle.

A graph has one to three sources, a handful of steps (steps.py) that take any stream there is, loops and loops within
loops where it is a cyclic one, and sinks for whatever nobody takes. The interpreter lets one record at a time go all the
way; since no step's output depends on the order of arrival, whatever the engine does must come to the same: the rows of
each sink, the state of each step, and the order of rows within a key where that is determined.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any

from tests.simulation import steps
from tests.simulation.expected import expect_order, expect_rows
from tests.simulation.steps import Built, Loop, Memory, Record, Step
from tidegate.connectors.rows import RowsSource
from tidegate.dataflow.stream import Pipeline
from tidegate.testing.simulation.site import Row, SimulatedJob, Site, StateOf
from tidegate.types import parse_schema

MOST_LAPS = 4
MOST_STEPS = 4


@dataclass(frozen=True, slots=True)
class Origin:
    """A source and its rows, the keys of which keep to one split each."""

    name: str
    stream: int
    rows: tuple[Record, ...]
    source: RowsSource


@dataclass(frozen=True, slots=True)
class Sink:
    name: str
    streams: tuple[int, ...]
    by_key: bool
    ordered: bool


@dataclass(slots=True)
class Graph:
    """Streams are numbers. `ordered`: those in which the order of a key's records is that of its source."""

    origins: list[Origin] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    sinks: list[Sink] = field(default_factory=list)
    ordered: set[int] = field(default_factory=set)

    def all_steps(self) -> Iterator[Step]:
        return _flat(self.steps)


def _flat(of: list[Step] | tuple[Step, ...]) -> Iterator[Step]:
    for step in of:
        yield step
        if isinstance(step, Loop):
            yield from _flat(step.body)


# -------------------------------------------------------------------------------------------------------- drawing


class _Drawing:
    """Draws one graph. `_open` are the streams that a next step may take, and those that nobody has taken yet."""

    def __init__(self, rng: Random, *, cyclic: bool) -> None:
        self.graph = Graph()
        self._rng = rng
        self._numbers = count()
        self._names: Counter[str] = Counter()
        self._taken: set[int] = set()
        for _ in range(rng.choice((1, 1, 1, 2, 2, 3))):
            self._origin()
        reach = [origin.stream for origin in self.graph.origins]
        loops = rng.choice((1, 1, 2)) if cyclic else 0
        plan = ["loop"] * loops + ["step"] * rng.randint(1, MOST_STEPS - loops)
        rng.shuffle(plan)
        for kind in plan:
            made = self._loop(reach, (), depth=0) if kind == "loop" else self._step(reach, (), inside=False)
            self.graph.steps += made
            reach += [
                stream
                for step in made
                for stream in step.outputs[-1 if isinstance(step, Loop) else 0 :]
                if stream not in reach
            ]
        self._close([stream for stream in reach if stream not in self._taken])

    def _origin(self) -> None:
        rng, splits = self._rng, self._rng.randint(1, 3)
        keys = max(splits, rng.randint(1, 6))
        rows = tuple(
            Record(number, rng.randrange(number % splits, keys, splits), rng.randrange(50))
            for number in range(rng.randint(4, 14))
        )
        stream = next(self._numbers)
        self.graph.ordered.add(stream)
        self.graph.origins.append(
            Origin(self._name("source"), stream, rows, RowsSource.of(rows, parse_schema(steps.DDL), split_count=splits))
        )

    def _step(self, reach: list[int], outside: tuple[int, ...], *, inside: bool) -> list[Step]:
        """One more step on what can be reached; inside a loop on what the loop has, with others only beside it."""
        rng = self._rng
        kinds = ["tally", "tally", "move", "keep", "part", "deal", "note", "meet", "rules"]
        if not inside:
            kinds += ["number", "copy", "unite", "join", "running"]
        kind = rng.choice(kinds)
        stream = self._take(reach)
        match kind:
            case "tally":
                return [self._keyed(steps.Tally, stream)]
            case "number":
                return [self._keyed(steps.Number, stream)]
            case "running":
                return [self._keyed(steps.Running if stream in self.graph.ordered else steps.Number, stream)]
            case "move":
                by = rng.choice((0, 1, 3))
                return [self._plain(steps.Move, stream, keeps=by == 0, by=by)]
            case "keep":
                return [self._plain(steps.Keep, stream, rest=rng.randrange(5))]
            case "copy":
                return [self._plain(steps.Copy, stream)]
            case "deal":
                return [steps.Deal(self._name("deal"), (stream,), (next(self._numbers),))]
            case "note":
                return [self._plain(steps.Note, stream)]
            case "part":
                part = self._plain(steps.Part, stream, outputs=2)
                return [part, steps.Unite("", part.outputs, (next(self._numbers),))] if inside else [part]
        other = self._take([*reach, *outside])
        made: Any = {"meet": steps.Meet, "rules": steps.Rules, "join": steps.Join, "unite": steps.Unite}[kind]
        name = "" if kind == "unite" else self._name(kind)
        return [made(name, (stream, other), (next(self._numbers),))]

    def _plain(self, kind: type[Any], stream: int, *, keeps: bool = True, outputs: int = 1, **what: Any) -> Any:
        """A step that records only pass through: their order is kept where its parallelism is that of its input."""
        spread = self._rng.random() < 0.5
        numbers = tuple(next(self._numbers) for _ in range(outputs))
        if keeps and not spread and stream in self.graph.ordered:
            self.graph.ordered.update(numbers)
        return kind(self._name(kind.__name__.lower()), (stream,), numbers, spread, **what)

    def _keyed(self, kind: type[Any], stream: int) -> Any:
        number = next(self._numbers)
        if stream in self.graph.ordered:
            self.graph.ordered.add(number)
        return kind(self._name(kind.__name__.lower()), (stream,), (number,))

    def _loop(self, reach: list[int], outside: tuple[int, ...], *, depth: int) -> list[Step]:
        """Records are told how many laps to make, and then make them."""
        rng, inner = self._rng, depth > 0
        told = steps.Move(
            self._name("laps"),
            (self._take(reach),),
            (next(self._numbers),),
            rng.random() < 0.5,
            by=rng.randrange(3),
            laps=rng.randint(1, 2 if inner else MOST_LAPS),
            inner=inner,
        )
        self._taken.update(told.outputs)
        name, inside = self._name("loop"), next(self._numbers)
        body: list[Step] = []
        reached, outside = [inside], (*outside, *reach)
        for kind in rng.choice((["step"], ["step"], ["step", "step"], ["loop"], ["step", "loop"])):
            last = reached[-1:]  # inside a loop one thing follows the other, so that nothing is left over
            made = (
                self._loop(last, outside, depth=depth + 1)
                if kind == "loop" and not inner
                else self._step(last, outside, inside=True)
            )
            body += made
            reached.append(made[-1].outputs[-1])
        feedback, leaving = next(self._numbers), next(self._numbers)
        body.append(
            steps.Part(
                self._name("turn"),
                (reached[-1],),
                (feedback, leaving),
                rng.random() < 0.5,
                turns="inner" if inner else "outer",
            )
        )
        return [told, Loop(name, told.outputs, (inside, leaving), rng.random() < 0.7, body=tuple(body), feedback=feedback)]

    def _close(self, left: list[int]) -> None:
        """Sinks for what nobody has taken: one each, or one for several."""
        rng = self._rng
        rng.shuffle(left)
        while left:
            size = rng.choice((1, 1, 2))
            streams, left = tuple(left[:size]), left[size:]
            by_key = rng.random() < 0.6
            self.graph.sinks.append(
                Sink(self._name("sink"), streams, by_key, len(streams) == 1 and by_key and streams[0] in self.graph.ordered)
            )

    def _take(self, reach: list[int]) -> int:
        """The latest ones, as a rule: graphs are to be deep."""
        stream = self._rng.choice(reach[-2:] if self._rng.random() < 0.7 else reach)
        self._taken.add(stream)
        return stream

    def _name(self, kind: str) -> str:
        self._names[kind] += 1
        return f"{kind} {self._names[kind]}"


# ----------------------------------------------------------------------------------------------------- the oracle


def interpreted(graph: Graph) -> tuple[dict[str, list[Record]], Memory]:
    """The rows of every sink and the state of every step: one record of the sources after the other."""
    takers: defaultdict[int, list[tuple[Step, int]]] = defaultdict(list)
    back: dict[int, int] = {}
    for step in graph.all_steps():
        for port, stream in enumerate(step.inputs):
            takers[stream].append((step, port))
        if isinstance(step, Loop):
            back[step.feedback] = step.outputs[0]
    sinks: defaultdict[int, list[str]] = defaultdict(list)
    for sink in graph.sinks:
        for stream in sink.streams:
            sinks[stream].append(sink.name)
    memory, written = Memory(), {sink.name: list[Record]() for sink in graph.sinks}
    for origin in graph.origins:
        for row in origin.rows:
            under_way = deque([(origin.stream, row)])
            while under_way:
                stream, record = under_way.popleft()
                stream = back.get(stream, stream)
                for name in sinks[stream]:
                    written[name].append(record)
                for step, port in takers[stream]:
                    under_way.extend(step.take(port, record, memory))
    return written, memory


# -------------------------------------------------------------------------------------------------------- the job


class RandomGraph(SimulatedJob):
    """An acyclic graph."""

    name = "random graph"
    cyclic = False
    span = 0.5
    most_slots = 3

    def __init__(self, rng: Random) -> None:
        self.graph = _Drawing(rng, cyclic=self.cyclic).graph

    def build(self, pipeline: Pipeline, site: Site) -> None:
        built = Built(pipeline, site)
        for origin in self.graph.origins:
            built.streams[origin.stream] = pipeline.source(
                origin.name, site.source(origin.source), parallelism=site.parallelism(origin.name)
            )
        for step in self.graph.steps:
            step.build(built)
        for sink in self.graph.sinks:
            first, *others = (built.streams[stream] for stream in sink.streams)
            stream = first.union(*others) if others else first
            (stream.key_by("key") if sink.by_key else stream).to(
                sink.name, site.sink(), parallelism=site.parallelism(sink.name)
            )

    def check(self, rows: Callable[[str], list[Row]], state_of: StateOf, *, exact: bool) -> None:
        written, memory = interpreted(self.graph)
        for sink in self.graph.sinks:
            found, expected = rows(sink.name), written[sink.name]
            if exact:
                expect_rows(sink.name, found, expected)
            else:
                # Numbers may be other ones where something was done twice; ids and keys are not.
                expect_rows(sink.name, [row[:2] for row in found], [row[:2] for row in expected], exact=False)
            if exact and sink.ordered:
                expect_order(sink.name, found, expected, lambda row: row[1])
        for step in self.graph.all_steps():
            step.check(state_of, memory, exact=exact)


class RandomLoops(RandomGraph):
    """A cyclic one: a loop or two, and loops within them."""

    name = "random loops"
    cyclic = True
