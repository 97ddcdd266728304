#!/usr/bin/env python3
"""Checks what the compiler cannot: imports run down the floors, and no banned function is called.

A room may include itself and the rooms below it (docs/design.md). Prints each offence as file:line and
exits 1 when there is one.
"""
import pathlib
import re
import sys

BELOW = {
    "base": [],
    "tensor": ["base"],
    "format": ["base", "tensor"],
    "weights": ["base", "tensor", "format"],
    "transport": ["base", "tensor", "format", "weights"],
    "kernels": ["base", "tensor", "format"],
    "publish": ["base", "tensor", "format", "weights", "transport"],
    "model": ["base", "tensor", "format", "weights", "kernels"],
    "engine": ["base", "tensor", "format", "weights", "kernels", "model"],
    "text": ["base", "tensor", "format"],
    "server": ["base", "tensor", "format", "engine", "text"],
    "cli": ["base", "tensor", "format", "weights", "transport", "kernels", "publish", "model", "engine", "text", "server"],
}
BANNED = re.compile(r"\b(sprintf|vsprintf|strcpy|strcat|strtok|gets|alloca|rand|system|atoi|atof)\s*\(")
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"/]+)/[^"]+"')


def offences(root: pathlib.Path):
    for path in sorted(root.joinpath("src").rglob("*.[ch]")):
        room = path.relative_to(root / "src").parts[0]
        if room not in BELOW:
            yield f"{path}: the room '{room}' is on no floor; add it to {sys.argv[0]}"
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            include = INCLUDE.match(line)
            if include and include.group(1) != room and include.group(1) not in BELOW[room]:
                yield f"{path}:{number}: {room} must not include {include.group(1)}"
            code = re.sub(r'"(\\.|[^"\\])*"', '""', line.split("//")[0])
            if not code.lstrip().startswith(("*", "/*")) and BANNED.search(code):
                yield f"{path}:{number}: banned function: {BANNED.search(code).group(1)}"


def main() -> int:
    found = list(offences(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ".")))
    print("\n".join(found) if found else "floors: clean")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
