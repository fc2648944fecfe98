// One message as it stands in a chat.

import { count } from "./api.js";
import { renderMarkdown } from "./markdown.js";

const kNames = { user: "You", assistant: "Model" };

export function button(text, onclick, label) {
  const node = document.createElement("button");
  node.type = "button";
  node.textContent = text;
  if (label) node.setAttribute("aria-label", label);
  node.onclick = onclick;
  return node;
}

function division(name, ...children) {
  const node = document.createElement("div");
  node.className = name;
  node.append(...children);
  return node;
}

// The text of a document is made when somebody opens it.
function documentNode({ name, text }) {
  const details = document.createElement("details");
  details.className = "document";
  const summary = document.createElement("summary");
  summary.textContent = `${name} · ${count(text.length)} characters`;
  details.append(summary);
  details.addEventListener("toggle", () => {
    if (!details.open || details.childElementCount > 1) return;
    const pre = document.createElement("pre");
    pre.tabIndex = 0;
    pre.textContent = text;
    details.append(pre);
  });
  return details;
}

/** "5,103 tokens of prompt, 4,992 of them from the cache · 96 tokens, 41.2 a second · dual" */
function metaOf({ meta, content, partial, stopped }) {
  const parts = [];
  if (meta?.prompt !== undefined) {
    parts.push(`${count(meta.prompt)} tokens of prompt, ${count(meta.cached)} of them from the cache`);
    parts.push(`${count(meta.completion)} tokens${meta.rate ? `, ${meta.rate.toFixed(1)} a second` : ""}`);
  }
  if (meta?.policy) parts.push(meta.policy);
  if (meta?.finish === "length") parts.push("ended by its limit");
  if (stopped) parts.push("stopped");
  else if (partial && content !== "") parts.push("not at its end");
  return parts.join(" · ");
}

export class MessageNode {
  /** `actions`: edit(text), retry(), each for this message. */
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.node = document.createElement("article");
    this.node.className = "message";
    this.node.dataset.role = message.role;
    this.node.setAttribute("aria-label", kNames[message.role]);
    this.body = division(message.role === "user" ? "body plain-text" : "body");
    this.below = division("below");
    this.bar = division("actions");
    const who = document.createElement("h2");
    who.textContent = kNames[message.role];
    this.node.append(who, ...(message.documents ?? []).map(documentNode), this.body, this.below, this.bar);
    this.renderText();
    this.renderEnd();
  }

  renderText() {
    if (this.message.role === "user") this.body.textContent = this.message.content;
    else this.body.replaceChildren(renderMarkdown(this.message.content));
  }

  /** While the prompt is computed. */
  showProgress(text, done, total) {
    if (!this.progress) {
      this.progress = document.createElement("progress");
      this.progress.setAttribute("aria-label", "Prompt computed");
      this.progressText = division("quiet");
      this.below.replaceChildren(this.progressText, this.progress);
    }
    this.progressText.textContent = text;
    if (total > 0) {
      this.progress.max = total;
      this.progress.value = done;
    }
  }

  hideProgress() {
    if (!this.progress) return;
    this.progress = null;
    this.below.replaceChildren();
  }

  /** What stands below a message that nobody is working at. */
  renderEnd() {
    const { message, actions } = this;
    this.hideProgress();
    this.below.replaceChildren();
    if (message.error) this.below.append(division("failed", message.error));
    const meta = document.createElement("span");
    meta.className = "meta";
    meta.textContent = metaOf(message);
    const buttons = message.role === "user"
      ? [button("Edit", () => this.edit(), "Edit this message")]
      : [button("Retry", actions.retry, "Retry this answer")];
    // Browsers have it for pages of this machine, or over TLS.
    if (navigator.clipboard) buttons.push(button("Copy", () => navigator.clipboard.writeText(message.content), "Copy this message"));
    this.bar.replaceChildren(meta, ...buttons);
  }

  edit() {
    const field = document.createElement("textarea");
    field.rows = 3;
    field.value = this.message.content;
    field.setAttribute("aria-label", "The message, edited");
    const cancel = () => {
      field.remove();
      this.body.hidden = false;
      this.renderEnd();
    };
    const finish = () => {
      if (field.value.trim() === "" && !this.message.documents?.length) return;
      this.actions.edit(field.value);
    };
    field.onkeydown = (event) => {
      if (event.key === "Escape") cancel();
      if (event.key === "Enter" && !event.shiftKey) {
        event.preventDefault();
        finish();
      }
    };
    this.body.hidden = true;
    this.body.after(field);
    const hint = document.createElement("span");
    hint.className = "meta";
    hint.textContent = "What follows is asked for again.";
    this.bar.replaceChildren(hint, button("Ask again", finish), button("Cancel", cancel));
    field.focus();
  }

  get editing() {
    return this.body.hidden;
  }
}
