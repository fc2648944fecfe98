// The live view: samples of steps as the server sends them, a few a second. Listens only while it is seen.

import { bytes, count, steps } from "./api.js";
import { colourOf, colourOfEvent, countFates, drawMap, drawTimeline, kFates, legend, sumTimeline } from "./draw.js";

const kAgainAfter = 1500; // ms, when the stream has ended
const kGapMax = 5; // s between samples, beyond which something else lay between them
const kOld = 3000; // ms since a step, after which nothing is being decoded
const field = (id) => document.getElementById(id);
const percent = (part, whole) => (whole > 0 ? `${((100 * part) / whole).toFixed(1)} %` : "–");

/** Calls back with each sample, and listens again when the stream breaks off, until it is stopped. */
export function listen({ onSample, onState }) {
  const abort = new AbortController();
  (async () => {
    while (!abort.signal.aborted) {
      try {
        for await (const sample of steps(abort.signal)) onSample(sample);
        onState("ended");
      } catch (error) {
        if (abort.signal.aborted) return;
        onState(error.kind);
      }
      await new Promise((resolve) => setTimeout(resolve, kAgainAfter));
    }
  })();
  return () => abort.abort();
}

/** What happened between two samples of the same server, a second and in parts of what was done. */
export function rates(before, now) {
  if (!before || now.totals.steps < before.totals.steps) return null;
  const seconds = (now.time_ms - before.time_ms) / 1000;
  if (seconds <= 0 || seconds > kGapMax) return null;
  const part = (name) => now.totals[name] - before.totals[name];
  return {
    tokensPerSecond: part("tokens") / seconds,
    stall: part("stall_ms") / (seconds * 1000),
    readPerSecond: part("read_bytes") / seconds,
    attended: part("blocks_attended"),
    missed: part("blocks_missed"),
    late: part("blocks_late"),
  };
}

