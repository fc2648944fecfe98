"""A headless Chromium on the page of a server, through selenium. What the page asked of the network and what its console
said is kept, so that tests can judge it."""

import contextlib
import importlib.metadata
import json
import os
import pathlib
import time

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from conftest import BUILD

SCREENSHOTS = BUILD / "web-screenshots"
CHROMIUM = os.environ.get("DD_TEST_CHROMIUM", "/usr/bin/chromium")
DRIVER = os.environ.get("DD_TEST_CHROMEDRIVER", "/usr/bin/chromedriver")
DESKTOP = (1360, 900)
PHONE = (390, 844)


def axe_source():
    [path] = [file for file in importlib.metadata.files("axe-playwright-python") if file.name == "axe.min.js"]
    return pathlib.Path(path.locate()).read_text()


class Browser:
    def __init__(self, profile):
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
        for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars",
                         "--no-first-run", "--disable-background-networking", f"--user-data-dir={profile}"):  # fmt: skip
            options.add_argument(argument)
        self.driver = webdriver.Chrome(options=options, service=Service(DRIVER))
        self.asked = []  # addresses
        self.said = []  # by the console
        self._axe = None
        self.look_like()

    def quit(self):
        self.take_logs()
        self.driver.quit()

    def take_logs(self):
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                self.asked.append(message["params"]["request"]["url"])
        self.said += [entry["message"] for entry in self.driver.get_log("browser")]

    # ---- How it is seen

    def look_like(self, size=DESKTOP, dark=False):
        width, height = size
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride",
                                    {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False})  # fmt: skip
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia",
                                    {"features": [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]})  # fmt: skip

    def screenshot(self, name):
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        self.driver.save_screenshot(str(SCREENSHOTS / f"{name}.png"))

    def faults(self):
        """What axe finds wrong: [rule: element]."""
        self._axe = self._axe or axe_source()
        self.driver.execute_script(self._axe)
        found = self.driver.execute_async_script("axe.run().then(arguments[0])")
        return [f"{rule['id']}: {node['html'][:200]}" for rule in found["violations"] for node in rule["nodes"]]

    def check(self, name):
        """Keeps what is seen now, in light, dark and on a phone, and lets axe judge it."""
        try:
            for look, size, dark in (("light", DESKTOP, False), ("dark", DESKTOP, True), ("phone", PHONE, False)):
                self.look_like(size, dark)
                time.sleep(0.1)  # two frames, also on a busy machine
                self.screenshot(f"{name}-{look}")
                faults = self.faults()
                assert faults == [], (look, faults)
        finally:
            self.look_like()

    # ---- The page

    def open(self, base, fragment=""):
        self.base = base
        self.driver.get("about:blank")
        self.driver.get(f"{base}/{fragment}")
        self.wait(lambda: self.driver.execute_script("return document.readyState") == "complete")

    def forget(self, base):
        """As if the browser had never been there."""
        self.driver.execute_cdp_cmd("Storage.clearDataForOrigin", {"origin": base, "storageTypes": "all"})

    def run(self, script, *arguments):
        return self.driver.execute_script(script, *arguments)

    def wait(self, condition, seconds=20, what=""):
        """Until it holds; what it gave."""
        begin = time.monotonic()
        while not (value := condition()):
            assert time.monotonic() - begin < seconds, what or "it did not come to that"
            time.sleep(0.03)
        return value

    def find(self, selector):
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector):
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector):
        return self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector)

    def wait_for_text(self, selector, part, seconds=20):
        return self.wait(lambda: part in self.text(selector), seconds, f"{selector}: {part!r} is not in {self.text(selector)!r}")

    def button(self, name, within=""):
        """The last one that is called so."""
        return [b for b in self.all(f"{within} button") if name in (b.text, b.get_attribute("aria-label"))][-1]

    def set(self, name, value):
        """A setting."""
        self.find("#show-settings").click()
        field = self.find(f"#{name}")
        if field.tag_name == "select":
            self.run("arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('change'))", field, value)
        else:
            field.clear()
            field.send_keys(str(value), Keys.TAB)
        self.find("#settings-close").click()

    def set_value(self, selector, value):
        self.run("""
            const field = document.querySelector(arguments[0]);
            field.value = arguments[1];
            field.dispatchEvent(new Event("change", {bubbles: true}));""", selector, value)  # fmt: skip

    def add_document(self, name, text):
        """A file that is dropped."""
        self.run("""
            const data = new DataTransfer();
            data.items.add(new File([arguments[1]], arguments[0]));
            document.dispatchEvent(new DragEvent("drop", {dataTransfer: data, bubbles: true, cancelable: true}));""", name, text)  # fmt: skip
        self.wait_for_text("#documents", name)

    def write(self, text):
        self.find("#input").send_keys(text)

    def send(self, text):
        self.write(text)
        self.find("#input").send_keys(Keys.ENTER)

    def busy(self):
        return self.find("#stop").is_displayed()

    def wait_for_answer(self, seconds=60):
        """Until nothing is being made; the last message: its text, its figures, its error."""
        self.wait(lambda: not self.busy(), seconds, "the answer does not end")
        return self.last()

    def last(self):
        last = ".message:last-child"
        return {"text": self.text(f"{last} .body"), "meta": self.text(f"{last} .meta"), "error": self.text(f"{last} .failed")}

    def ask(self, text, seconds=60):
        self.send(text)
        return self.wait_for_answer(seconds)

    def messages(self):
        return self.run("return [...document.querySelectorAll('.message .body')].map((body) => body.textContent)")

    @contextlib.contextmanager
    def tab(self, base, fragment=""):
        """Another one, in which things happen until the end."""
        first = self.driver.current_window_handle
        self.driver.switch_to.new_window("tab")
        self.look_like()
        self.open(base, fragment)
        handle = self.driver.current_window_handle
        try:
            yield handle
        finally:
            self.driver.switch_to.window(handle)
            self.driver.close()
            self.driver.switch_to.window(first)
