// The worker of BullMQ's quick start; its job asks a carrier for a label.
import { Worker } from "bullmq";
import IORedis from "ioredis";

const connection = new IORedis(process.env.REDIS_URL, { maxRetriesPerRequest: null });

const worker = new Worker(
  "parcels",
  async (job) => {
    const answer = await fetch(process.env.CARRIER_URL + "/labels", {
      method: "POST",
      body: JSON.stringify({ parcel: job.data.parcel }),
    });
    if (!answer.ok) throw new Error("the carrier said " + answer.status);
    return (await answer.json()).id;
  },
  { connection, concurrency: 4 },
);

worker.on("failed", (job, error) => console.log(`${job.id} has failed with ${error.message}`));
