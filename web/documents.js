// The documents that go with the next message: added as files, dropped, or as a long paste.

import { count } from "./api.js";
import { button } from "./message.js";

const kPasteMin = 4000; // characters from which a paste is a document
const kBytesMax = 16 << 20;

export class Documents {
  /** `onChange()` after each change, `onRefused(message)` where something is no text. */
  constructor(list, onChange, onRefused) {
    this.list = list;
    this.onChange = onChange;
    this.onRefused = onRefused;
    this.all = [];
  }

  add(name, text) {
    this.all.push({ name, text });
    this.render();
  }

  take() {
    const taken = this.all;
    this.all = [];
    this.render();
    return taken;
  }

  async addFiles(files) {
    for (const file of files) {
      if (file.size > kBytesMax) {
        this.onRefused(`${file.name} has more than 16 MiB. Take the part of it that matters.`);
        continue;
      }
      try {
        const bytes = await file.arrayBuffer();
        this.add(file.name, new TextDecoder("utf-8", { fatal: true }).decode(bytes));
      } catch {
        this.onRefused(`${file.name} is not text in UTF-8. Convert it to plain text first.`);
      }
    }
  }

  /** Whether the paste was taken. */
  takePaste(data) {
    if (data.files.length > 0) {
      this.addFiles([...data.files]);
      return true;
    }
    const text = data.getData("text/plain");
    if (text.length < kPasteMin) return false;
    this.add(`Pasted text ${this.all.length + 1}`, text);
    return true;
  }

  render() {
    this.list.replaceChildren(
      ...this.all.map((document_, i) => {
        const item = document.createElement("li");
        const remove = button("×", () => {
          this.all.splice(i, 1);
          this.render();
        }, `Remove ${document_.name}`);
        remove.className = "plain";
        item.append(`${document_.name} · ${count(document_.text.length)} characters `, remove);
        return item;
      }),
    );
    this.list.hidden = this.all.length === 0;
    this.onChange();
  }
}

/** What the model reads of a message: its documents, then what was asked. */
export function contentOf(message) {
  const documents = message.documents ?? [];
  const named = documents.length > 1;
  const texts = documents.map(({ name, text }) => (named ? `${name}:\n\n${text}` : text));
  return [...texts, message.content].filter((text) => text !== "").join("\n\n");
}
