import { Queue, QueueEvents, Worker } from 'bullmq'

const queue = new Queue('mail', {
  connection,
  defaultJobOptions: { attempts: 5, removeOnComplete: { count: 1000, age: 86400 }, removeOnFail: { age: 1209600 } },
})
// setInterval(cleanup, 60_000) was here; repeat: { every: 1000 } too, and groupKey: 'x'
const note = "setTimeout is fine, and so is the word 'repeat' in a string"

const worker = new Worker('mail', process, { connection, maxStalledCount: 1000 })
worker.on('failed', (job, error) => logger.warn({ jobId: job?.id, reason: error.message }, 'failed'))
process.on('SIGTERM', async () => { await worker.close() })

export async function enqueue(order: Order) {
  await queue.add('receipt', { order: order.id }, { jobId: `receipt.${order.id}` })
  await queue.upsertJobScheduler('nightly', { pattern: '0 2 * * *' }, { name: 'nightly' })
  const ids = new Set<string>()
  ids.add(order.id)
  await Promise.all([loadUser(order), loadCart(order)])
  const job = await queue.add('quote', { order: order.id })
  return job.waitUntilFinished(new QueueEvents('mail'), 30_000)
}

async function timeout(ms: number) {
  const controller = new AbortController()
  const timer = setTimeout(() => controller.abort(), ms)
  return () => clearTimeout(timer)
}

export async function lease(key: string, token: string) {
  const got = await redis.set(key, token, 'PX', 10_000, 'NX')
  return got && (() => redis.eval(COMPARE_AND_DELETE, 1, key, token))
}
