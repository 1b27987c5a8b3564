// What the calculators compute, without a page: mirrors of reference/studyhall/patterns/retry.py and of the storm
// in tests/reference/unit/test_retry.py. tests/guide compares them number by number.
"use strict";

(function () {
  /** The longest delay after failure number `attempt`, counted from 0: min(cap, base * 2**attempt). */
  function ceiling(base, cap, attempt) {
    const exponent = Math.min(Math.max(attempt, 0), 64);
    return Math.min(cap, base * 2 ** exponent);
  }

  /** retry.full_jitter; `random` returns numbers from 0 to 1. */
  function fullJitter(base, cap, attempt, random) {
    return random() * ceiling(base, cap, attempt);
  }

  /** One row per retry: attempts - 1 of them, for the first run has no delay. */
  function backoff(base, cap, attempts, random) {
    const rows = [];
    let plain = 0;
    for (let n = 0; n < attempts - 1; n += 1) {
      const most = ceiling(base, cap, n);
      plain += most;
      rows.push({ retry: n + 1, ceiling: most, mean: most / 2, drawn: fullJitter(base, cap, n, random), total: plain });
    }
    return rows;
  }

  /** Jobs in work by Little's law, and the processes that hold them at the given utilisation. */
  function littlesLaw(perSecond, seconds, slots, utilisation) {
    const inWork = perSecond * seconds;
    const processes = Math.max(1, Math.ceil(Number((inWork / (slots * utilisation)).toFixed(9))));
    return { inWork: inWork, processes: processes, load: inWork / (processes * slots) };
  }

  /** Calls per 100 ms on a server that answers `capacity` of them; all clients call together at first. */
  function storm(clients, attempts, capacity, delayAfter) {
    const windows = new Map([[0, new Array(clients).fill(0)]]);
    const calls = [];
    let peak = 0;
    let succeeded = 0;
    while (windows.size) {
      const now = Math.min(...windows.keys());
      const callers = windows.get(now);
      windows.delete(now);
      calls.push([now, callers.length]);
      if (now) peak = Math.max(peak, callers.length);
      succeeded += Math.min(callers.length, capacity);
      for (const failures of callers.slice(capacity)) {
        if (failures + 1 < attempts) {
          const at = now + Math.max(1, Math.ceil(delayAfter(failures) * 10));
          if (!windows.has(at)) windows.set(at, []);
          windows.get(at).push(failures + 1);
        }
      }
    }
    return { peak: peak, succeeded: succeeded, calls: calls };
  }

  /** A small seeded generator, so that a page shows the same draw twice. */
  function seeded(seed) {
    let state = seed >>> 0;
    return function () {
      state = (state + 0x6d2b79f5) >>> 0;
      let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
      mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
      return ((mixed ^ (mixed >>> 14)) >>> 0) / 4294967296;
    };
  }

  window.Queuesmith = { ceiling, fullJitter, backoff, littlesLaw, storm, seeded };
})();
