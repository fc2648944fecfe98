"""The web page in a real browser against the real server and model. One part is not real: where the model's answer must be
hostile, a scripted server stands in for /v1/chat/completions and hands everything else on."""

import contextlib
import http.server
import itertools
import json
import re
import signal
import threading
import time

import pytest
from selenium.webdriver import ActionChains
from selenium.webdriver.common.keys import Keys

from browser import DESKTOP, PHONE, Browser
from conftest import ROOT, make_tiny
from serving import Server

MODEL = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
LOGBOOK = ROOT / "demo" / "lighthouse-logbook.md"
WEIGHT_MAX = 300 * 1024
# Hardly anything near, so that there is something to see: blocks are fetched, late and missed.
TIERS = ("-c", 8192, "--np", 2, "--policy", "dual", "--budget", 2048, "--near-slots", 2304, "--no-measure")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    far = tmp_path_factory.mktemp("far")
    with Server(MODEL, *TIERS, "--far", f"file:{far}", threads=2) as running:
        yield running


@pytest.fixture(scope="module")
def base(server):
    return address(server)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.quit()


@pytest.fixture
def browser(chromium):
    chromium.take_logs()
    chromium.asked, chromium.said = [], []
    yield chromium
    chromium.driver.get("about:blank")
    chromium.take_logs()
    # No test asks any host but this machine, or breaks the page's own rules.
    foreign = [url for url in chromium.asked if not url.startswith(("http://127.0.0.1:", "about:", "data:", "chrome"))]
    assert foreign == []
    broken = [line for line in chromium.said if "Content Security Policy" in line or "Uncaught" in line]
    assert broken == []


def address(server):
    return f"http://{server.host}:{server.port}"


def opened(browser, base):
    """As somebody sees it who comes for the first time; greedy."""
    browser.forget(base)
    browser.open(base)
    browser.wait_for_text("#state", "ready")
    browser.set("temperature", 0)
    return browser


def new_conversation(browser):
    browser.button("New conversation").click()
    browser.wait(lambda: not browser.all(".message"))


# ---- What is served


def test_the_page_may_run_its_own_scripts_alone_and_weighs_little(server, browser, base):
    opened(browser, base)
    loaded = browser.run("return performance.getEntriesByType('resource').map((entry) => new URL(entry.name).pathname)")
    files = {"/", *(path for path in loaded if path.startswith("/web/"))}
    assert len(files) > 10
    weight = 0
    for path in files:
        reply = server.get(path)
        assert reply.status == 200
        policy = dict(part.split(" ", 1) for part in reply.headers["Content-Security-Policy"].split("; "))
        assert policy == {"default-src": "'none'", "script-src": "'self'", "style-src": "'self'", "connect-src": "'self'",
                          "img-src": "'self' data:", "base-uri": "'none'", "form-action": "'none'",
                          "frame-ancestors": "'none'"}  # fmt: skip
        assert reply.headers["X-Content-Type-Options"] == "nosniff"
        assert reply.headers["Referrer-Policy"] == "no-referrer"
        assert reply.headers["Cache-Control"] == "no-cache"
        weight += len(reply.body)
        again = server.get(path, **{"If-None-Match": reply.headers["ETag"]})
        assert again.status == 304 and again.body == b""
        assert server.get(path, **{"If-None-Match": '"another"'}).status == 200
        assert server.post(path, {}).status == 405
    assert weight <= WEIGHT_MAX


def test_a_server_without_the_page_has_nothing_there(tiny_model):
    with Server(tiny_model, "-c", 512, "--no-web") as server:
        for path in ("/", "/web/app.js"):
            assert server.get(path).status == 404


# ---- The steps, and the live view of them


def test_steps_want_the_key_and_do_not_hold_up_the_end(tiny_model):
    with Server(tiny_model, "-c", 512, "--api-key", "secret") as server:
        assert server.get("/v1/dualdecoder/steps").status == 401
        server.key = "secret"
        connection = server.connect()
        connection.request("GET", "/v1/dualdecoder/steps", headers=server.headers())
        assert connection.getresponse().readline() == b": still here\n"
        begin = time.monotonic()
        assert server.stop(signal.SIGTERM) == 0
        assert time.monotonic() - begin < 5


# ---- A conversation


