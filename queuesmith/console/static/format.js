// Numbers and times for people.

export function seconds(value) {
  const n = Number(value);
  if (!Number.isFinite(n)) return "–";
  if (n < 0.95) return n <= 0.05 ? "0 s" : `${n.toFixed(1)} s`;
  if (n < 90) return `${Math.round(n)} s`;
  if (n < 5400) return `${Math.round(n / 60)} min`;
  if (n < 129600) return `${(n / 3600).toFixed(n < 36000 ? 1 : 0)} h`;
  return `${Math.round(n / 86400)} d`;
}

/** `since`: seconds since 1970, or an ISO text. */
export function moment(since) {
  if (since === null || since === undefined || since === "") return null;
  const date = typeof since === "number" ? new Date(since * 1000) : new Date(since);
  return Number.isNaN(date.getTime()) ? null : date;
}

export function ago(since) {
  const date = moment(since);
  if (!date) return "–";
  const gone = (Date.now() - date.getTime()) / 1000;
  return gone < 2 ? "just now" : `${seconds(gone)} ago`;
}

export function clock(since) {
  const date = moment(since);
  return date ? date.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" }) : "–";
}

export function full(since) {
  const date = moment(since);
  return date ? date.toLocaleString([], { dateStyle: "medium", timeStyle: "medium" }) : "";
}

/** "in 5 min (14:03:22)", or with the day when that is not today, and then without seconds. */
export function ahead(at) {
  const date = moment(at);
  if (!date) return "–";
  const left = (date.getTime() - Date.now()) / 1000;
  const when = date.toDateString() === new Date().toDateString() ? clock(at) : date.toLocaleString([], { month: "short", day: "numeric", hour: "numeric", minute: "2-digit" });
  return left > 0 ? `in ${seconds(left)} (${when})` : `overdue by ${seconds(-left)}`;
}

/** The zone of every time shown here. */
export function zone() {
  const offset = new Date().toLocaleTimeString("en", { timeZoneName: "shortOffset" }).split(" ").pop().replace("GMT", "UTC");
  return `Times in ${Intl.DateTimeFormat().resolvedOptions().timeZone} (${offset})`;
}

export function count(value) {
  return Number(value ?? 0).toLocaleString("en");
}

export function plural(n, one, many = `${one}s`) {
  return `${count(n)} ${n === 1 ? one : many}`;
}

export function bytes(value) {
  const n = Number(value ?? 0);
  if (n < 1000) return `${n} bytes`;
  return n < 1e6 ? `${(n / 1e3).toFixed(0)} kB` : `${(n / 1e6).toFixed(1)} MB`;
}

export function percent(share) {
  const n = Number(share ?? 0) * 100;
  return `${n > 0 && n < 10 ? n.toFixed(1) : Math.round(n)} %`;
}

export function short(id) {
  const value = String(id ?? "");
  return value.length > 22 ? `${value.slice(0, 10)}…${value.slice(-8)}` : value;
}
