import { Queue } from "bullmq";
import IORedis from "ioredis";

const connection = new IORedis(process.env.REDIS_URL, { maxRetriesPerRequest: null });
const queue = new Queue("parcels", { connection });
for (const parcel of process.argv.slice(2)) {
  await queue.add("label", { parcel }, { attempts: 3, backoff: { type: "exponential", delay: 1000 } });
}
await queue.close();
connection.disconnect();
