// Puts the page together: views, the server's state, notices.

import * as api from "./api.js";
import { ChatView } from "./chat.js";
import { CompareView } from "./compare.js";
import { LiveView } from "./live.js";
import * as settings from "./settings.js";

const field = (id) => document.getElementById(id);
const kWords = { ok: "ready", loading: "loading its model", gone: "not reachable", key: "wants an API key" };
const kPeriod = { ok: 5000, loading: 1000, gone: 1000, key: 5000 }; // ms between looks at the server

const narrow = matchMedia("(max-width: 800px)"); // the live view stands where the chat does
let noticed = null; // kind of the notice that is shown

function hideNotice(kind) {
  if (kind && noticed !== kind) return;
  noticed = null;
  field("notice").hidden = true;
}

function notice({ kind, message }) {
  noticed = kind;
  field("notice-text").textContent = message;
  field("notice-action").hidden = kind !== "key";
  field("notice-action").textContent = "Open the settings";
  field("notice-action").onclick = () => settings.open("key");
  field("notice").hidden = false;
  if (kind === "gone") watch();
  if (kind === "key") setState("key");
}

function announce(text) {
  field("announce").textContent = text;
}

const chat = new ChatView({ onNotice: notice, onAnnounce: announce });
const live = new LiveView();
const compare = new CompareView({ conversation: () => chat.conversation, onNotice: notice });

// ---- The server

let state = "unknown";
let timer = null;

function setState(next) {
  const before = state;
  state = next;
  field("state").dataset.state = next;
  if (field("state").textContent !== kWords[next]) field("state").textContent = kWords[next];
  if (next === "gone" && before !== "gone") notice({ kind: "gone", message: "The server cannot be reached. It is asked again until it is back." });
  if (next === "ok") {
    hideNotice("gone");
    hideNotice("key");
    if (before === "gone") announce("The server is back.");
  }
}

async function takeProps() {
  try {
    const props = await api.getProps();
    field("model").textContent = props.model;
    for (const view of [chat, live, compare, settings]) view.setServer(props);
    setState("ok");
  } catch (error) {
    if (error.kind === "key") {
      notice(error);
    } else {
      setState(error.kind === "busy" ? "loading" : "gone");
    }
  }
}

async function watch() {
  clearTimeout(timer);
  const now = await api.health();
  if (now !== "ok") setState(now);
  else if (state !== "ok" && state !== "key") await takeProps();
  clearTimeout(timer);
  timer = setTimeout(watch, kPeriod[state]);
}

// ---- Views

function press(id, pressed) {
  field(id).setAttribute("aria-pressed", pressed);
}

function showMain(name) {
  for (const view of ["chat", "compare"]) {
    field(view).hidden = view !== name;
    press(`show-${view}`, view === name);
  }
  field("columns").classList.remove("living", "listing");
}

function showLive(open) {
  live.setOpen(open);
  press("show-live", open);
  field("columns").classList.toggle("living", open);
  placeLive();
  field("columns").classList.remove("listing");
}

narrow.addEventListener("change", placeLive);

function placeLive() {
  field("live").setAttribute("role", narrow.matches ? "main" : "complementary");
}

for (const name of ["chat", "compare"]) {
  field(`show-${name}`).onclick = () => {
    showMain(name);
    if (narrow.matches) showLive(false);
  };
}
field("show-live").onclick = () => showLive(field("live").hidden);
field("show-settings").onclick = () => settings.open();
field("notice-close").onclick = () => hideNotice();
field("open-list").onclick = () => {
  const open = field("columns").classList.toggle("listing");
  field("open-list").setAttribute("aria-expanded", open);
};

settings.begin((name) => {
  if (name !== "key") return;
  api.setKey(settings.key());
  takeProps();
});
api.setKey(settings.key());
watch();
chat.open(location.hash.slice(1)).catch((error) => notice({ kind: "request", message: `This browser keeps no conversations: ${error.message}` }));
