// The one way to the server: same origin only, the token in a header (never in an address), errors in words.

const KEY = "queuesmith.console-token"; // sessionStorage: gone with the tab
const BASE = new URL(".", import.meta.url); // wherever the console is mounted

/** "/admin/queues" -> its address under our own */
export function address(path) {
  return new URL(path.replace(/^\//, ""), BASE);
}

/** path("/admin/jobs", queue, id): a slash or a percent sign in a name is quoted twice, or the path would end there. */
export function path(base, ...parts) {
  return [base, ...parts.map((part) => encodeURIComponent(/[/%]/.test(part) ? encodeURIComponent(part) : part))].join("/");
}

export class ApiError extends Error {
  constructor(status, message, retryAfter = null, kind = "") {
    super(message);
    this.status = status; // 0: no answer at all
    this.retryAfter = retryAfter;
    this.kind = kind;
  }
}

let memory = null;
const listeners = new Set();
/** none | checking | accepted | refused | off (the server has no token set) */
export const access = { state: "none", detail: "" };

export function onAccess(listener) {
  listeners.add(listener);
}

function become(state, detail = "") {
  if (access.state === state && access.detail === detail) return;
  Object.assign(access, { state, detail });
  for (const listener of listeners) listener();
}

export function token() {
  try {
    return sessionStorage.getItem(KEY) ?? memory;
  } catch {
    return memory;
  }
}

function keep(value) {
  memory = value;
  try {
    if (value === null) sessionStorage.removeItem(KEY);
    else sessionStorage.setItem(KEY, value);
  } catch {
    // Storage is switched off: the token lives as long as the page.
  }
}

/** Try a token; it is kept only when the server takes it. */
export async function offer(value) {
  keep(value);
  const taken = await recheck();
  if (!taken) keep(null);
  return taken;
}

/** Check our token. A server that is down says nothing about it: it is kept. */
export async function recheck() {
  become("checking");
  try {
    await admin("/admin/session"); // does not ask Redis, which may be down
    return true;
  } catch (error) {
    if (access.state === "checking") become("none", error.message);
    return false;
  }
}

export function forget() {
  keep(null);
  become("none");
}

export function get(path, options) {
  return request(path, options);
}

export function post(path, json, options) {
  return request(path, { method: "POST", json, ...options });
}

/** An admin call. Its answer also shows whether the token is valid. */
export async function admin(path, options = {}) {
  try {
    const answer = await request(path, { ...options, authorised: true });
    become("accepted");
    return answer;
  } catch (error) {
    if (error.status === 401) {
      keep(null);
      become("refused", error.message);
    } else if (error.kind === "admin-off") {
      become("off", error.message);
    }
    throw error;
  }
}

/** Download a file: not a plain link, because the token goes in a header. */
export async function download(path, name) {
  const answer = await fetch(address(path), { headers: { Authorization: `Bearer ${token()}` }, credentials: "omit", cache: "no-store" });
  if (!answer.ok) throw new ApiError(answer.status, `The server answered ${answer.status}.`);
  save(await answer.blob(), name);
}

export function save(blob, name) {
  const url = URL.createObjectURL(blob);
  const link = Object.assign(document.createElement("a"), { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

async function request(path, { method = "GET", json, form, authorised = false, signal, headers = {} } = {}) {
  const sent = { Accept: "application/json", ...headers };
  if (authorised && token()) sent.Authorization = `Bearer ${token()}`;
  if (json !== undefined) sent["Content-Type"] = "application/json";
  if (method !== "GET") sent["Idempotency-Key"] ??= unique(); // this request sent twice counts once
  let answer;
  try {
    answer = await fetch(address(path), {
      method,
      headers: sent,
      body: form ?? (json === undefined ? undefined : JSON.stringify(json)),
      signal: signal ?? AbortSignal.timeout(15000),
      credentials: "omit",
      cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server does not answer.");
  }
  const body = await answer.json().catch(() => null);
  if (answer.ok) return body;
  const words = typeof body?.detail === "string" ? body.detail : body?.title;
  const after = Number(answer.headers.get("Retry-After")) || null;
  throw new ApiError(answer.status, words || `The server answered ${answer.status}.`, after, String(body?.type ?? "").split(":").pop());
}

function unique() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}
