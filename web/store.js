// Conversations in IndexedDB, where long documents have room. A conversation is {id, title, updated, revision,
// messages}; lists are read without messages. Tabs tell each other of changes, and none writes over what
// another has written: who comes second keeps a copy.

const SUMMARIES = "summaries";
const BODIES = "bodies";
const channel = new BroadcastChannel("dualdecoder");
let database = null;

function promised(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

function opened() {
  database ??= new Promise((resolve, reject) => {
    const request = indexedDB.open("dualdecoder", 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore(SUMMARIES, { keyPath: "id" });
      request.result.createObjectStore(BODIES, { keyPath: "id" });
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return database;
}

async function inTransaction(mode, work) {
  const transaction = (await opened()).transaction([SUMMARIES, BODIES], mode);
  const done = new Promise((resolve, reject) => {
    transaction.oncomplete = resolve;
    transaction.onabort = () => reject(transaction.error);
  });
  const result = await work(transaction.objectStore(SUMMARIES), transaction.objectStore(BODIES));
  await done;
  return result;
}

const newId = () => [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("");

export const newConversation = () => ({ id: newId(), title: "", updated: Date.now(), revision: 0, messages: [] });

/** Newest first, without their messages. */
export async function list() {
  const all = await inTransaction("readonly", (summaries) => promised(summaries.getAll()));
  return all.sort((a, b) => b.updated - a.updated);
}

export async function load(id) {
  return inTransaction("readonly", async (summaries, bodies) => {
    const [summary, body] = await Promise.all([promised(summaries.get(id)), promised(bodies.get(id))]);
    return summary && body ? { ...summary, messages: body.messages } : null;
  });
}

/** Returns true when another tab had written it meanwhile (or removed it), so that it has become a copy with an id of its own. */
export async function save(conversation) {
  conversation.updated = Date.now();
  const copied = await inTransaction("readwrite", async (summaries, bodies) => {
    const stored = await promised(summaries.get(conversation.id));
    const changed = (stored?.revision ?? 0) !== conversation.revision;
    if (changed) {
      conversation.id = newId();
      conversation.title = `${conversation.title} (copy)`;
    }
    ++conversation.revision;
    const { messages, ...summary } = conversation;
    summaries.put(summary);
    bodies.put({ id: summary.id, messages });
    return changed;
  });
  channel.postMessage({ id: conversation.id });
  return copied;
}

export async function remove(id) {
  await inTransaction("readwrite", (summaries, bodies) => Promise.all([promised(summaries.delete(id)), promised(bodies.delete(id))]));
  channel.postMessage({ id });
}

/** Calls back with the id of what another tab has changed. */
export function onChange(callback) {
  channel.onmessage = (event) => callback(event.data.id);
}
