import { Queue, QueueEvents, Worker } from 'bullmq'

const queue = new Queue('mail', { connection })
const alertQueue = new Queue('alerts', { connection })

const worker = new Worker('mail', async (job) => { // finds: no-shutdown, stall-default
  logger.info({ data: job.data }, 'started') // finds: payload-logged
  const fresh = await redis.set(`seen:${job.id}`, '1', 'EX', 60, 'NX') // finds: set-nx-idempotency
  if (!fresh) return
  await send(job.data.to)
}, { connection, limiter: { max: 10, duration: 1000, groupKey: 'userId' } }) // finds: group-key

worker.on('failed', async (job, err) => { // finds: listener-dead-letter
  if (job.attemptsMade >= (job.opts.attempts ?? 1)) { // finds: attempts-made-filter
    await alertQueue.add('dead', { id: job.id }, { attempts: 3, removeOnFail: 500 }) // finds: remove-on-fail-count, add-without-id
  }
})

export async function enqueue(order: Order) {
  await queue.add('welcome', { to: order.email }) // finds: missing-attempts, missing-retention
  await queue.add('a', {}, { attempts: 3, removeOnComplete: true, jobId: `order:${order.id}` }) // finds: colon-job-id
  await queue.add('b', {}, { attempts: 3, removeOnComplete: true, repeat: { every: 60000 } }) // finds: repeat-option
  await Promise.all([ // finds: gather-fan-out
    queue.add('c', order, opts),
    alertQueue.add('c', order, opts),
  ])
  await prisma.$transaction(async (tx) => {
    await tx.order.create({ data: order })
    await queue.add('d', { id: order.id }, opts) // finds: publish-in-transaction
  })
  const job = await queue.add('e', {}, opts)
  return job.waitUntilFinished(new QueueEvents('mail')) // finds: wait-without-ttl
}

setInterval(cleanup, 60_000) // finds: interval-loop

async function runWithLock(name: string, ttl: number, fn: () => Promise<void>) {
  const got = await redis.set(`cron-lock:${name}`, '1', 'EX', ttl, 'NX') // finds: lock-without-token
  if (!got) return
  try { await fn() } finally { await redis.del(`cron-lock:${name}`) }
}

async function consume() {
  await client.xReadGroup('mail', 'one', [{ key: 'orders', id: '>' }]) // finds: stream-no-ack, stream-no-claim
}