export class LiveView {
  constructor() {
    this.stop = null;
    this.props = null;
    this.last = null;
    this.shown = null; // what is on the page
    this.meters = null;
    document.addEventListener("visibilitychange", () => this.listenIfSeen());
    window.addEventListener("resize", () => this.draw());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  setServer(props) {
    this.props = props;
  }

  setOpen(open) {
    field("live").hidden = !open;
    this.listenIfSeen();
    this.draw();
  }

  listenIfSeen() {
    const seen = !field("live").hidden && !document.hidden;
    if (seen && !this.stop) {
      this.last = null;
      this.stop = listen({ onSample: (sample) => this.take(sample), onState: (state) => this.noteState(state) });
    } else if (!seen && this.stop) {
      this.stop();
      this.stop = null;
    }
  }

  noteState(state) {
    const words = { key: "The server wants an API key for the live view.", ended: "The server shuts down.", gone: "The server cannot be reached." };
    field("live-state").textContent = words[state] ?? "The live view has no connection.";
  }

  take(sample) {
    const found = rates(this.last, sample);
    const now = found && found.attended >= 0 ? found : null;
    this.last = sample;
    this.shown = { sample, rates: now };
    clearTimeout(this.idle);
    this.idle = setTimeout(() => {
      field("live-state").textContent = "Nothing is being decoded now; this was the last step seen.";
    }, Math.max(0, kOld - sample.age_ms));
    const others = sample.running > 1 ? `, of ${count(sample.running)} that run` : "";
    const text = `Answer ${sample.sequence.id}${others}${sample.waiting > 0 ? `; ${count(sample.waiting)} wait` : ""}.`;
    if (field("live-state").textContent !== text) field("live-state").textContent = text;
    this.draw();
  }

  draw() {
    if (!this.shown || field("live").hidden) return;
    const { sample } = this.shown;
    this.drawFigures();
    this.drawMemory(sample);
    const { rows, blocks_per_column: each } = sample.sequence.map;
    drawMap(field("map"), rows);
    const counts = countFates(rows);
    const told = Object.entries(kFates).filter(([letter]) => counts[letter] > 0);
    legend(field("map-legend"), told.map(([letter, [name, words]]) => [colourOf(name), `${words}: ${count(counts[letter])}`]));
    const { tokens, block_tokens: blockTokens } = sample.sequence;
    field("map-caption").textContent = `One row a layer (${count(rows.length)}), one column ${each > 1 ? `${each} blocks` : "a block"} of ${blockTokens} tokens; the context has ${count(tokens)} tokens.`;
    field("map").setAttribute("aria-label", `Blocks of ${rows.length} layers: ${told.map(([letter, [, words]]) => `${words} ${counts[letter]}`).join(", ")}`);
    this.drawTimes(sample);
  }

  drawTimes({ timeline }) {
    drawTimeline(field("timeline"), timeline);
    const { passes, reads } = sumTimeline(timeline);
    const entries = [
      ...Object.entries(passes).map(([name, ms]) => [colourOfEvent(name, 0), `${name} ${ms.toFixed(1)} ms`]),
      ...Object.keys(reads).map((name) => [colourOfEvent(name, 1), `${name === "predicted" ? "read ahead" : name === "demand" ? "read on demand" : name}`]),
    ];
    legend(field("timeline-legend"), entries);
    const words = Object.entries(passes).map(([name, ms]) => `${name} ${ms.toFixed(1)} ms`).join(", ");
    field("timeline").setAttribute("aria-label", `A step of ${timeline.ms.toFixed(1)} ms: ${words}`);
    field("timeline-caption").textContent = "A tick below the passes is a layer's deadline: there it needs its blocks, or waits for them (“arrive”). What is read ahead has until its layer's tick in the next step.";
  }

  drawFigures() {
    const { sample, rates: now } = this.shown;
    const { sequence, totals } = sample;
    const recall = now && now.attended > 0 ? now : { attended: totals.blocks_attended, missed: totals.blocks_missed, late: totals.blocks_late };
    const figures = [
      ["Tokens a second", now ? now.tokensPerSecond.toFixed(1) : "–"],
      ["Stall, of the time", now ? percent(now.stall, 1) : "–"],
      ["Far tier reads", now ? `${bytes(now.readPerSecond)}/s` : "–"],
      ["Recall of blocks", percent(recall.attended - recall.missed, recall.attended)],
      ["Late blocks", percent(recall.late, recall.attended)],
      ["Right guesses", percent(sequence.guesses_right, sequence.guesses)],
      ["Policy", sample.auto ? `auto: ${sample.auto}` : `${sequence.policy}${sequence.policy === "full" ? "" : `, budget ${count(sequence.budget_tokens)} tokens`}`, true],
    ];
    const list = field("figures");
    if (list.childElementCount !== figures.length) {
      list.replaceChildren(
        ...figures.map(([name, , wide]) => {
          const division = document.createElement("div");
          if (wide) division.className = "wide";
          const term = document.createElement("dt");
          term.textContent = name;
          division.append(term, document.createElement("dd"));
          return division;
        }),
      );
    }
    figures.forEach(([, value], i) => (list.children[i].lastChild.textContent = value));
  }

  drawMemory({ near, far, sequence }) {
    const tiers = [
      ["Near tier", near.bytes_used, near.bytes],
      ["This answer, near", sequence.near_bytes, near.bytes],
      ["Far tier, kept prefixes included", far.bytes_used, far.bytes],
    ];
    this.meters ??= tiers.map(() => {
      const label = document.createElement("label");
      const text = document.createElement("span");
      const meter = document.createElement("meter");
      label.append(text, meter);
      field("memory").append(label);
      return { text, meter };
    });
    tiers.forEach(([name, used, planned], i) => {
      const { text, meter } = this.meters[i];
      text.textContent = planned > 0 ? `${name}: ${bytes(used)} of ${bytes(planned)} planned` : `${name}: none`;
      meter.max = planned || 1;
      meter.value = used;
    });
  }
}
