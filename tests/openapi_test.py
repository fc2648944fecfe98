"""docs/openapi.json against the server: what it calls valid is taken, what it calls invalid is refused, answers are as it
describes them, nothing ends in a 5xx. Requests come from schemathesis, the same in every run."""

import json
import re

import jsonschema_rs
import pytest
import schemathesis
from hypothesis import Phase, settings
from schemathesis.config import GenerationConfig, ProjectConfig, ProjectsConfig, SchemathesisConfig
from schemathesis.specs.openapi.checks import positive_data_acceptance

from conftest import ROOT, make_tiny
from serving import Server

DESCRIPTION = json.loads((ROOT / "docs" / "openapi.json").read_text())
KEY = "secret"
VOCABULARY = 261
ENDLESS = "/v1/dualdecoder/steps"  # a stream without an end: seen below, by its head and a sample
EXAMPLES = 40  # of each route, beside one of each field's limits


def narrowed(description):
    """What this server takes: its vocabulary, its key. Left out are fields of which a schema cannot say what is sound."""
    narrow = json.loads(json.dumps(description))
    narrow["security"] = [{"key": []}]
    schemas = narrow["components"]["schemas"]
    schemas["TokenId"]["maximum"] = VOCABULARY - 1
    for name in ("ChatRequest", "CompletionRequest"):
        fields = schemas[name]["properties"]
        fields["logit_bias"]["patternProperties"] = {"^[0-9]{1,2}$": fields["logit_bias"]["patternProperties"]["^[0-9]+$"]}
        for field in ("response_format", "grammar", "best_of", "stream_options", "top_logprobs"):
            fields.pop(field, None)
    return narrow


CONFIG = SchemathesisConfig(
    seed=1,
    projects=ProjectsConfig(
        default=ProjectConfig(generation=GenerationConfig(deterministic=True, database="none", no_shrink=True))
    ),
)
schema = schemathesis.openapi.from_dict(narrowed(DESCRIPTION), config=CONFIG)


def shortened(body):
    """A request for a short answer: what is sound, or absent, in the fields that say how long it may be becomes 2."""
    if not isinstance(body, dict):
        return body
    sound = [name for name in ("max_tokens", "max_completion_tokens") if body.get(name) is None or type(body[name]) is int and 0 <= body[name] < 2**63]
    return body | dict.fromkeys(sound, 2)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    model = make_tiny(tmp_path_factory.mktemp("models") / "tiny.gguf")
    with Server(model, "-c", 8192, "--parallel", 8, "--queue", 2000, "--api-key", KEY, "--near-slots", 1024) as running:
        running.key = KEY
        running.probe()
        yield running
        running.probe()


def taken_where_it_fits(context, response, case):
    """What a context holds is nothing that a schema can say."""
    if response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded":
        return None
    return positive_data_acceptance(context, response, case)


@schema.exclude(path=ENDLESS).parametrize()
@settings(max_examples=EXAMPLES, deadline=None, phases=[Phase.explicit, Phase.generate])
def test_the_server_does_what_its_description_says(case, server):
    if case.path.endswith("/completions"):
        case.body = shortened(case.body)
    case.call_and_validate(
        base_url=f"http://{server.host}:{server.port}",
        headers=server.headers(),
        excluded_checks=[positive_data_acceptance],
        additional_checks=[taken_where_it_fits],
    )


def served():
    """{path: method} as the server's own list has them."""
    text = (ROOT / "src" / "serve" / "api.cc").read_text()
    found = re.findall(r'\{"(GET|POST)", "(/[\w/]+)", How::', text)
    assert len(found) >= 10
    return {path: method for method, path in found}


def test_every_route_is_described_and_every_described_one_is_served(server):
    described = {path: [method.upper() for method in item] for path, item in DESCRIPTION["paths"].items()}
    assert described == {path: [method] for path, method in served().items()}
    for path, [method] in described.items():
        asked = "HEAD" if path == ENDLESS else method
        assert server.request(asked, path, b"" if method == "POST" else None).status in (200, 400)
        other = server.request({"GET": "POST", "POST": "GET"}[method], path)
        assert other.status == 405 and other.headers["Allow"] == method and other.error


def test_a_sample_of_a_step_is_as_it_is_described(server):
    wanted = DESCRIPTION["components"]["schemas"]["StepSample"]
    with server.running_stream("Hello there", max_tokens=4000, ignore_eos=True), server.watch_steps() as samples:
        for _, sample in zip(range(2), samples):
            jsonschema_rs.validate(wanted, sample)
            assert set(sample) == set(wanted["properties"])
            assert set(sample["totals"]) == set(wanted["properties"]["totals"]["properties"])
            assert set(sample["sequence"]) == set(wanted["properties"]["sequence"]["properties"])


def test_the_table_of_endpoints_has_every_route():
    rows = re.findall(r"^\| `(GET|POST) (/[\w/]+)` \|", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert {path: method for method, path in rows} == served()


def test_the_fields_of_requests_are_those_of_the_documentation():
    table = (ROOT / "docs" / "api.md").read_text().split("## Fields of a request")[1].split("\n## ")[0]
    cells = re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE)
    documented = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    schemas = DESCRIPTION["components"]["schemas"]
    described = set(schemas["ChatRequest"]["properties"]) | set(schemas["CompletionRequest"]["properties"])
    assert documented <= described, documented - described
