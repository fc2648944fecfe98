// Markdown as DOM nodes. Text only ever becomes text nodes, and the only attribute that is taken from it is the
// address of a link, http or https: so nothing that a model writes can run or load anything.
//
// Paragraphs, headings, lists, block quotes, fenced code, tables, rules; code, strong, emphasis, links. What is
// none of these stays as it was written. Every pattern looks at no more than kLineMax characters from where it
// begins, and nesting ends at kDepthMax, so hostile text costs no more than long text.

const kDepthMax = 8;
const kLineMax = 2000; // a longer line is text, whatever it begins with
const kInline = /(?<!`)(`{1,3})(?!`)([\s\S]{1,2000}?)(?<!`)\1(?!`)|\*\*(\S(?:[^*]{0,2000}?\S)?)\*\*|(?<![\w*])\*(\S(?:[^*\n]{0,2000}?\S)?)\*(?![\w*])|(?<![\w_])_(\S(?:[^_\n]{0,2000}?\S)?)_(?![\w_])|\[([^\][\n]{1,500})\]\(([^()\s]{1,2000})\)|\bhttps?:\/\/[^\s<>"'`]{1,2000}/g;

function element(name, ...children) {
  const node = document.createElement(name);
  node.append(...children);
  return node;
}

function link(address, children) {
  let url = null;
  try {
    url = new URL(address);
  } catch {
    return null;
  }
  if (url.protocol !== "http:" && url.protocol !== "https:") return null;
  const node = element("a", ...children);
  node.href = url.href;
  node.target = "_blank";
  node.rel = "noopener noreferrer nofollow";
  return node;
}

function inline(text, depth = 0) {
  if (depth > kDepthMax) return [text];
  const nodes = [];
  let last = 0;
  for (const match of text.matchAll(kInline)) {
    const [whole, , code, strong, star, line, label, address] = match;
    let node = null;
    if (code !== undefined) node = element("code", code);
    else if (strong !== undefined) node = element("strong", ...inline(strong, depth + 1));
    else if (star !== undefined || line !== undefined) node = element("em", ...inline(star ?? line, depth + 1));
    else if (label !== undefined) node = link(address, [label]);
    else node = link(whole.replace(/[.,;:!?)\]]+$/, ""), [whole.replace(/[.,;:!?)\]]+$/, "")]);
    if (node === null) continue;
    nodes.push(text.slice(last, match.index), node);
    const bare = label === undefined && node.localName === "a";
    last = match.index + (bare ? node.textContent.length : whole.length);
  }
  nodes.push(text.slice(last));
  return nodes.filter((node) => node !== "");
}

const cells = (row) => row.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());

function table(lines) {
  const row = (line, name) => element("tr", ...cells(line).slice(0, 50).map((cell) => element(name, ...inline(cell))));
  return element("table", element("thead", row(lines[0], "th")), element("tbody", ...lines.slice(2).map((line) => row(line, "td"))));
}

const kFence = /^ {0,3}(```+|~~~+)\s*([\w+#.-]*)/;
const kHeading = /^ {0,3}(#{1,6})\s+(.+?)\s*#*$/;
const kRule = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const kItem = /^( *)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const kTableLine = /^ *\|?(?: *:?-+:? *\|)+(?: *:?-+:? *)?$/;
const isTableLine = (line) => line.length <= 200 && kTableLine.test(line);
const begins = (line) => line.length <= kLineMax && startsBlock(line);
const startsBlock = (line) => kFence.test(line) || kHeading.test(line) || kRule.test(line) || kItem.test(line) || line.startsWith(">");

function listAt(lines, at, depth) {
  const first = kItem.exec(lines[at]);
  const indent = first[1].length;
  const ordered = /\d/.test(first[2]);
  const node = element(ordered ? "ol" : "ul");
  if (ordered) node.start = Number.parseInt(first[2], 10);
  while (at < lines.length) {
    const item = lines[at].length <= kLineMax ? kItem.exec(lines[at]) : null;
    if (!item || item[1].length !== indent || /\d/.test(item[2]) !== ordered) break;
    const inner = [item[3]];
    for (++at; at < lines.length; ++at) {
      const next = kItem.exec(lines[at]);
      if (next ? next[1].length <= indent : lines[at].trim() === "" ? !/^ {2,}\S/.test(lines[at + 1] ?? "") : !/^ {2,}/.test(lines[at])) break;
      inner.push(lines[at].replace(new RegExp(`^ {0,${indent + 2}}`), ""));
    }
    const simple = inner.length === 1;
    node.append(element("li", ...(simple ? inline(inner[0]) : blocks(inner, depth + 1))));
    if (at + 1 < lines.length && lines[at].trim() === "" && kItem.test(lines[at + 1])) ++at;
  }
  return [node, at];
}

function blocks(lines, depth = 0) {
  if (depth > kDepthMax) return [element("p", lines.join("\n"))];
  const nodes = [];
  for (let at = 0; at < lines.length; ) {
    const line = lines[at];
    const start = line.length <= kLineMax ? line : "x";
    const fence = kFence.exec(start);
    const heading = kHeading.exec(start);
    if (line.trim() === "") {
      ++at;
    } else if (fence) {
      const code = [];
      for (++at; at < lines.length && !lines[at].trim().startsWith(fence[1]); ++at) code.push(lines[at]);
      ++at;
      nodes.push(element("pre", element("code", code.join("\n"))));
      nodes.at(-1).tabIndex = 0;
    } else if (heading) {
      nodes.push(element(`h${Math.min(6, heading[1].length + 2)}`, ...inline(heading[2])));
      ++at;
    } else if (kRule.test(start)) {
      nodes.push(element("hr"));
      ++at;
    } else if (start.startsWith(">")) {
      const inner = [];
      for (; at < lines.length && lines[at].startsWith(">"); ++at) inner.push(lines[at].replace(/^> ?/, ""));
      nodes.push(element("blockquote", ...blocks(inner, depth + 1)));
    } else if (kItem.test(start)) {
      const [node, next] = listAt(lines, at, depth);
      nodes.push(node);
      at = next;
    } else if (start.includes("|") && isTableLine(lines[at + 1] ?? "")) {
      const rows = [];
      for (; at < lines.length && lines[at].includes("|"); ++at) rows.push(lines[at]);
      nodes.push(table(rows));
    } else {
      const paragraph = [line];
      for (++at; at < lines.length && lines[at].trim() !== "" && !begins(lines[at]); ++at) paragraph.push(lines[at]);
      const node = element("p");
      paragraph.forEach((text, i) => node.append(...(i ? [element("br")] : []), ...inline(text)));
      nodes.push(node);
    }
  }
  return nodes;
}

export function renderMarkdown(text) {
  const fragment = document.createDocumentFragment();
  fragment.append(...blocks(text.replace(/\r\n?/g, "\n").split("\n")));
  return fragment;
}
