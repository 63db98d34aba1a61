"""Rewrite the inline PTX of a CUDA text into calls of the stand-ins in ``souffle_ptx.h``.

Only ``asm`` statements change; everything else stays byte for byte, and lines keep their numbers.
"""

from __future__ import annotations

import re

from souffle.emulator.ptx_instructions import AsmOperand, AsmStatement, split_list, translate_instruction
from souffle.emulator.text_scan import blank_comments, matching
from souffle.errors import CudaCompileError

__all__ = ["translate_asm"]

_STATEMENT = re.compile(r"(?<!define )\b(?:asm|__asm__|__asm)\b(?:[\s\\]*\b(?:volatile|__volatile__|goto)\b)*[\s\\]*\(")
_STRING = re.compile(r'"((?:\\.|[^"\\])*)"')
_OPERAND = re.compile(r'\s*(?:\[\s*(\w+)\s*\]\s*)?"([^"]*)"\s*\((.*)\)\s*$', re.DOTALL)
_DECLARATION = re.compile(r"\.reg\s+(?:\.v[24]\s+)?\.(\w+)\s+(.*)")
_ESCAPES = {"n": "\n", "t": "\t", "\\": "\\", '"': '"', "r": "", "0": ""}


def _instructions(template: str) -> list[str]:
    """Split a PTX text into its instructions; the braces of scopes are left out."""
    template = re.sub(r"//[^\n]*|/\*.*?\*/", " ", template, flags=re.DOTALL)
    parts, start, depth = [], 0, 0
    for i, c in enumerate(template):
        if c in "{}" and depth == 0 and not template[start:i].strip():
            start = i + 1
        elif c in "{[":
            depth += 1
        elif c in "}]":
            depth -= 1
        elif c == ";" and depth == 0:
            parts.append(template[start:i])
            start = i + 1
    parts.append(template[start:])
    return [" ".join(part.split()) for part in parts if part.strip()]


def _split_outside_strings(text: str, separator: str) -> list[str]:
    code = blank_comments(text)
    parts, depth, start = [], 0, 0
    for i, c in enumerate(code):
        depth += (c in "{[(") - (c in "}])")
        if c == separator and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    parts.append(text[start:])
    return parts


def _operands(text: str, line: int) -> list[AsmOperand]:
    found = []
    for part in _split_outside_strings(text, ","):
        if not part.strip():
            continue
        match = _OPERAND.match(part)
        if match is None:
            raise CudaCompileError(f"line {line}: the operand `{part.strip()}` of an asm statement cannot be read")
        found.append(AsmOperand(match.group(2), " ".join(match.group(3).split("\n")).strip(), match.group(1)))
    return found


def _letter(operand: AsmOperand, line: int) -> str:
    letter = operand.constraint.lstrip("=+&%")
    if letter not in ("r", "h", "l", "f", "d", "n"):
        raise CudaCompileError(f'line {line}: the constraint "{operand.constraint}" of an asm operand is not known')
    return letter


def _registers(instructions: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for instruction in instructions:
        declared = _DECLARATION.match(instruction)
        for name in split_list(declared.group(2)) if declared else ():
            counted = re.fullmatch(r"%?(\w+)<(\d+)>", name)
            names = [f"{counted.group(1)}{i}" for i in range(int(counted.group(2)))] if counted else [name.lstrip("%")]
            found.update(dict.fromkeys(names, declared.group(1)))
    return found


def _translate_statement(body: str, line: int) -> str:
    fields = _split_outside_strings(body, ":")
    if _STRING.sub("", fields[0]).strip():
        raise CudaCompileError(f"line {line}: the template of an asm statement is not made of plain strings")
    strings = "".join(_STRING.findall(fields[0]))
    template = re.sub(r"\\(.)", lambda m: _ESCAPES.get(m.group(1), m.group(0)), strings, flags=re.DOTALL)
    if len(fields) > 1:
        template = template.replace("%%", "%")
    fields += ["", ""]
    outputs = _operands(fields[1], line)
    operands = (*outputs, *_operands(fields[2], line))
    instructions = _instructions(template)
    asm = AsmStatement(operands, _registers(instructions), line)
    code = []
    for i, operand in enumerate(operands):
        letter = _letter(operand, line)
        written_only = i < len(outputs) and not operand.constraint.startswith("+")
        start = "0" if written_only else f"souffle_in_{letter}({operand.expression})"
        code.append(f"souffle_reg souffle_o{i} = {start};")
    code += [f"souffle_reg souffle_v_{name} = 0;" for name in asm.registers]
    code += [translate_instruction(asm, text) for text in instructions if not text.startswith(".reg")]
    for i, operand in enumerate(outputs):
        code.append(f"souffle_out_{_letter(operand, line)}({operand.expression}, souffle_o{i});")
    return "do { " + " ".join(code) + " } while (0)"


def translate_asm(text: str) -> str:
    """Rewrite every ``asm`` statement of a CUDA text into C++.

    Parameters
    ----------
    text
        CUDA C++ text.

    Returns
    -------
    str
        The same text where each ``asm`` statement is a statement of calls to stand-ins, on as many lines as before.

    Raises
    ------
    CudaCompileError
        An instruction, a constraint or an operand has no stand-in; the message names it and its line.
    """
    code = blank_comments(text)
    out, done = [], 0
    for match in _STATEMENT.finditer(code):
        if match.start() < done:
            continue
        line = text.count("\n", 0, match.start()) + 1
        close = matching(code, match.end() - 1)
        if close < 0:
            raise CudaCompileError(f"line {line}: an asm statement is not closed")
        span = text[match.start() : close + 1]
        body = re.sub(r"\\\n", "\n", text[match.end() : close])
        out += [text[done : match.start()], _translate_statement(blank_comments(body, strings=False), line)]
        # Line numbers stay: within a macro the line ends are escaped, and stay so.
        out.append("".join(re.findall(r"\\?\n", span)))
        done = close + 1
    out.append(text[done:])
    return "".join(out)
