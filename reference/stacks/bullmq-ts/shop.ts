/** Labels, mails and the nightly manifest of a shop: node shop.js worker | create | submit PARCEL… | dead | replay QUEUE KEY */
import { type Job, Queue, UnrecoverableError } from 'bullmq';
import { Redis } from 'ioredis';
import pg from 'pg';
import { z } from 'zod';
import { announce, relay, TABLES, transaction } from './inbox.js';
import {
  closeOnSignal, forever, JOB, jobType, PRODUCER_REDIS, reliableWorker, replay, RetryLater, sweep, WORKER, WORKER_REDIS,
} from './reliable.js';

const env = z.object({
  REDIS_URL: z.string(), STORE: z.string(), CARRIER_URL: z.string(), MAILER_URL: z.string(),
  LOCK: z.coerce.number().default(WORKER.lockDuration), NIGHT: z.coerce.number().default(0), NOTE: z.string().default('1 Main St'),
}).parse(process.env);
const pool = new pg.Pool({ connectionString: env.STORE, max: 15, connectionTimeoutMillis: 10_000 });
pool.on('error', (error) => console.error(`store: ${error.message}`));

async function post(url: string, body: unknown, key: string): Promise<{ id: string }> {
  const headers = { 'content-type': 'application/json', 'idempotency-key': key };
  // Without a signal fetch waits for five minutes.
  const answer = await fetch(url, { method: 'POST', body: JSON.stringify(body), headers, signal: AbortSignal.timeout(4_000) });
  if (answer.status === 429) throw new RetryLater(Number(answer.headers.get('retry-after') ?? 5), 'HTTP 429');
  const passes = answer.status >= 500 || [408, 409, 425].includes(answer.status);
  if (!answer.ok) throw passes ? new Error(`HTTP ${answer.status}`) : new UnrecoverableError(`HTTP ${answer.status}`);
  return (await answer.json()) as { id: string };
}

// [types]
const Parcel = z.object({ parcel: z.string().max(100), address: z.string().min(1), crash: z.boolean().optional() });
const Mail = z.object({ parcel: z.string().max(100), label: z.string() });

const labels = {
  'buy-label': jobType(Parcel, async ({ parcel, crash }) => {
    if (crash) process.kill(process.pid, 'SIGKILL'); // as the kernel does when memory runs out
    // The key is the business id: the same in every retry, crash and replay.
    const label = await post(`${env.CARRIER_URL}/labels`, { parcel }, `label-${parcel}`);
    return async (tx) => {
      await tx.query('INSERT INTO labels (parcel, label) VALUES ($1, $2)', [parcel, label.id]);
      await announce(tx, 'mails', 'mail-label', `mail-${parcel}`, { parcel, label: label.id });
    };
  }),
  manifest: jobType(z.object({}), async (_, job) => {
    // One job per slot, whoever set the scheduler up: its time is the slot's.
    const slot = slotOf(job);
    await post(`${env.CARRIER_URL}/manifests`, { slot }, `manifest-${slot}`);
    return (tx) => tx.query('INSERT INTO manifests (slot) VALUES ($1)', [slot]);
  }),
};
const mails = {
  'mail-label': jobType(Mail, async ({ parcel, label }) => {
    await post(`${env.MAILER_URL}/mails`, { parcel, label }, `mail-${parcel}`);
    return (tx) => tx.query('INSERT INTO mailed (parcel, label) VALUES ($1, $2)', [parcel, label]);
  }),
};
// [/types]

const slotOf = (job: Job) => new Date(job.opts.prevMillis ?? job.timestamp).toISOString();

async function work(): Promise<void> {
  const connection = new Redis(env.REDIS_URL, WORKER_REDIS);
  const producer = new Redis(env.REDIS_URL, PRODUCER_REDIS);
  const queues = { labels: new Queue('labels', { connection: producer }), mails: new Queue('mails', { connection: producer }) };
  for (const one of [connection, producer, ...Object.values(queues)]) {
    one.on('error', (error: Error) => console.error(`redis: ${error.message}`));
  }
  const options = { connection, lockDuration: env.LOCK, stalledInterval: Math.ceil(env.LOCK / 3) };
  const workers = [
    reliableWorker('labels', labels, pool, options),
    // At most 50 mails a second, over all workers.
    reliableWorker('mails', mails, pool, { ...options, limiter: { max: 50, duration: 1000 } }),
  ];
  const stopping = new AbortController();
  const loops = [
    forever('relay', stopping.signal, 200, () => relay(pool, queues, JOB)),
    forever('sweep', stopping.signal, 1000, async () => {
      for (const queue of Object.values(queues)) await sweep(pool, queue);
    }),
  ];
  closeOnSignal(workers, stopping, () => Promise.race([Promise.all(loops), new Promise((done) => setTimeout(done, 3_000))]));
  await forever('schedule', stopping.signal, 1000, async () => {
    const repeat = env.NIGHT ? { every: env.NIGHT } : { pattern: '0 2 * * *', tz: 'UTC' };
    await queues.labels.upsertJobScheduler('manifest', repeat, { name: 'manifest', data: {}, opts: JOB });
    console.log('ready');
    await new Promise((done) => stopping.signal.addEventListener('abort', done));
  });
}

async function submit(parcels: string[], address: string, crash: boolean): Promise<void> {
  await transaction(pool, async (tx) => {
    for (const parcel of parcels) {
      const { rowCount } = await tx.query('INSERT INTO parcels (parcel) VALUES ($1) ON CONFLICT DO NOTHING', [parcel]);
      if (rowCount) await announce(tx, 'labels', 'buy-label', `label-${parcel}`, { parcel, address, ...(crash && { crash }) });
    }
  });
}

const [verb, ...rest] = process.argv.slice(2);
const words = rest.filter((word) => !word.startsWith('--'));
if (verb === 'worker') await work();
else {
  if (verb === 'create') {
    await pool.query(`${TABLES} CREATE TABLE parcels (parcel text PRIMARY KEY); CREATE TABLE labels (parcel text, label text);
      CREATE TABLE mailed (parcel text, label text); CREATE TABLE manifests (slot timestamptz)`);
  } else if (verb === 'submit') await submit(words, rest.includes('--no-address') ? '' : env.NOTE, rest.includes('--crash'));
  else if (verb === 'dead') console.table((await pool.query('SELECT * FROM dead_letters ORDER BY at LIMIT 100')).rows);
  else if (verb === 'replay') {
    // queuesmith: ignore[redis-default-timeout] an operator's command may wait for Redis
    const queue = new Queue(words[0]!, { connection: { url: env.REDIS_URL } });
    await replay(pool, queue, words[1]!).finally(() => queue.close());
  }
  await pool.end();
}
