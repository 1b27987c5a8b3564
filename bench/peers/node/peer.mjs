// BullMQ on Node: the same verbs, kinds of work and records as shared/contest.py.
import { appendFileSync, openSync, writeSync } from "node:fs";
import { parseArgs } from "node:util";
import { Queue, Worker } from "bullmq";
import IORedis from "ioredis";

const text = (value) => ({ type: "string", ...(value === undefined ? {} : { default: value }) });
const { values: given, positionals: [verb] } = parseArgs({
  allowPositionals: true,
  options: {
    url: text(), queue: text("bench"), tally: text(), processes: text("1"), concurrency: text("50"), takeover: text(), tries: text("1"),
    jobs: text(), kind: text("noop"), payload: text("0"), rate: text(), first: text("0"), delay: text(),
    bulk: { type: "boolean", default: false },
  },
});
const connection = new IORedis(given.url, { maxRetriesPerRequest: null });
const sleep = (ms) => new Promise((done) => setTimeout(done, ms));
const now = () => Math.round((performance.timeOrigin + performance.now()) * 1e6); // nanoseconds since the epoch

function compute(ms) {
  const spent = () => { const used = process.cpuUsage(); return (used.user + used.system) / 1000; };
  for (const end = spent() + ms; spent() < end;);
}

// Node has no SQLite before 22.5: the row of a job is a line of a file.
const insert = (job) => appendFileSync(`${process.env.BENCH_STORE}.rows`, `${job.n}\n`);

function work() {
  const tally = openSync(given.tally, "a");
  const lock = (given.takeover ? +given.takeover : 60) * 500;
  new Worker(given.queue, async ({ data: job }) => {
    const started = now();
    const note = () => {
      const record = Buffer.alloc(32);
      [job.n, job.sent, started, now()].forEach((field, i) => record.writeBigInt64LE(BigInt(field), i * 8));
      writeSync(tally, record);
    };
    if (job.kind === "io5") await sleep(5);
    else if (job.kind === "hold") { note(); await sleep(3600_000); }
    else if (job.kind === "cpu20") compute(20);
    else if (job.kind === "row") { await sleep(20); insert(job); await sleep(20); }
    else if (job.kind === "begin") { insert(job); await sleep(30_000); }
    note();
    if (job.kind === "fail") throw new Error("on purpose");
  }, { connection, concurrency: +given.concurrency, lockDuration: lock, stalledInterval: lock,
    maxStalledCount: +given.tries });
}

async function enqueue() {
  const queue = new Queue(given.queue, { connection });
  await queue.waitUntilReady();
  const body = "x".repeat(+given.payload), first = +given.first, jobs = +given.jobs;
  const opts = given.delay ? { delay: +given.delay * 1000 } : {};
  const make = (n) => ({ n, sent: now(), kind: given.kind, body });
  const began = performance.now();
  if (given.bulk) {
    for (let n = first; n < first + jobs; n += 500) {
      const size = Math.min(500, first + jobs - n);
      await queue.addBulk(Array.from({ length: size }, (_, i) => ({ name: "job", data: make(n + i), opts })));
    }
  } else {
    for (let n = 0; n < jobs; n++) {
      if (given.rate) await sleep(Math.max(0, began + (n * 1000) / +given.rate - performance.now()));
      await queue.add("job", make(first + n), opts);
    }
  }
  console.log(JSON.stringify({ seconds: (performance.now() - began) / 1000 }));
  process.exit(0);
}

await (verb === "worker" ? work() : enqueue());
