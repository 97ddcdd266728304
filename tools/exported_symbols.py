#!/usr/bin/env python3
"""Writes the linker's version script of libheadrace: the functions that the given headers declare, and no other.

The headers are the one list of what is public; a symbol of the library that stands in none of them stays inside.
"""
import pathlib
import re
import sys

COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.S)
DECLARATION = re.compile(r"^[a-z][\w \*]*?\b(hr_\w+)\(", re.M)


def main() -> int:
    names = set()
    for header in sys.argv[1:]:
        text = COMMENT.sub("", pathlib.Path(header).read_text())
        names.update(match.group(1) for match in DECLARATION.finditer(text) if not match.group(0).startswith("typedef"))
    print("HEADRACE_0 {\n  global:")
    print("".join(f"    {name};\n" for name in sorted(names)), end="")
    print("  local: *;\n};")
    return 0 if names else 1


if __name__ == "__main__":
    sys.exit(main())
