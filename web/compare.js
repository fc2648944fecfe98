// The same prompt under two policies, one after the other: texts, speed, near memory, and where they part.

import { bytes, chat, count } from "./api.js";
import { contentOf } from "./documents.js";
import { listen } from "./live.js";
import { fillPolicies } from "./settings.js";

const field = (id) => document.getElementById(id);
const kSides = ["left", "right"];

/** Where two texts part, moved back to the beginning of the word; -1 where neither says anything else. */
export function firstDifference(left, right) {
  const end = Math.min(left.length, right.length);
  let at = 0;
  while (at < end && left[at] === right[at]) ++at;
  if (at === left.length && at === right.length) return -1;
  while (at > 0 && /\S/.test(left[at - 1])) --at;
  return at;
}

function showFrom(node, text, at) {
  if (at < 0 || at >= text.length) return node.replaceChildren(text);
  const mark = document.createElement("mark");
  mark.textContent = text.slice(at);
  node.replaceChildren(text.slice(0, at), mark);
}

export class CompareView {
  /** `conversation()`: the one that is open. */
  constructor({ conversation, onNotice }) {
    this.conversation = conversation;
    this.onNotice = onNotice;
    this.documents = [];
    this.abort = null;
    field("compare-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.run();
    });
    field("compare-stop").onclick = () => this.abort?.abort();
    field("compare-take").onclick = () => this.takeDocument();
  }

  setServer(props) {
    fillPolicies(field("left-policy"), props.policies, field("left-policy").value || "full");
    fillPolicies(field("right-policy"), props.policies, field("right-policy").value || "dual");
    for (const side of kSides) field(`${side}-budget`).placeholder = props.budget_tokens;
  }

  takeDocument() {
    this.documents = this.conversation().messages.flatMap(({ documents }) => documents ?? []);
    const names = this.documents.map(({ name }) => name).join(", ");
    field("compare-document").textContent = names ? `In front of the prompt: ${names}` : "The open conversation has no document.";
  }

  async run() {
    const content = contentOf({ content: field("compare-prompt").value.trim(), documents: this.documents });
    if (this.abort || content === "") return;
    this.abort = new AbortController();
    field("compare-run").disabled = true;
    field("compare-stop").hidden = false;
    field("compare-difference").textContent = "";
    const texts = { left: "", right: "" };
    for (const side of kSides) {
      field(`${side}-title`).textContent = `${field(`${side}-policy`).value}`;
      field(`${side}-figures`).textContent = side === "left" ? "" : "waits for the other side";
      field(`${side}-text`).replaceChildren();
    }
    try {
      for (const side of kSides) await this.runSide(side, content, texts);
      this.showDifference(texts);
    } catch (error) {
      if (error.kind !== "stopped") this.onNotice(error);
      field("compare-difference").textContent = error.kind === "stopped" ? "Stopped." : error.message;
    }
    this.abort = null;
    field("compare-run").disabled = false;
    field("compare-stop").hidden = true;
  }

  async runSide(side, content, texts) {
    const figures = field(`${side}-figures`);
    const own = { policy: field(`${side}-policy`).value };
    if (field(`${side}-budget`).value) own.budget = Number(field(`${side}-budget`).value);
    let near = 0;
    // What was sampled before it began is another's.
    const stop = listen({
      onSample: (sample) => {
        if (texts[side] !== "") near = Math.max(near, sample.sequence.near_bytes);
      },
      onState: () => {},
    });
    try {
      const end = await chat(
        { messages: [{ role: "user", content }], temperature: 0, max_tokens: Number(field("compare-tokens").value), dualdecoder: own },
        {
          signal: this.abort.signal,
          onProgress: (done, total) => (figures.textContent = `Reading: ${count(done)} of ${count(total)} tokens`),
          onText: (text) => {
            texts[side] += text;
            field(`${side}-text`).textContent = texts[side];
          },
        },
      );
      const rate = end.timings?.predicted_per_second ?? 0;
      figures.textContent =
        `${count(end.usage.completion_tokens)} tokens, ${rate.toFixed(1)} a second · ` +
        `${near > 0 ? `${bytes(near)} near` : "too short to see its near memory"} · ` +
        `${count(end.usage.prompt_tokens)} tokens of prompt, ${count(end.usage.prompt_tokens_details.cached_tokens)} from the cache`;
    } finally {
      stop();
    }
  }

  showDifference({ left, right }) {
    const at = firstDifference(left, right);
    showFrom(field("left-text"), left, at);
    showFrom(field("right-text"), right, at);
    const words = (at < 0 ? left : left.slice(0, at)).split(/\s+/).filter(Boolean).length;
    field("compare-difference").textContent = at < 0 ? `Both say the same: ${count(words)} words.` : `They say the same for ${count(words)} words (${count(at)} characters), and part there.`;
  }
}
