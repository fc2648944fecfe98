// The server's HTTP API: requests with the key, errors with what to do about them, event streams.

/** What went wrong, in words for people. kind: "key", "context", "busy", "gone", "stopped" or "request". */
export class ApiError extends Error {
  constructor(kind, message) {
    super(message);
    this.kind = kind;
  }
}

let key = "";

export function setKey(value) {
  key = value;
}

function headers(body) {
  const all = {};
  if (key) all.Authorization = `Bearer ${key}`;
  if (body !== undefined) all["Content-Type"] = "application/json";
  return all;
}

function errorOf(status, error) {
  const message = error?.message || `the server answered with status ${status}`;
  if (status === 401) return new ApiError("key", "The server does not take this API key. Write the right one in the settings.");
  if (error?.code === "context_length_exceeded") {
    const sizes = error.n_prompt_tokens ? `${count(error.n_prompt_tokens)} tokens are more than the ${count(error.n_ctx)} of the context. ` : "";
    return new ApiError("context", `${sizes}Shorten the document or begin a new conversation, or start the server with a larger -c.`);
  }
  if (status === 429) return new ApiError("busy", "The server has no room for another answer right now. Try again in a moment.");
  if (status === 503) return new ApiError("busy", `The server cannot answer yet: ${message}. Try again in a moment.`);
  if (status === 403) return new ApiError("request", `The server refuses this page: ${message}`);
  return new ApiError("request", `The server refused it: ${message}`);
}

async function request(path, { body, signal } = {}) {
  let response;
  try {
    response = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      headers: headers(body),
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw new ApiError("stopped", "Stopped.");
    throw new ApiError("gone", "The server cannot be reached. It is asked again until it is back.");
  }
  if (response.ok) return response;
  let error = null;
  try {
    error = (await response.json()).error;
  } catch {
    // Not from our server; the status says enough.
  }
  throw errorOf(response.status, error);
}

export const getProps = async () => (await request("props")).json();

/** "ok", "loading" or "gone". */
export async function health() {
  try {
    const response = await fetch("health", { cache: "no-store", signal: AbortSignal.timeout(4000) });
    return response.ok ? "ok" : "loading";
  } catch {
    return "gone";
  }
}

export async function countTokens(content, signal) {
  const reply = await request("tokenize", { body: { content, parse_special: false }, signal });
  return (await reply.json()).count;
}

/** The data of each event of a stream, parsed; comments are left out. Ends with "[DONE]" or the stream. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    while (true) {
      const { value, done } = await reader.read();
      if (done) return;
      text += value;
      let end;
      while ((end = text.indexOf("\n\n")) >= 0) {
        const event = text.slice(0, end);
        text = text.slice(end + 2);
        if (!event.startsWith("data: ")) continue;
        const data = event.slice(6);
        if (data === "[DONE]") return;
        yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function* stream(path, options) {
  const response = await request(path, options);
  try {
    yield* events(response);
  } catch (error) {
    if (options.signal?.aborted) throw new ApiError("stopped", "Stopped.");
    throw new ApiError("gone", "The server went away in the middle of it. Retry when it is back.");
  }
}

/**
 * A chat completion. Calls back with what comes: onProgress(processed, total) of the prompt, onText(piece). Returns
 * {finish, usage, timings, seed}. A stream that ends without its end is "gone".
 */
export async function chat(body, { onProgress, onText, signal }) {
  const end = { finish: null, usage: null, timings: null, seed: null };
  const asked = { ...body, stream: true, stream_options: { include_usage: true }, return_progress: true };
  for await (const event of stream("v1/chat/completions", { body: asked, signal })) {
    if (event.error) throw errorOf(500, event.error);
    if (event.prompt_progress) onProgress(event.prompt_progress.processed, event.prompt_progress.total);
    if (event.usage) end.usage = event.usage;
    if (event.timings) end.timings = event.timings;
    const choice = event.choices?.[0];
    if (!choice) continue;
    if (choice.delta?.content) onText(choice.delta.content);
    if (choice.finish_reason) {
      end.finish = choice.finish_reason;
      end.seed = choice.seed;
    }
  }
  if (signal?.aborted) throw new ApiError("stopped", "Stopped.");
  if (end.finish === null) throw new ApiError("gone", "The server went away in the middle of the answer. Retry when it is back.");
  return end;
}

/** Samples of steps, for as long as the signal lets them come. */
export const steps = (signal) => stream("v1/dualdecoder/steps", { signal });

export const count = (number) => Math.round(number).toLocaleString("en-US");

export function bytes(number) {
  for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (number >= size) return `${(number / size).toFixed(number >= 100 * size ? 0 : 1)} ${unit}`;
  }
  return `${number} B`;
}
