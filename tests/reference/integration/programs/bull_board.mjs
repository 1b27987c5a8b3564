// bull-board over one queue: node bull_board.mjs <port of Redis> <queue>
import { createBullBoard } from "@bull-board/api";
import { BullMQAdapter } from "@bull-board/api/bullMQAdapter";
import { ExpressAdapter } from "@bull-board/express";
import { Queue } from "bullmq";
import express from "express";

const [port, name] = process.argv.slice(2);
const queue = new Queue(name, { connection: { host: "127.0.0.1", port: Number(port) } });
const serverAdapter = new ExpressAdapter();
createBullBoard({ queues: [new BullMQAdapter(queue)], serverAdapter });
const server = express().use(serverAdapter.getRouter()).listen(0, "127.0.0.1", () => {
  console.log(JSON.stringify({ url: `http://127.0.0.1:${server.address().port}` }));
});
