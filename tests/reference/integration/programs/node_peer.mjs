// The Node.js side of the interoperability tests: node node_peer.mjs <produce|work|hold|flow|workers> <port>
import { FlowProducer, Queue, QueueEvents, Worker } from "bullmq";

const [mode, port] = process.argv.slice(2);
const connection = { host: "127.0.0.1", port: Number(port), maxRetriesPerRequest: null };
const say = (event, more) => console.log(JSON.stringify({ event, ...more }));

if (mode === "produce") {
  // Jobs for a Python worker; reports how each of them ended as QueueEvents and Job see it.
  const queue = new Queue("from-node", { connection });
  const events = new QueueEvents("from-node", { connection });
  await events.waitUntilReady();
  const add = (name, opts) => queue.add(name, { name, unicode: "żółć", n: 1.5 }, opts);
  const jobs = {
    ok: await add("ok", {}),
    retried: await add("retried", { attempts: 3, backoff: { type: "fixed", delay: 50 } }),
    fails: await add("fails", { attempts: 2 }),
    permanent: await add("permanent", { attempts: 5 }),
    delayed: await add("delayed", { delay: 300 }),
  };
  for (const [name, job] of Object.entries(jobs)) {
    let result, error;
    try { result = await job.waitUntilFinished(events, 20000); } catch (e) { error = e.message; }
    const seen = await queue.getJob(job.id);
    const late = name === "delayed" ? seen.processedOn - seen.timestamp - 300 : undefined;
    say("finished", { name, result, error, attemptsMade: seen.attemptsMade, late,
      state: await seen.getState(), progress: seen.progress, logs: (await queue.getJobLogs(job.id)).logs,
      traces: (seen.stacktrace ?? []).length });
  }
  await events.close();
  await queue.close();
} else if (mode === "work") {
  // A worker for jobs that Python adds.
  new Worker("to-node", async (job) => {
    say("start", { name: job.name, data: job.data, priority: job.opts.priority ?? 0 });
    if (job.name === "retried" && job.attemptsMade < 2) throw new Error("not yet");
    if (job.name === "fails") throw new Error("node says no");
    return { node: true, got: job.data };
  }, { connection, concurrency: 1 });
  new Worker("flow-children", async (job) => job.data.n * 10, { connection });
  new Worker("flow-parent", async (job) => Object.values(await job.getChildrenValues()).reduce((a, b) => a + b),
    { connection });
  say("ready", {});
} else if (mode === "hold") {
  // A worker with everything at its default that is busy for good with its first job.
  new Worker("held", async (job) => {
    say("start", { name: job.name });
    await new Promise(() => {});
  }, { connection });
  say("ready", {});
} else if (mode === "workers") {
  // How many workers a dashboard would show.
  const seen = {};
  for (const name of ["zürich", "plain"]) {
    const queue = new Queue(name, { connection });
    seen[name] = await queue.getWorkersCount();
    await queue.close();
  }
  say("workers", seen);
} else if (mode === "flow") {
  // A flow whose parent and children are run by Python.
  const flow = new FlowProducer({ connection });
  const events = new QueueEvents("py-parent", { connection });
  await events.waitUntilReady();
  const tree = await flow.add({ name: "parent", queueName: "py-parent", data: {},
    children: [1, 2, 3].map((n) => ({ name: "child", queueName: "py-children", data: { n } })) });
  say("flow", { sum: await tree.job.waitUntilFinished(events, 20000) });
  await events.close();
  await flow.close();
}