def test_a_conversation_over_a_long_document(browser, base):
    opened(browser, base)
    browser.check("empty")
    browser.find("#show-live").click()
    browser.find("#file").send_keys(str(LOGBOOK))
    browser.wait_for_text("#documents", "lighthouse-logbook.md")
    browser.wait_for_text("#tokens", "about 5,")
    browser.screenshot("document-added")
    browser.send("What is the access code of the boathouse door?")
    browser.wait_for_text(".message:last-child .below", "s left", 60)
    shown = browser.text(".message:last-child .below")
    assert "Reading: " in shown and "of 5," in shown
    browser.wait_for_text("#tokens", "about 5,")  # it counts before the server has told
    browser.screenshot("reading")
    answer = browser.wait_for_answer(120)
    assert "48213" in answer["text"], answer
    assert "0 of them from the cache" in answer["meta"] and "a second" in answer["meta"]
    browser.wait_for_text("#figures", "tokens")
    browser.check("answered")

    # Only what is new is computed.
    answer = browser.ask("What is the name of the lifeboat?")
    assert cached(answer) > 5000, answer
    assert len(browser.messages()) == 4

    # Edited, the document is found again, and what followed is gone.
    browser.all(".message")[2].find_element("css selector", "button[aria-label='Edit this message']").click()
    field = browser.find(".message textarea")
    field.clear()
    browser.check("editing")
    field.send_keys("Who was the last keeper?", Keys.ENTER)
    browser.wait(browser.busy)
    answer = browser.wait_for_answer()
    assert cached(answer) > 5000, answer
    messages = browser.messages()
    assert len(messages) == 4 and messages[2] == "Who was the last keeper?"

    # The document can be looked at, and everything is there after a reload.
    browser.driver.refresh()
    browser.wait_for_text("#state", "ready")
    browser.wait(lambda: browser.messages() == messages)
    browser.find(".document summary").click()
    browser.wait(lambda: browser.text(".document pre") == LOGBOOK.read_text())
    assert browser.text("#conversations .open[aria-current]").startswith("What is the access code")


def cached(answer):
    return int(answer["meta"].split(" of them")[0].split()[-1].replace(",", ""))


