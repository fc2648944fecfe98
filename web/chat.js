// The chat: one conversation, its messages on the page, and the answer that is being made.

import { chat, count, countTokens } from "./api.js";
import { contentOf, Documents } from "./documents.js";
import { button, MessageNode } from "./message.js";
import * as settings from "./settings.js";
import * as store from "./store.js";

const kShownAtOnce = 30; // of the messages, the last ones; the others come before them, so many a frame
const kSettleFrames = 6;
const kSavePeriod = 2000; // ms, of an answer that is being made
const kRenderPeriod = 80; // ms
const field = (id) => document.getElementById(id);

export class ChatView {
  /** `onNotice(error)` for what is about more than one message, `onAnnounce(text)` for screen readers. */
  constructor({ onNotice, onAnnounce }) {
    this.onNotice = onNotice;
    this.onAnnounce = onAnnounce;
    this.messages = field("messages");
    this.input = field("input");
    this.conversation = store.newConversation();
    this.nodes = [];
    this.abort = null; // of the answer that is being made
    this.props = null;
    this.documents = new Documents(field("documents"), () => this.noteInput(), (text) => onNotice({ kind: "request", message: text }));
    this.listen();
  }

  get busy() {
    return this.abort !== null;
  }

  listen() {
    const composer = field("composer");
    composer.addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    field("stop").onclick = () => this.abort?.abort();
    field("new-conversation").onclick = () => this.open(null);
    field("file").onchange = (event) => {
      this.documents.addFiles([...event.target.files]).then(() => (event.target.value = ""));
    };
    this.input.addEventListener("input", () => this.noteInput());
    this.input.addEventListener("paste", (event) => {
      if (this.documents.takePaste(event.clipboardData)) event.preventDefault();
    });
    this.input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      }
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.busy && !document.querySelector("dialog[open]")) this.abort.abort();
    });
    for (const name of ["dragover", "dragleave", "drop"]) {
      document.addEventListener(name, (event) => {
        event.preventDefault();
        composer.classList.toggle("dropping", name === "dragover");
        if (name === "drop") this.documents.addFiles([...event.dataTransfer.files]);
      });
    }
    for (const name of ["wheel", "touchmove", "pointerdown", "keydown"]) {
      this.messages.addEventListener(name, () => (this.sticks = false), { passive: true });
    }
    store.onChange((id) => this.noteChange(id));
  }

  setServer(props) {
    this.props = props;
    this.noteInput();
  }

  // ---- Conversations

  async open(id) {
    if (this.busy) this.abort.abort();
    const loaded = id ? await store.load(id) : null;
    this.conversation = loaded ?? store.newConversation();
    history.replaceState(null, "", loaded ? `#${loaded.id}` : location.pathname);
    this.renderAll();
    await this.renderList();
    if (!loaded) this.input.focus();
    field("columns").classList.remove("listing");
    field("open-list").setAttribute("aria-expanded", "false");
  }

  async noteChange(id) {
    await this.renderList();
    if (id !== this.conversation.id || this.busy || this.nodes.some((node) => node.editing)) return;
    const loaded = await store.load(id);
    if (!loaded || this.busy || loaded.revision === this.conversation.revision) return;
    this.conversation = loaded;
    this.renderAll();
  }

  async save() {
    try {
      if (await store.save(this.conversation)) {
        this.onNotice({ kind: "request", message: "Another tab has changed this conversation, too. This one is kept as a copy." });
      }
      history.replaceState(null, "", `#${this.conversation.id}`);
    } catch (error) {
      this.onNotice({ kind: "request", message: `This browser does not keep the conversation: ${error?.message ?? "its storage is full"}.` });
    }
    await this.renderList();
  }

  async renderList() {
    const all = await store.list();
    field("conversations").replaceChildren(
      ...all.map(({ id, title }) => {
        const item = document.createElement("li");
        const open = button(title || "Untitled", () => this.open(id));
        open.className = "open";
        if (id === this.conversation.id) open.setAttribute("aria-current", "true");
        const remove = button("×", async () => {
          if (!confirm(`Delete "${title}"?`)) return;
          await store.remove(id);
          if (id === this.conversation.id) await this.open(null);
          else await this.renderList();
        }, `Delete ${title}`);
        remove.classList.add("plain");
        item.append(open, remove);
        return item;
      }),
    );
  }

  // ---- Messages on the page

  nodeOf(message) {
    return new MessageNode(message, { edit: (text) => this.edit(message, text), retry: () => this.retry(message) });
  }

  renderAll() {
    const { messages } = this.conversation;
    const first = Math.max(0, messages.length - kShownAtOnce);
    this.nodes = messages.slice(first).map((message) => this.nodeOf(message));
    this.messages.replaceChildren(...this.nodes.map(({ node }) => node));
    if (messages.length === 0) {
      const empty = document.createElement("p");
      empty.className = "empty";
      empty.textContent = "Paste or drop a long text and ask about it. The live view shows which parts of it each token needs, and where they were.";
      this.messages.append(empty);
    }
    this.sticks = true;
    this.settle(this.conversation, kSettleFrames);
    if (first > 0) requestAnimationFrame(() => this.renderEarlier(this.conversation, first));
    this.noteInput();
  }

  renderEarlier(conversation, end) {
    if (conversation !== this.conversation) return;
    const first = Math.max(0, end - kShownAtOnce);
    const nodes = conversation.messages.slice(first, end).map((message) => this.nodeOf(message));
    const below = this.messages.scrollHeight - this.messages.scrollTop;
    this.messages.prepend(...nodes.map(({ node }) => node));
    if (!this.sticks) this.messages.scrollTop = this.messages.scrollHeight - below;
    this.nodes.unshift(...nodes);
    this.settle(conversation, kSettleFrames);
    if (first > 0) requestAnimationFrame(() => this.renderEarlier(conversation, first));
  }

  // A message has its height when it has been seen once; until then the end of all moves.
  settle(conversation, frames) {
    if (!this.sticks || conversation !== this.conversation) return;
    this.messages.scrollTop = this.messages.scrollHeight;
    if (frames > 0) requestAnimationFrame(() => this.settle(conversation, frames - 1));
  }

  append(message) {
    this.conversation.messages.push(message);
    const node = this.nodeOf(message);
    this.nodes.push(node);
    this.messages.querySelector(".empty")?.remove();
    this.messages.append(node.node);
    this.messages.scrollTop = this.messages.scrollHeight;
    return node;
  }

  dropFrom(index) {
    this.conversation.messages.length = index;
    while (this.nodes.length > 0 && !this.conversation.messages.includes(this.nodes.at(-1).message)) this.nodes.pop().node.remove();
  }

  // ---- Asking

  async send() {
    if (this.busy) return;
    const content = this.input.value.trim();
    if (content === "" && this.documents.all.length === 0) return;
    const documents = this.documents.take();
    this.input.value = "";
    const message = { role: "user", content };
    if (documents.length > 0) message.documents = documents;
    if (this.conversation.title === "") this.conversation.title = (content || documents[0].name).slice(0, 60);
    this.append(message);
    await this.ask();
  }

  async edit(message, text) {
    if (this.busy) return;
    const index = this.conversation.messages.indexOf(message);
    this.dropFrom(index);
    this.append({ ...message, content: text });
    await this.ask();
  }

  async retry(message) {
    if (this.busy) return;
    this.dropFrom(this.conversation.messages.indexOf(message));
    await this.ask();
  }

  request() {
    const messages = this.conversation.messages
      .map((message) => ({ role: message.role, content: contentOf(message) }))
      .filter(({ content }) => content !== "");
    if (settings.system()) messages.unshift({ role: "system", content: settings.system() });
    return { messages, ...settings.sampling() };
  }

  setBusy(abort) {
    this.abort = abort;
    field("stop").hidden = !this.busy;
    field("send").disabled = this.busy;
    this.messages.setAttribute("aria-busy", this.busy);
  }

  async ask() {
    const body = this.request();
    const { conversation } = this;
    const message = { role: "assistant", content: "", partial: true };
    const node = this.append(message);
    const abort = new AbortController();
    this.setBusy(abort);
    node.bar.replaceChildren();
    this.noteInput();
    node.showProgress("Waiting for the server", 0, 0);
    await this.save();
    const writer = new Writer(node, this.messages, () => this.save());
    try {
      const end = await chat(body, {
        signal: abort.signal,
        onProgress: (done, total) => node.showProgress(writer.progress(done, total), done, total),
        onText: (text) => writer.add(text),
      });
      message.partial = false;
      message.meta = {
        prompt: end.usage?.prompt_tokens,
        cached: end.usage?.prompt_tokens_details?.cached_tokens ?? 0,
        completion: end.usage?.completion_tokens,
        rate: end.timings?.predicted_per_second,
        finish: end.finish,
        policy: body.dualdecoder?.policy ?? this.props?.policy,
      };
    } catch (error) {
      if (error.kind === "stopped") message.stopped = true;
      else {
        message.error = error.message;
        if (error.kind === "key" || error.kind === "gone") this.onNotice(error);
        if (error.kind === undefined) console.error(error);
      }
    }
    writer.end();
    if (this.abort === abort) this.setBusy(null);
    node.renderEnd();
    this.onAnnounce(message.error ?? (message.stopped ? "Stopped." : "The answer is complete."));
    if (conversation === this.conversation) {
      await this.save();
      this.noteInput();
    } else {
      await store.save(conversation).then(() => this.renderList(), () => {});
    }
  }

  // ---- Tokens

  // How much of the context is in use with what is written now; the server counts.
  noteInput() {
    clearTimeout(this.counting);
    this.counting = setTimeout(() => this.showTokens(), 300);
  }

  async showTokens() {
    if (!this.props) return;
    // What the last complete answer and its prompt came to, as the server told; and what has been written since.
    const { messages } = this.conversation;
    const last = messages.findLastIndex((message) => message.meta?.prompt);
    const meta = messages[last]?.meta;
    const before = (meta?.prompt ?? 0) + (meta?.completion ?? 0);
    const since = [...messages.slice(last + 1), { content: this.input.value, documents: this.documents.all }];
    const written = since.map(contentOf).filter((text) => text !== "").join("\n");
    this.countAbort?.abort();
    this.countAbort = new AbortController();
    try {
      const more = written === "" ? 0 : await countTokens(written, this.countAbort.signal);
      const tokens = before + more;
      const over = tokens >= this.props.context;
      field("tokens").textContent = `about ${count(tokens)} of ${count(this.props.context)} tokens${over ? ": more than the context holds" : ""}`;
    } catch (error) {
      if (error.kind !== "stopped") field("tokens").textContent = "";
    }
  }
}

