// A Node.js service that has never heard of us: a queue "mail" with a worker and a schedule. node node_side.mjs PORT
import { Queue, Worker } from "bullmq";

const connection = { host: "127.0.0.1", port: Number(process.argv[2]), maxRetriesPerRequest: null };
const say = (event, more) => console.log(JSON.stringify({ event, ...more }));
const queue = new Queue("mail", { connection });
let broken = true;

new Worker("mail", async (job) => {
  say("start", { name: job.name, id: job.id });
  await job.log(`to ${job.data.to}`);
  if (job.name === "hold") await new Promise(() => {});
  if (job.name === "breaks" && broken) {
    broken = false;
    throw new Error("the mail server said no");
  }
  return { sent: job.data.to };
}, { connection, name: "post-office", concurrency: 3 });

await queue.upsertJobScheduler("digest", { pattern: "0 6 * * *", tz: "Europe/Berlin" }, { name: "digest", data: { to: "all" } });
await queue.add("welcome", { to: "ann", password: "hunter2" }, { jobId: "welcome-ann" });
await queue.add("breaks", { to: "bob" }, { jobId: "breaks-bob" });
await queue.add("later", { to: "eve" }, { jobId: "later-eve", delay: 3_600_000 });
await queue.add("hold", { to: "zoe" }, { jobId: "hold-zoe" });
say("ready", {});
