"""`dualdecoder serve` as those meet it who run it: its configuration."""

import pytest

from conftest import dualdecoder, make_tiny
from serving import Server


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny.gguf")


def written(path, text):
    path.write_text(text)
    return path


# ---- --config


def test_a_config_file_counts_where_neither_the_command_line_nor_the_environment_says_anything(model, tmp_path):
    config = written(
        tmp_path / "serve.conf",
        "# a comment\n\nctx-size = 1k\nparallel=2\n  queue = 7 \nalias = \"from the file\"\nbatch-invariant = true\n"
        "api-key = a b#c,d\napi-key = second\nblock-size = 16\n",
    )
    environment = {"DUALDECODER_QUEUE": "8", "DUALDECODER_PARALLEL": "3"}
    with Server(model, "--config", config, "--parallel", 4, env=environment) as server:
        assert server.get("/props").status == 401
        for server.key in ("second", "a b#c,d"):
            props = server.get("/props").json
            assert (props["sequences"], props["queue"], props["context"], props["block_tokens"]) == (4, 8, 1024, 16)
            assert props["model"] == "from the file"
    with Server(model, env={"DUALDECODER_CONFIG": str(config)}) as server:
        server.key = "second"
        props = server.get("/props").json
        assert (props["sequences"], props["queue"]) == (2, 7)


def test_the_model_may_be_named_in_the_file(model, tmp_path):
    result = dualdecoder("serve", "--config", written(tmp_path / "conf", f"model = {tmp_path}/none.gguf\n"), timeout=20)
    assert result.code == 1 and len(result.errors) == 1 and "none.gguf" in result.stderr


@pytest.mark.parametrize(
    "text, part",
    [
        ("port = 0\nprot = 1\n", ":2: there is no option --prot"),
        ("help = true\n", ":1: there is no option --help"),
        ("config = other\n", ":1: there is no option --config"),
        ("[server]\nport = 0\n", ":1: wanted is NAME = VALUE"),
        ("port = many\n", "--port"),
        ("port = 70000\n", "--port"),
        ("port = 1\nport = 2\n", "--port"),
        ("block-size = 17\n", "--block-size"),
        (None, "missing.conf"),
    ],
)
def test_what_is_wrong_in_a_config_file_is_one_clear_error(model, tmp_path, text, part):
    config = tmp_path / "missing.conf" if text is None else written(tmp_path / "serve.conf", text)
    result = dualdecoder("serve", "-m", model, "--config", config, timeout=20)
    assert result.code == 2 and len(result.errors) == 1 and part in result.stderr, result.stderr
    assert result.stderr.startswith("dualdecoder: ")