// Puts an answer on the page as it comes, at a pace that long answers do not slow down.
class Writer {
  constructor(node, scrolled, save) {
    this.node = node;
    this.scrolled = scrolled;
    this.saved = performance.now();
    this.save = save;
    this.timer = null;
    this.first = null; // the first progress: {time, done}
    this.period = kRenderPeriod;
  }

  progress(done, total) {
    const now = performance.now();
    this.first ??= { time: now, done };
    const text = `Reading: ${count(done)} of ${count(total)} tokens`;
    const seconds = ((now - this.first.time) / (done - this.first.done)) * (total - done) / 1000;
    if (!Number.isFinite(seconds) || done >= total) return text;
    return `${text}, about ${count(Math.max(1, seconds))} s left`;
  }

  add(text) {
    this.node.hideProgress();
    this.node.message.content += text;
    this.timer ??= setTimeout(() => this.render(), this.period);
  }

  render() {
    this.timer = null;
    const begin = performance.now();
    const { scrolled } = this;
    const atEnd = scrolled.scrollHeight - scrolled.scrollTop - scrolled.clientHeight < 60;
    this.node.renderText();
    if (atEnd) scrolled.scrollTop = scrolled.scrollHeight;
    this.period = Math.max(kRenderPeriod, 5 * (performance.now() - begin));
    if (begin - this.saved < kSavePeriod) return;
    this.saved = begin;
    this.save();
  }

  end() {
    clearTimeout(this.timer);
    const { scrolled } = this;
    const atEnd = scrolled.scrollHeight - scrolled.scrollTop - scrolled.clientHeight < 60;
    this.node.renderText();
    if (atEnd) requestAnimationFrame(() => (scrolled.scrollTop = scrolled.scrollHeight));
  }
}