def test_samples_of_steps_say_what_happened_and_cost_little(server):
    before = server.gauge("generation_tokens_total")
    # The prompt begins as that of the page's conversation, and is found in the cache.
    message = {"role": "user", "content": LOGBOOK.read_text() + "\n\nTell me everything."}
    answer = server.stream("/v1/chat/completions", {"messages": [message], "max_tokens": 2000, "ignore_eos": True, "seed": 1})
    with contextlib.closing(answer), server.watch_steps() as samples:
        next(answer)
        first, *rest = itertools.islice(samples, 9)
    server.wait_for("num_requests_running", 0, 10)
    for one, next_one in zip([first, *rest], rest):
        assert next_one["totals"]["steps"] > one["totals"]["steps"]
        # Sampled, not every step: a quarter of a second lies between the beginnings of two that are seen.
        begin, next_begin = (sample["time_ms"] - sample["timeline"]["ms"] for sample in (one, next_one))
        assert next_begin - begin >= 249
    last = rest[-1]
    assert last["running"] == 1 and last["waiting"] == 0
    assert last["totals"]["tokens"] > before
    assert 0 < last["near"]["bytes_used"] <= last["near"]["bytes"] and 0 < last["far"]["bytes_used"] <= last["far"]["bytes"]
    sequence = last["sequence"]
    assert sequence["policy"] == "dual" and sequence["budget_tokens"] == 2048
    assert 0 < sequence["near_bytes"] <= last["near"]["bytes"]
    rows = sequence["map"]["rows"]
    assert len(rows) == 30 and {len(row) for row in rows} == {sequence["map"]["blocks"]}
    assert sequence["map"]["blocks"] == -(-(sequence["tokens"] + 2) // sequence["block_tokens"])
    letters = set("".join(row for sample in rest for row in sample["sequence"]["map"]["rows"]))
    assert {"a", "f", "-"} <= letters <= set("-nasflm"), letters
    assert all(row[0] == "a" and row[-1] in "a-" for row in rows)  # the window
    timeline = last["timeline"]
    names = [timeline["names"][event[0]] for event in timeline["events"]]
    assert names.count("attend") == 30 and "project" in names and "predicted" in names
    assert timeline["dropped"] == 0
    assert all(-1000 <= event[3] and event[3] + event[4] <= timeline["ms"] * 1000 + 1 for event in timeline["events"] if event[1] == 0)
    # What it takes of the engine's thread, of the time between two samples.
    cost = sorted(sample["sampling_us"] for sample in rest)[len(rest) // 2]
    assert cost < 0.01 * 250_000, cost


def test_samples_say_what_auto_chose_and_why():
    options = ["--policy", "auto", "--budget", 64, "--recent-tokens", 32, "--sink-tokens", 32, "-c", 2048, "--no-measure"]
    with Server(MODEL, *options) as server:
        story = {"prompt": "Tell me a long story about the sea. " * 20, "max_tokens": 1000, "ignore_eos": True, "seed": 1}
        answer = server.stream("/v1/completions", story)
        with contextlib.closing(answer), server.watch_steps() as samples:
            next(answer)
            chosen = next(sample["auto"] for sample in samples if "; " in sample["auto"])
    assert re.fullmatch(r"(previous|dual|accept) \([\d.]+ ms a token; .*\)", chosen), chosen


def test_the_live_view_shows_the_tiers_at_work(browser, base):
    opened(browser, base)
    browser.set("max_tokens", 300)
    browser.find("#show-live").click()
    browser.find("#file").send_keys(str(LOGBOOK))
    browser.send("Tell me about the storm of the year 1904, and what was cooked.")
    browser.wait_for_text("#map-legend", "read ahead for this step", 90)
    browser.wait(lambda: figures(browser)["Tokens a second"] not in ("–", ""), 30)
    browser.check("live")
    browser.look_like((1360, 1090))
    time.sleep(0.5)  # for a sample
    browser.screenshot("readme")
    browser.look_like()
    browser.find("#stop").click()
    browser.wait_for_answer()
    shown = figures(browser)
    assert float(shown["Tokens a second"]) > 0 and shown["Recall of blocks"].endswith("%") and shown["Right guesses"].endswith("%")
    assert shown["Policy"] == "dual, budget 2,048 tokens"
    assert "near, attended to: " in browser.text("#map-legend") and "attend " in browser.text("#timeline-legend")
    assert "Near tier: " in browser.text("#memory") and "planned" in browser.text("#memory")
    # Something was painted, and not in one colour.
    colours = browser.run("""
        const map = document.getElementById("map");
        const pixels = map.getContext("2d").getImageData(0, 0, map.width, map.height).data;
        const seen = new Set();
        for (let i = 0; i < pixels.length; i += 4) seen.add(pixels.slice(i, i + 3).join());
        return seen.size;""")
    assert colours >= 3
    browser.wait_for_text("#live-state", "Nothing is being decoded now")
    # Out of sight it listens to nothing.
    browser.find("#show-live").click()
    assert browser.find("#live").is_displayed() is False


def figures(browser):
    return dict(browser.run("return [...document.querySelectorAll('#figures div')].map((d) => [...d.children].map((c) => c.textContent))"))


def test_two_policies_are_compared(browser, base):
    opened(browser, base)
    browser.find("#file").send_keys(str(LOGBOOK))
    browser.set("max_tokens", 4)
    browser.ask("Name it.", 90)
    browser.find("#show-compare").click()
    browser.button("Take the open conversation's document").click()
    assert "lighthouse-logbook.md" in browser.text("#compare-document")
    browser.find("#compare-prompt").send_keys("Describe the lighthouse and its keepers.")
    browser.set_value("#right-policy", "previous")
    browser.set_value("#right-budget", "64")
    browser.set_value("#compare-tokens", "30")
    browser.find("#compare-run").click()
    browser.wait(lambda: browser.text("#compare-difference"), 120)
    assert browser.text("#left-title") == "full" and browser.text("#right-title") == "previous"
    for side in ("left", "right"):
        assert "30 tokens, " in browser.text(f"#{side}-figures") and "iB near" in browser.text(f"#{side}-figures")
    told = browser.text("#compare-difference")
    left, right = browser.text("#left-text"), browser.text("#right-text")
    if left == right:
        assert told.startswith("Both say the same")
    else:
        same = browser.run("return [...document.querySelectorAll('.answer')].map((a) => a.firstChild.textContent)")
        assert same[0] == same[1] and f"({len(same[0]):,} characters)" in told
        assert {browser.text("#left-text mark"), browser.text("#right-text mark")} == {left[len(same[0]) :], right[len(same[0]) :]}
    browser.check("compare")


def test_an_answer_is_stopped_and_asked_for_again(browser, base):
    opened(browser, base)
    browser.set("max_tokens", 400)
    browser.send("Count from one to two hundred, in words.")
    browser.wait(lambda: len(browser.last()["text"]) > 40)
    browser.screenshot("streaming")
    browser.find("body").send_keys(Keys.ESCAPE)
    answer = browser.wait_for_answer(5)
    assert "stopped" in answer["meta"] and answer["text"] and answer["error"] == ""
    browser.set("max_tokens", 6)
    browser.button("Retry this answer").click()
    browser.wait(lambda: "ended by its limit" in browser.last()["meta"])
    assert len(browser.messages()) == 2


def test_everything_can_be_done_with_the_keyboard(browser, base):
    opened(browser, base)
    browser.set("max_tokens", 8)
    browser.driver.refresh()
    browser.wait_for_text("#state", "ready")
    browser.run("document.querySelector('.skip').focus()")
    names = []
    for _ in range(9):
        ActionChains(browser.driver).send_keys(Keys.TAB).perform()
        active = browser.driver.switch_to.active_element
        names.append(active.get_attribute("id") or active.text)
    wanted = ["show-chat", "show-compare", "show-live", "show-settings", "new-conversation", "messages", "input", "file", "send"]
    assert names == wanted
    browser.find("#input").send_keys("Hello", Keys.SHIFT, Keys.ENTER, Keys.NULL, "there", Keys.ENTER)
    browser.wait(lambda: len(browser.messages()) == 2)
    assert browser.messages()[0] == "Hello\nthere"
    browser.wait_for_answer()
    browser.find("#show-settings").send_keys(Keys.ENTER)
    browser.wait(lambda: browser.find("#settings").is_displayed())
    browser.check("settings")
    browser.driver.switch_to.active_element.send_keys(Keys.ESCAPE)
    browser.wait(lambda: not browser.find("#settings").is_displayed())


# ---- What goes wrong


def test_a_wrong_key_and_one_that_has_expired(browser, tiny_model):
    with Server(tiny_model, "-c", 512, "--api-key", "first") as server:
        base, port = address(server), server.port
        browser.forget(base)
        browser.open(base)
        browser.wait_for_text("#state", "wants an API key")
        assert "API key" in browser.text("#notice-text")
        browser.check("key-wanted")
        browser.find("#notice-action").click()
        browser.find("#key").send_keys("first", Keys.TAB)
        browser.find("#settings-close").click()
        browser.wait_for_text("#state", "ready")
        browser.set("max_tokens", 4)
        assert "4 tokens" in browser.ask("Hello")["meta"]
        server.stop()
    with Server(tiny_model, "-c", 512, "--api-key", "second", port=port):
        browser.wait(lambda: browser.text("#state") in ("ready", "wants an API key"))
        answer = browser.ask("Hello again")
        assert "does not take this API key" in answer["error"]
        browser.check("key-expired")
        browser.set("key", "second")
        browser.wait_for_text("#state", "ready")
        browser.button("Retry this answer").click()
        browser.wait(lambda: "4 tokens" in browser.last()["meta"])
        assert browser.last()["error"] == "" and browser.find("#notice").is_displayed() is False


def test_a_server_that_dies_and_returns(browser):
    options = ("-c", 2048, "--np", 1, "--no-measure")
    with Server(MODEL, *options) as server:
        base, port = address(server), server.port
        opened(browser, base)
        browser.send("Count from one to two hundred, in words.")
        browser.wait(lambda: len(browser.last()["text"]) > 20)
        server.stop(signal.SIGKILL)
        answer = browser.wait_for_answer()
        assert "went away" in answer["error"] and len(answer["text"]) > 20
        browser.wait_for_text("#state", "not reachable")
        assert "until it is back" in browser.text("#notice-text")
        browser.check("server-gone")
        assert "cannot be reached" in browser.ask("Anybody there?")["error"]
    with Server(MODEL, *options, port=port):
        browser.wait_for_text("#state", "ready")
        assert browser.find("#notice").is_displayed() is False
        browser.set("max_tokens", 5)
        browser.button("Retry this answer").click()
        browser.wait(lambda: "5 tokens" in browser.last()["meta"])
        assert browser.last()["error"] == "" and len(browser.messages()) == 4


def test_a_paste_of_200_kb_is_a_document_and_too_long_for_the_context(browser, base):
    opened(browser, base)
    text = "The keeper wrote into the logbook. " * 5900
    assert len(text) > 200 << 10
    took = browser.run("""
        const data = new DataTransfer();
        data.setData("text/plain", arguments[0]);
        const begin = performance.now();
        document.getElementById("input").dispatchEvent(new ClipboardEvent("paste", {clipboardData: data, bubbles: true, cancelable: true}));
        return performance.now() - begin;""", text)  # fmt: skip
    assert took < 200
    assert browser.text("#documents").startswith(f"Pasted text 1 · {len(text):,} characters")
    browser.wait_for_text("#tokens", "more than the context holds")
    browser.screenshot("paste")
    answer = browser.ask("What is it about?")
    assert "of the context" in answer["error"] and "8,192" in answer["error"] and "larger -c" in answer["error"]
    browser.check("too-long")
    browser.driver.refresh()
    browser.wait(lambda: len(browser.messages()) == 2)
    browser.find(".document summary").click()
    browser.wait(lambda: len(browser.text(".document pre")) == len(text))


def test_two_tabs_see_each_other_and_lose_nothing(browser, base):
    opened(browser, base)
    browser.set("max_tokens", 5)
    browser.ask("First")
    fragment = browser.run("return location.hash")
    first = browser.driver.current_window_handle
    with browser.tab(base, fragment) as second:
        browser.wait(lambda: len(browser.messages()) == 2)
        browser.ask("Second, of the second tab")
        browser.driver.switch_to.window(first)
        browser.wait(lambda: len(browser.messages()) == 4)
        # Both at once: the one that comes second keeps a copy.
        stale = browser.run("return import('/web/store.js').then((store) => store.load(location.hash.slice(1)))")
        browser.ask("Third, of the first tab")
        browser.driver.switch_to.window(second)
        copied = browser.run("return import('/web/store.js').then((store) => store.save(arguments[0]))", stale)
        assert copied is True
    browser.wait(lambda: len(browser.all("#conversations .open")) == 2)
    assert len(browser.messages()) == 6


# ---- What is hostile

ANSWER = """<script>window.ran = "script"</script><img src=x onerror="window.ran = 'image'"> **<b onclick=alert(1)>bold</b>**

[click](javascript:window.ran='link') [data](data:text/html,<script>1</script>) [good](https://example.org/a?b=c) <https://example.org/raw>
![picture](https://example.org/pixel.png) <iframe src="https://example.org"></iframe> <style>body{display:none}</style>

| a | b |
|---|---|
| <svg onload=window.ran=1> | `</code><script>window.ran=2</script>` |

- one
  - two <a href="https://example.org" onmouseover=window.ran=3>x</a>

```html
</pre><script>window.ran = "fence"</script>
```
"""
SLOW = ["`" * 20000, "[" * 20000, "*" * 20000 + "a", "> " * 5000, "- " * 5000 + "x", "_a" * 10000, "|" * 20000 + "\n" + "|-" * 10000,
        " " * 20000 + "#", "https://" * 3000, ("- " * 900 + "x\n") * 20, ("> " * 900 + "x\n") * 20, "![](" * 5000, "<" * 20000, "#" + " " * 20000 + "x" + " #" * 5000]  # fmt: skip


class Scripted:
    """In front of a real server: says what it is told to in every chat, with the page and all else from there."""

    def __init__(self, server, answer):
        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.0"

            def do_GET(self):
                self.hand_on(server.get(self.path))

            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.path != "/v1/chat/completions":
                    return self.hand_on(server.request("POST", self.path, body))
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                for piece in [answer[i : i + 3000] for i in range(0, len(answer), 3000)]:
                    self.event({"choices": [{"index": 0, "delta": {"content": piece}, "finish_reason": None}]})
                self.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop", "seed": 1}]})
                self.wfile.write(b"data: [DONE]\n\n")

            def event(self, data):
                self.wfile.write(f"data: {json.dumps(data)}\n\n".encode())

            def hand_on(self, reply):
                self.send_response(reply.status)
                for name, value in reply.headers.items():
                    if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                        self.send_header(name, value)
                self.end_headers()
                self.wfile.write(reply.body)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.base = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self):
        return self.base

    def __exit__(self, *exception):
        self.server.shutdown()
        self.server.server_close()


def test_an_answer_full_of_html_is_text(browser, server):
    with Scripted(server, ANSWER) as base:
        opened(browser, base)
        browser.add_document("<img src=x onerror=window.ran=4>.md", "<script>window.ran=5</script>" + ANSWER)
        browser.ask("<script>window.ran=6</script>")
        browser.find(".document summary").click()
        time.sleep(0.3)  # for what would load
        assert browser.run("return window.ran ?? null") is None
        inside = browser.run("return [...document.querySelectorAll('.message *')].map((e) => e.localName)")
        assert not {"script", "img", "iframe", "style", "svg", "b", "object"} & set(inside)
        links = browser.run("return [...document.querySelectorAll('.message a')].map((a) => a.getAttribute('href'))")
        assert links and all(link.startswith("https://example.org/") for link in links), links
        names = browser.run("return [...document.querySelectorAll('.message *')].flatMap((e) => [...e.attributes].map((a) => a.name))")
        assert not [name for name in names if name.startswith("on") or name in ("src", "style", "srcdoc")]
        text = browser.last()["text"]
        for part in ("<script>window.ran = \"script\"</script>", "javascript:window.ran", "</pre><script>", "<svg onload"):
            assert part in text, part
        browser.check("hostile")


def test_a_hostile_answer_does_not_hold_the_page_up(browser, server):
    with Scripted(server, "\n\n".join(SLOW)) as base:
        opened(browser, base)
        begin = time.monotonic()
        browser.ask("Go on")
        assert time.monotonic() - begin < 8
        took = browser.run("""
            return import("/web/markdown.js").then(({ renderMarkdown }) => arguments[0].map((text) => {
              const begin = performance.now();
              renderMarkdown(text);
              return performance.now() - begin;
            }));""", SLOW)  # fmt: skip
        assert max(took) < 1000, list(zip(SLOW, took))


def test_a_conversation_of_500_messages_is_painted_at_once(browser, base):
    opened(browser, base)
    text = "Some **bold** text with `code`, a [link](https://example.org/) and more of it.\n\n- one\n- two\n\n```\ncode\n```\n" * 3
    conversation = browser.run("""
        return import("/web/store.js").then(async (store) => {
          const conversation = store.newConversation();
          conversation.title = "Five hundred";
          for (let i = 0; i < 500; ++i) conversation.messages.push({role: i % 2 ? "assistant" : "user", content: `${i} ${arguments[0]}`});
          await store.save(conversation);
          return conversation.id;
        });""", text)  # fmt: skip
    browser.open(base, f"#{conversation}")
    timing = browser.driver.execute_async_script("""
        const done = arguments[0];
        const long = [];
        new PerformanceObserver((list) => long.push(...list.getEntries().map((e) => e.duration))).observe({type: "longtask", buffered: true});
        const begin = performance.now();
        document.querySelector("#conversations .open").click();
        const frames = [];
        let painted = null;
        let before = begin;
        const frame = (now) => {
          frames.push(now - before);
          before = now;
          const all = document.querySelectorAll(".message").length;
          if (painted === null && all > 0) painted = performance.now() - begin;
          if (all < 500 && now - begin < 20000) return requestAnimationFrame(frame);
          setTimeout(() => done({painted, frame: Math.max(...frames), all: now - begin, long: Math.max(0, ...long)}), 200);
        };
        requestAnimationFrame(frame);""")  # fmt: skip
    print(timing)
    browser.screenshot("five-hundred")
    assert browser.run("return document.querySelectorAll('.message').length") == 500
    assert browser.last()["text"].startswith("499 Some bold text")
    # It stands at its end, where the conversation goes on.
    rest = browser.run("const m = document.getElementById('messages'); return m.scrollHeight - m.scrollTop - m.clientHeight")
    assert rest < 30
    assert timing["painted"] < 1000 and timing["frame"] < 500 and timing["all"] < 8000, timing


def test_on_a_phone_everything_is_within_the_screen(browser, base):
    opened(browser, base)
    browser.set("max_tokens", 30)
    browser.ask("Say something about lighthouses.")
    browser.look_like(PHONE)
    try:
        for view in ("show-chat", "show-compare", "show-live"):
            browser.find(f"#{view}").click()
            assert browser.run("return document.documentElement.scrollWidth") <= PHONE[0]
            browser.screenshot(f"phone-{view}")
        browser.find("#show-chat").click()
        browser.button("Conversations").click()
        assert browser.find("#conversations").is_displayed() and not browser.find("#chat").is_displayed()
        browser.screenshot("phone-conversations")
        browser.find("#conversations .open").click()
        browser.wait(lambda: browser.find("#chat").is_displayed())
    finally:
        browser.look_like(DESKTOP)
