"""Reads the text of a compiled program: computations, instructions, sizes, loops."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter

_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+)(?: \(.*)? \{$")
_INSTRUCTION = re.compile(r"(ROOT )?%?([\w.\-]+) = (.+)$")
_OPCODE = re.compile(r" *([\w\-]+)\(")
_METADATA = re.compile(r', metadata=\{(?:"[^"]*"|[^"}])*\}')
_COMMENT = re.compile(r"/\*.*?\*/")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\]")
_KNOWN_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


@dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: without the percent sign.
      shape: such as ``f32[8,128]{1,0}``, or a tuple of them in parentheses.
      opcode: such as ``all-gather-start``.
      operands: names of instructions; of a constant its value.
      attributes: what follows the operands, without metadata.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str


@dataclass(frozen=True)
class Program:
    """The computations of a module.

    Attributes:
      entry: name of the computation that runs first.
      computations: instructions by name, by name of the computation, in its order.
      roots: name of the result of each computation.
    """

    entry: str
    computations: dict[str, dict[str, Instruction]]
    roots: dict[str, str]


@dataclass(frozen=True)
class Runs:
    """How often a computation runs.

    Attributes:
      times: None if a loop around it has an unknown number of trips.
      conditional: whether it is a branch, which may run less often than that.
    """

    times: int | None = 0
    conditional: bool = False


def parse_program(text: str) -> Program:
    """Reads the text of a module.

    Args:
      text: of `compiled.as_text()`.

    Returns:
      Its computations.

    Raises:
      ValueError: if it has no entry computation or an instruction breaks off.

    Example:
      >>> text = "ENTRY main (x: f32[4]) -> f32[4] {\\n ROOT x = f32[4] parameter(0)\\n}"
      >>> parse_program(text).computations["main"]["x"].opcode
      'parameter'
    """
    entry, computations, roots, current = None, {}, {}, ""
    for line in text.splitlines():
        line = _COMMENT.sub("", line).strip()
        if header := _COMPUTATION.match(line):
            current = header[2]
            computations[current] = {}
            if line.startswith("ENTRY"):
                entry = current
        elif current and (match := _INSTRUCTION.match(line)):
            instruction = _parse_instruction(match[2], _METADATA.sub("", match[3]))
            computations[current][instruction.name] = instruction
            if match[1]:
                roots[current] = instruction.name
    if entry is None:
        raise ValueError(
            "the text of a compiled program must have an ENTRY computation, got"
            f" {text[:60]!r}. Give jax.jit(fn).lower(...).compile() or its as_text()."
        )
    return Program(entry, computations, roots)


def _parse_instruction(name: str, text: str) -> Instruction:
    end = _closing(text, 0) if text.startswith("(") else text.find(" ")
    opcode = _OPCODE.match(text, max(end, 0))
    if opcode is None:
        raise _broken(text)
    start = opcode.end() - 1
    stop = _closing(text, start)
    operands = split_top(text[start + 1 : stop - 1])
    names = tuple(part.split()[-1].lstrip("%") for part in operands)
    return Instruction(name, text[:end], opcode[1], names, text[stop:])


def _closing(text: str, start: int) -> int:
    """The place after the parenthesis that closes the one at `start`."""
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if depth == 0:
            return place + 1
    raise _broken(text)


def _broken(text: str) -> ValueError:
    return ValueError(
        "an instruction must read `name = shape opcode(operands), ...`, got"
        f" {text[:80]!r}. Give the whole text of compiled.as_text()."
    )


def split_top(text: str) -> list[str]:
    """Splits at the commas outside of all brackets.

    Args:
      text: such as the operands of an instruction.

    Returns:
      The parts, without space around them; empty for an empty text.

    Example:
      >>> split_top("f32[2,4]{1,0} %a, (s32[], f32[2]) %b")
      ['f32[2,4]{1,0} %a', '(s32[], f32[2]) %b']
    """
    parts, depth, start = [], 0, 0
    for place, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            parts.append(text[start:place].strip())
            start = place + 1
    last = text[start:].strip()
    return [*parts, last] if last else parts


def tuple_shapes(shape: str) -> list[str]:
    """The shapes in a tuple shape.

    Args:
      shape: with parentheses around it.

    Returns:
      One shape each.

    Example:
      >>> tuple_shapes("(f32[2]{0}, (s32[], u32[]))")
      ['f32[2]{0}', '(s32[], u32[])']
    """
    return split_top(shape[1:-1])


def shape_bytes(shape: str) -> int:
    """The bytes of a shape, without the padding of its layout.

    Args:
      shape: of an array or a tuple, nested or not.

    Returns:
      Bytes; tokens have none.

    Example:
      >>> shape_bytes("(bf16[8,128]{1,0:T(8,128)}, s32[], token[])")
      2052
    """
    total = 0
    for dtype, dims in _ARRAY.findall(shape):
        sizes = [int(dim.lstrip("<=")) for dim in dims.split(",") if dim]
        total += -(-math.prod(sizes) * _bits(dtype) // 8)
    return total


def _bits(dtype: str) -> int:
    if match := re.search(r"\d+", dtype):
        return int(match[0])
    return 8 if dtype == "pred" else 0


def called(instruction: Instruction, key: str) -> list[str]:
    """Computations that an attribute of an instruction names.

    Args:
      instruction: any.
      key: of the attribute, such as ``body``.

    Returns:
      Their names; empty without such an attribute.
    """
    match = re.search(rf"\b{key}=(\{{[^}}]*\}}|%?[\w.\-]+)", instruction.attributes)
    return re.findall(r"[\w.\-]+", match[1]) if match else []


def count_runs(program: Program) -> dict[str, Runs]:
    """Counts how often each computation runs when the program runs once.

    Args:
      program: of `parse_program`.

    Returns:
      Runs by name of the computation; those of reducers are not counted.
    """
    calls = {name: list(_calls(program, name)) for name in program.computations}
    graph = {name: {call[0] for call in found} for name, found in calls.items()}
    runs = dict.fromkeys(program.computations, Runs())
    runs[program.entry] = Runs(1)
    for caller in reversed(list(TopologicalSorter(graph).static_order())):
        for callee, times, branch in calls[caller]:
            runs[callee] = _add_runs(runs[callee], runs[caller], times, branch)
    return runs


def _add_runs(callee: Runs, caller: Runs, times: int | None, branch: bool) -> Runs:
    if caller.times == 0 or times == 0:
        return callee
    conditional = callee.conditional or caller.conditional or branch
    if callee.times is None or caller.times is None or times is None:
        return Runs(None, conditional)
    return Runs(callee.times + caller.times * times, conditional)


def _calls(program: Program, name: str) -> Iterator[tuple[str, int | None, bool]]:
    """What the instructions of a computation call: name, times, whether a branch."""
    for instruction in program.computations[name].values():
        for callee, times, branch in _called_by(program, name, instruction):
            if callee in program.computations:
                yield callee, times, branch


def _called_by(program: Program, name: str, instruction: Instruction):
    if instruction.opcode == "while":
        trips = trip_count(program, name, instruction)
        yield from ((c, trips, False) for c in called(instruction, "body"))
        tests = None if trips is None else trips + 1
        yield from ((c, tests, False) for c in called(instruction, "condition"))
    elif instruction.opcode == "conditional":
        for key in ("branch_computations", "true_computation", "false_computation"):
            yield from ((c, 1, True) for c in called(instruction, key))
    else:
        keys = ["calls", "called_computations"]
        keys += ["to_apply"] * (instruction.opcode == "call")
        for key in keys:
            yield from ((c, 1, False) for c in called(instruction, key))


def trip_count(program: Program, name: str, loop: Instruction) -> int | None:
    """Finds how many trips a while loop makes.

    CPU and GPU programs say it. In those of TPUs it follows from the loop's counter: its
    first value, what is added, and the constant that the condition compares with.

    Args:
      program: that has the loop.
      name: of the computation that has the loop.
      loop: the instruction.

    Returns:
      Trips, or None if they are not known before it runs.
    """
    if match := _KNOWN_TRIPS.search(loop.attributes):
        return int(match[1])
    (condition,), (body,) = called(loop, "condition"), called(loop, "body")
    test = _root(program, condition)
    if test is None or test.opcode != "compare" or "=LT" not in test.attributes:
        return None
    place = _place(program, condition, test.operands[0])
    if place is None:
        return None
    start = _constant(program, name, _element(program, name, loop.operands[0], place))
    limit = _constant(program, condition, test.operands[1])
    step = _step(program, body, place)
    if start is None or limit is None or step is None or step <= 0:
        return None
    return max(0, -(-(limit - start) // step))


def _root(program: Program, name: str) -> Instruction | None:
    return program.computations[name].get(program.roots.get(name, ""))


def _step(program: Program, body: str, place: int) -> int | None:
    """What a loop's body adds to a part of its carry, if that is a constant."""
    root = _root(program, body)
    result = _element(program, body, root.name, place) if root else None
    add = program.computations[body].get(result or "")
    if add is None or add.opcode != "add":
        return None
    if _place(program, body, add.operands[0]) != place:
        return None
    return _constant(program, body, add.operands[1])


def _element(program: Program, name: str, source: str, place: int) -> str | None:
    found = program.computations[name].get(source)
    return found.operands[place] if found and found.opcode == "tuple" else None


def _place(program: Program, name: str, source: str) -> int | None:
    """Which part of a computation's parameter an instruction is."""
    found = _original(program, name, source)
    if found is None or found.opcode != "get-tuple-element":
        return None
    tuple_ = program.computations[name].get(found.operands[0])
    if tuple_ is None or tuple_.opcode != "parameter":
        return None
    match = re.search(r"\bindex=(\d+)", found.attributes)
    return int(match[1]) if match else None


def _constant(program: Program, name: str, source: str | None) -> int | None:
    found = _original(program, name, source or "")
    if found is None or found.opcode != "constant":
        return None
    return int(found.operands[0]) if re.match(r"[su]\d+\[\]", found.shape) else None


def _original(program: Program, name: str, source: str) -> Instruction | None:
    """The instruction, or what it is a copy of."""
    found = program.computations[name].get(source)
    while found is not None and found.opcode == "copy":
        found = program.computations[name].get(found.operands[0])
    return found
