"""The direction of includes between the modules of src/ and apps/, and two limits on every file in them."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
# A file may include its own module and those of earlier lines; modules on one line do not know each other.
LAYERS = [
    {"base"},
    {"kv", "products"},
    {"attention"},
    {"model", "select", "transfer", "peer", "tasks"},
    {"decode"},
    {"serve"},
    {"apps"},
]
LAYER_OF = {module: layer for layer, modules in enumerate(LAYERS) for module in modules}
ORDER = " <- ".join(" | ".join(sorted(modules)) for modules in LAYERS)
MAX_LINES = 700
INCLUDE = re.compile(r'\s*#\s*include\s*"([^"]+)"')


def module_of(path):
    parts = pathlib.PurePosixPath(path).parts
    return parts[1] if parts[0] == "src" else parts[0]


def violations(path, text):
    """What is wrong with a file, given its path from the root of the repository: a list of 'path:line: rule'."""
    module = module_of(path)
    if module not in LAYER_OF:
        return [f"{path}:1: '{module}' is no module; the modules are {ORDER}"]
    lines = text.splitlines()
    found = []
    for number, line in enumerate(lines, start=1):
        if "\t" in line:
            found.append(f"{path}:{number}: no tabs")
        include = INCLUDE.match(line)
        if not include:
            continue
        target = include[1].split("/")[0]
        if module == "apps" and "/" not in include[1]:
            continue  # a header next to an application's source
        if target not in LAYER_OF:
            found.append(
                f'{path}:{number}: "{include[1]}" does not begin with a module:'
                " own headers are included relative to src/, all others in <>"
            )
        elif target != module and LAYER_OF[target] >= LAYER_OF[module]:
            found.append(f"{path}:{number}: {module} must not include {target} ({ORDER})")
    if len(lines) > MAX_LINES:
        found.append(f"{path}:{MAX_LINES + 1}: no file is longer than {MAX_LINES} lines (it has {len(lines)})")
    return found


def test_sources():
    files = [f for top in ("src", "apps") for f in sorted((ROOT / top).rglob("*")) if f.suffix in {".h", ".cc"}]
    assert files
    found = [v for f in files for v in violations(f.relative_to(ROOT).as_posix(), f.read_text())]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    "path, text",
    [
        ("src/kv/a.cc", '#include "kv/a.h"\n#include "base/check.h"\n#include <select/system.h>\n'),
        ("src/decode/a.cc", '#include "select/a.h"\n#include "transfer/a.h"\n// #include "serve/a.h"\n'),
        ("apps/dualdecoder/main.cc", '#include "run.h"\n#include "serve/server.h"\n'),
        ("src/base/a.h", "\n" * MAX_LINES),
    ],
)
def test_accepts(path, text):
    assert violations(path, text) == []


@pytest.mark.parametrize(
    "path, text, expected",
    [
        ("src/base/a.h", '#include "kv/a.h"', "src/base/a.h:1: base must not include kv"),
        ("src/kv/a.cc", '\n  #  include "decode/a.h"', "src/kv/a.cc:2: kv must not include decode"),
        ("src/select/a.cc", '#include "transfer/a.h"', "src/select/a.cc:1: select must not include transfer"),
        ("src/kv/a.cc", '#include "a.h"', 'src/kv/a.cc:1: "a.h" does not begin with a module'),
        ("src/kv/a.cc", '#include "../base/a.h"', 'src/kv/a.cc:1: "../base/a.h" does not begin'),
        ("src/util/a.h", "", "src/util/a.h:1: 'util' is no module"),
        ("src/kv/a.h", "int x;\n\tint y;", "src/kv/a.h:2: no tabs"),
        ("apps/x/a.cc", "\n" * (MAX_LINES + 1), "apps/x/a.cc:701: no file is longer than 700 lines"),
    ],
)
def test_refuses(path, text, expected):
    (found,) = violations(path, text)
    assert found.startswith(expected)
