// The two pictures of the live view, on canvases: where a step's blocks were, and when its passes ran. Colours
// come from the style sheet; what they show is also told in words.

export const kFates = {
  a: ["attended", "near, attended to"],
  f: ["fetched", "read ahead for this step"],
  l: ["late", "read ahead, still on its way"],
  m: ["missed", "missed: read when it was needed"],
  s: ["streamed", "streamed through staging"],
  n: ["near", "near, not attended to"],
  "-": ["far", "far only"],
};
const kPassColours = {
  project: "#56b4e9",
  attend: "#009e73",
  arrive: "#d55e00",
  predict: "#e69f00",
  select: "#f0e442",
  finish: "#0072b2",
};
const kOtherColour = "#8f98a5";
const kReadColours = { demand: "#d55e00", predicted: "#009e73", write: "#8f98a5", staged: "#8f7cc3" };

function prepared(canvas) {
  const scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * scale)) canvas.width = Math.round(width * scale);
  if (canvas.height !== Math.round(height * scale)) canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

function swatch(colour) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 1 1");
  svg.setAttribute("aria-hidden", "true");
  const rectangle = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  for (const name of ["width", "height"]) rectangle.setAttribute(name, "1");
  rectangle.setAttribute("fill", colour);
  svg.append(rectangle);
  return svg;
}

/** `entries`: [colour, words]. */
export function legend(list, entries) {
  list.replaceChildren(
    ...entries.map(([colour, words]) => {
      const item = document.createElement("li");
      item.append(swatch(colour), words);
      return item;
    }),
  );
}

export const colourOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** {letter: blocks}, of a map without columns of several blocks; else of its columns. */
export function countFates(rows) {
  const counts = Object.fromEntries(Object.keys(kFates).map((letter) => [letter, 0]));
  for (const row of rows) for (const letter of row) ++counts[letter];
  return counts;
}

/** `rows`: a string of letters for each layer. */
export function drawMap(canvas, rows) {
  const { context, width, height } = prepared(canvas);
  const columns = rows[0]?.length ?? 0;
  if (columns === 0) return;
  const colours = Object.fromEntries(Object.entries(kFates).map(([letter, [name]]) => [letter, colourOf(name)]));
  const cell = Math.min(width / columns, 24);
  const line = height / rows.length;
  const gap = cell > 3 && line > 3 ? 0.5 : 0;
  rows.forEach((row, y) => {
    for (let x = 0; x < columns; ++x) {
      context.fillStyle = colours[row[x]];
      context.fillRect(x * cell, y * line, cell - gap, line - gap);
    }
  });
}

/** Milliseconds by name of pass and of read: {project: 3.1, ...}. */
export function sumTimeline({ names, events }) {
  const sums = { passes: {}, reads: {} };
  for (const [name, track, , , us] of events) {
    const of = track === 0 ? sums.passes : sums.reads;
    of[names[name]] = (of[names[name]] ?? 0) + us / 1000;
  }
  return sums;
}

export const colourOfEvent = (name, track) => (track === 0 ? kPassColours : kReadColours)[name] ?? kOtherColour;

/** Passes above, a tick below each layer's "arrive", which is the deadline of its reads; reads and writes below in as many lanes as overlap (at most kLanes). */
export function drawTimeline(canvas, { ms, names, events }) {
  const { context, width, height } = prepared(canvas);
  const kLanes = 8;
  const scale = width / (ms * 1000);
  const top = height * 0.38;
  const lane = (height - top - 18) / kLanes;
  const ends = new Array(kLanes).fill(-1);
  context.font = "11px system-ui, sans-serif";
  for (const [name, track, , start, us] of events) {
    context.fillStyle = colourOfEvent(names[name], track);
    const x = Math.max(0, start * scale);
    if (track === 0) {
      context.fillRect(x, 14, Math.max(0.5, us * scale), top - 16);
      if (names[name] === "arrive") context.fillRect(x, top - 2, 1, 6);
    } else if (us > 0) {
      let at = ends.findIndex((end) => end <= start);
      if (at < 0) at = kLanes - 1;
      ends[at] = start + us;
      context.fillRect(x, top + 16 + at * lane, Math.max(1, us * scale), Math.max(1, lane - 1));
    }
  }
  context.fillStyle = colourOf("text");
  context.fillText("passes", 2, 10);
  context.fillText("reads and writes", 2, top + 11);
  context.textAlign = "right";
  context.fillText(`${ms.toFixed(1)} ms`, width - 2, 10);
  context.textAlign = "left";
}
