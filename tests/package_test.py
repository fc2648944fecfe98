"""The Debian package: what is in it, what it depends on, and that the program in it runs without this checkout."""

import os
import pathlib
import re
import shutil
import subprocess

import pytest

from conftest import BUILD, ROOT, make_tiny

NEEDED = {"libc6", "libstdc++6", "libgcc-s1", "libgomp1", "libfmt9", "libhwy1", "liburing2", "libsqlite3-0"}


def output(*command, **options):
    return subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE, text=True, timeout=120, **options).stdout


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    directory = tmp_path_factory.mktemp("package")
    output("cpack", "-G", "DEB", "-B", directory, cwd=BUILD)
    [made] = directory.glob("dualdecoder_*.deb")
    return made


@pytest.fixture(scope="module")
def root(package, tmp_path_factory):
    """Where it has been unpacked."""
    directory = tmp_path_factory.mktemp("root")
    output("dpkg-deb", "-x", package, directory)
    return directory


def test_it_says_what_it_is_and_depends_on_what_it_uses(package):
    assert output("dpkg-deb", "-f", package, "Package").strip() == "dualdecoder"
    version = re.search(r"project\(dualdecoder VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text())[1]
    assert output("dpkg-deb", "-f", package, "Version").strip() == version
    depends = {entry.split()[0] for entry in output("dpkg-deb", "-f", package, "Depends").split(",")}
    assert NEEDED <= depends, depends
    assert any(name.startswith("libprometheus-cpp-core") for name in depends)


def test_it_holds_the_program_its_libraries_the_unit_and_documentation(root):
    files = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    documentation = {f"usr/share/doc/dualdecoder/{name}" for name in ("operating.md", "api.md", "openapi.json", "copyright")}
    assert {"usr/bin/dualdecoder", "lib/systemd/system/dualdecoder.service"} | documentation <= files | {
        path.removeprefix("usr/") for path in files
    }
    libraries = {path.split("/")[-1].split(".so")[0] for path in files if path.startswith("usr/lib/dualdecoder/")}
    assert libraries == {"libllama", "libggml", "libggml-base", "libggml-cpu", "libggml-rpc"}


def test_every_library_is_found_in_the_package_or_the_system(root):
    program = root / "usr" / "bin" / "dualdecoder"
    found = output("ldd", program, env={})
    assert "not found" not in found
    for name in ("libllama", "libggml", "libggml-base", "libggml-cpu"):
        [path] = re.findall(rf"{name}\.so\.\d+ => (\S+)", found)
        assert pathlib.Path(path).resolve().is_relative_to(root), path
    assert ".venv" not in found and "site-packages" not in found
    assert re.search(r"RUNPATH.*\[\$ORIGIN/\.\./lib/dualdecoder\]", output("readelf", "-d", program))


def test_it_makes_an_answer_where_the_checkout_cannot_be_seen(root, tmp_path):
    model = make_tiny(tmp_path / "tiny.gguf", "--drop-key", "tokenizer.chat_template")
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(root, elsewhere)
    program = elsewhere / "usr" / "bin" / "dualdecoder"
    assert output(program, "--version", env={}, cwd="/").startswith("dualdecoder ")
    trace = output("env", "-i", "LD_DEBUG=files", program, "run", "-m", model, "-t", 1, "-p", "Hello", "-n", 4, "--temp", 0,
                   cwd="/", stderr=subprocess.STDOUT)  # fmt: skip
    opened = re.findall(r"calling init: (\S+)", trace)
    assert any(os.path.realpath(path).startswith(os.path.realpath(elsewhere)) for path in opened)
    assert not [path for path in opened if os.path.realpath(path).startswith(os.path.realpath(ROOT / ".venv"))]
    assert "answer 4 tokens" in trace
