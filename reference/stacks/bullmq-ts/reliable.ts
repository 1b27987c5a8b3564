/**
 * A BullMQ worker with typed jobs whose crashes, errors and waits end as they should.
 *
 * Promise: a payload that its Zod schema refuses, and an unknown name, fail for good at once. The class of an error decides:
 * `RetryLater` waits and consumes no attempt, `UnrecoverableError` fails for good, all else is retried with full jitter. A crash
 * consumes no attempt; a job whose workers died `crashes` times fails visibly. `sweep` copies failed jobs into the database,
 * where a kill loses none of them. SIGTERM finishes what runs.
 *
 * When it does not hold: a handler that blocks the event loop for longer than `lockDuration` runs twice.
 */
import { DelayedError, type FlowJob, type Job, type JobsOptions, type Queue, UnrecoverableError, Worker, type WorkerOptions } from 'bullmq';
import type { RedisOptions } from 'ioredis';
import type { Pool, PoolClient } from 'pg';
import type { ZodType } from 'zod';
import { once } from './inbox.js';

// [settings]
const HOUR = 3600;
/** For every job: without `attempts` its first error is its last. */
export const JOB: JobsOptions = {
  attempts: 8,
  backoff: { type: 'custom' },
  // Long enough that a second add of the same id is still known; failed ones as long as somebody may want to see them.
  removeOnComplete: { age: 24 * HOUR },
  removeOnFail: { age: 14 * 24 * HOUR },
};
export const WORKER = {
  concurrency: 10,
  // A killed worker's jobs run again after lockDuration + stalledInterval: 60 s with the defaults of 30 s each.
  // Whole numbers: with a fraction Redis refuses every check, and no crashed job comes back at all.
  lockDuration: 10_000,
  stalledInterval: 3_000,
  // The default of 1 fails a job at its second crash, its attempts unused; the crash budget below counts instead.
  maxStalledCount: 1000,
  settings: { backoffStrategy: (made: number) => Math.ceil(Math.random() * Math.min(60_000, 1000 * 2 ** (made - 1))) },
} satisfies Partial<WorkerOptions>;
/** Workers wait for Redis indefinitely; producers must answer: no offline queue, one try. */
export const WORKER_REDIS: RedisOptions = { maxRetriesPerRequest: null };
export const PRODUCER_REDIS: RedisOptions = {
  maxRetriesPerRequest: 1, enableOfflineQueue: false, connectTimeout: 3_000, commandTimeout: 5_000,
};
// [/settings]

export class RetryLater extends Error {
  constructor(readonly seconds: number, message: string) {
    super(message);
  }
}

type Effect = (tx: PoolClient) => Promise<unknown>;
export interface JobType<T> {
  schema: ZodType<T>;
  /** Slow and outside work here; what it returns is committed once. */
  run(data: T, job: Job): Promise<Effect>;
}
/** So that the compiler knows what `run` gets. */
export const jobType = <T>(schema: ZodType<T>, run: JobType<T>['run']): JobType<T> => ({ schema, run });

// [worker]
export function reliableWorker(
  queue: string, types: Record<string, JobType<any>>, pool: Pool, options: WorkerOptions, crashes = 4,
): Worker {
  const worker = new Worker(queue, async (job, token) => {
    if (job.stalledCounter >= crashes) throw new UnrecoverableError(`its worker died ${job.stalledCounter} times`);
    const type = types[job.name];
    if (!type) throw new UnrecoverableError(`nobody knows the job ${job.name}`);
    const parsed = type.schema.safeParse(job.data);
    // The names of the fields only: their values may be personal.
    if (!parsed.success) throw new UnrecoverableError(`wrong: ${parsed.error.issues.map((one) => one.path.join('.')).join(', ')}`);
    try {
      const effect = await type.run(parsed.data, job);
      return await once(pool, queue, String(job.id), parsed.data, effect);
    } catch (error) {
      if (!(error instanceof RetryLater)) throw error;
      await job.moveToDelayed(Math.ceil(Date.now() + error.seconds * 1000), token);
      throw new DelayedError();
    }
  }, { ...WORKER, ...options });
  // Without a listener an error of the connection ends the process.
  worker.on('error', (error) => console.error(`worker ${queue}: ${error.message}`));
  return worker;
}
// [/worker]

// [sweep]
/** Copy failed jobs into the database; call it every few seconds, from any number of processes. */
export async function sweep(pool: Pool, queue: Queue): Promise<void> {
  for (const job of await queue.getFailed(0, 999)) {
    const made = await pool.query(
      'INSERT INTO dead_letters (queue, key, name, reason) VALUES ($1, $2, $3, $4) ON CONFLICT DO NOTHING',
      [queue.name, job.id, job.name, job.failedReason]);
    if (made.rowCount) console.error(`dead letter ${queue.name} ${job.id}: ${job.failedReason}`);
  }
}

/** Run a dead letter again, with all its attempts. */
export async function replay(pool: Pool, queue: Queue, key: string): Promise<void> {
  const job = await queue.getJob(key);
  if (!job || !(await job.isFailed())) throw new Error(`${key} is no failed job of ${queue.name}`);
  // The row first: a crash between the two leaves a failed job, which the next sweep finds.
  await pool.query('DELETE FROM dead_letters WHERE queue = $1 AND key = $2', [queue.name, key]);
  await job.retry('failed', { resetAttemptsMade: true, resetAttemptsStarted: true });
}
// [/sweep]

// [flow]
/** Parts, and what follows them: `new FlowProducer({ connection }).add(flow(parent, children))`, all at once or not at all. */
export function flow(parent: FlowJob, children: FlowJob[]): FlowJob {
  // Without failParentOnFailure a part that failed for good leaves its parent waiting forever, in no list of failures.
  const parts = children.map((child) => ({ ...child, opts: { ...JOB, failParentOnFailure: true, ...child.opts } }));
  return { ...parent, opts: { ...JOB, ...parent.opts }, children: parts };
}
// [/flow]

/** Repeat until `stopped`; an error is logged and tried again. */
export async function forever(name: string, stopped: AbortSignal, pause: number, step: () => Promise<number | void>) {
  while (!stopped.aborted) {
    const more = await step().catch((error: Error) => console.error(`${name}: ${error.message}`));
    if (!more) await new Promise((done) => setTimeout(done, pause));
  }
}

/** SIGTERM: take nothing new, finish what runs, exit 0. Give the platform a longer grace than the longest job. */
export function closeOnSignal(workers: Worker[], stopping: AbortController, closeRest: () => Promise<unknown>): void {
  const close = async () => {
    stopping.abort();
    await Promise.all(workers.map((worker) => worker.close()));
    await closeRest();
    process.exit(0);
  };
  for (const signal of ['SIGTERM', 'SIGINT'] as const) process.once(signal, () => void close());
}
