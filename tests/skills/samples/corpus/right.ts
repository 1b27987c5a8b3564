import { Queue, UnrecoverableError, Worker } from 'bullmq'
import cron from 'node-cron'

const queue = new Queue('mail', { connection: new Redis(url, { maxRetriesPerRequest: 1, enableOfflineQueue: false }) })
const worker = new Worker('mail', async (job) => {
  const answer = await fetch('https://mail.example', { method: 'POST', signal: AbortSignal.timeout(5_000) })
  if (!answer.ok && answer.status < 500) throw new UnrecoverableError(`HTTP ${answer.status}`)
  if (!answer.ok) throw new Error(`HTTP ${answer.status}`)
}, { ...WORKER, connection })

// once per slot: the row decides
cron.schedule('0 2 * * *', () => claim('INSERT INTO slots (slot) VALUES ($1) ON CONFLICT DO NOTHING'))
for (const signal of ['SIGTERM', 'SIGINT']) process.once(signal, () => void worker.close())

export async function health() {
  const counts = await queue.getJobCounts('waiting', 'prioritized', 'delayed')
  return counts
}

export async function enqueue(order: { id: string; email: string }) {
  // the key is made with the job: equal in every try
  await queue.add('charge', { order: order.id, idempotencyKey: crypto.randomUUID() }, JOB)
  logger.info({ order: order.id, hasEmail: Boolean(order.email) }, 'enqueued')
}

setInterval(() => renewLease(), 5_000)
setInterval(() => void writer.flushAll(), 1_000)
const progress = setInterval(() => logger.info(`${done} rows`), 10_000)

export class Lock {
  // the token is compared where the lock is released
  release = () => redis.eval(COMPARE_AND_DELETE, 1, this.lockKey, this.token)

  async take() {
    const taken = await redis.set(this.lockKey, this.token, 'EX', 30, 'NX')
    return taken === 'OK'
  }
}

export async function epoch(fresh: string) {
  if (!fresh) return;
  await redis.set('epoch', fresh, 'EX', 60, 'NX');
  logger.debug('fields of the token', { names: Object.keys(answer.authToken) })
  return redis.get('epoch')
}

export const kept = new Queue('kept', { connection, defaultJobOptions: { ...JOB, removeOnFail: 100_000 } })

export function report(name: string) {
  return queueOf(name).getJobCounts('completed', 'failed')
}

declare function setInterval(callback: () => void, delay: number): unknown;
async function cutoff(redis: Redis): Promise<string | null> {
  const first = await redis.set('cutoff', new Date().toISOString(), 'NX');
  return first === 'OK' ? 'just now' : redis.get('cutoff');
}
