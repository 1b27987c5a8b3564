// node node_adds.mjs PORT QUEUE '[[name, data, options], …]': adds jobs as a Node service does.
import { Queue } from "bullmq";

const [port, name, jobs] = process.argv.slice(2);
const queue = new Queue(name, { connection: { port: Number(port) } });
for (const [job, data, options] of JSON.parse(jobs)) await queue.add(job, data, options);
await queue.close();
