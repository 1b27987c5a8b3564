import { Queue, Worker } from 'bullmq'
import { randomUUID } from 'node:crypto'
import axios from 'axios'
import pRetry from 'p-retry'

const opts = { attempts: 5, removeOnComplete: { age: 3600 }, removeOnFail: { age: 1209600 } }
const queue = new Queue('orders', { connection: producer })
const loose = new Queue('orders', { connection: { url: process.env.REDIS_URL } }) // fault: redis-default-timeout
const PRIORITIES = { high: 10, low: 1 } // fault: inverted-priority
const RIGHT_PRIORITIES = { high: 1, low: 10 }

const worker = new Worker('orders', async (job) => {
  try {
    await ship(job.data.order)
  } catch (error) { // fault: swallowed-error
    console.error('shipping failed', error)
  }
}, { connection, maxStalledCount: 1000 })

const careful = new Worker('orders', handle, { connection, maxStalledCount: 1000 })

async function handle(job) {
  try {
    return await ship(job.data.order)
  } catch (error) {
    logger.warn({ job: job.id }, 'shipping failed')
    throw error
  }
}

async function charge(job) {
  await axios.post('https://pay.example', { amount: 5 }, { headers: { 'Idempotency-Key': randomUUID() }, timeout: 5000 }) // fault: key-per-try
  await stripe.charges.create({ amount: 5 }, { idempotencyKey: job.id }) // fault: job-id-as-key
  await stripe.charges.create({ amount: 5 }, { idempotencyKey: `charge-${job.data.order}` })
  await axios.get('https://rates.example') // fault: http-no-timeout
  const answer = await fetch('https://api.example') // fault: fetch-no-signal
  if (!answer.ok) throw new Error('failed') // fault: retried-4xx
  await fetch('https://api.example', { signal: AbortSignal.timeout(5000) })
  await pRetry(() => ship(job.data.order), { retries: 5 }) // fault: inner-retry
}

export async function place(input) {
  const order = await prisma.order.findUnique({ where: { id: input.id } })
  await queue.add('ship', order, opts) // fault: row-in-payload
  await queue.add('ship', { ...order }, opts) // fault: row-in-payload
  await queue.add('ship', { order: order.id }, opts)
  await queue.add('ship', { order: 1 }, { attempts: 2, removeOnFail: true }) // fault: remove-on-fail-count, add-without-id
  await queue.add('ship', { order: 1 }, { ...opts, priority: urgent ? 10 : 1 }) // fault: inverted-priority
  await client.query('BEGIN')
  await client.query('INSERT INTO orders VALUES ($1)', [order.id])
  await queue.add('mail', { order: order.id }, opts) // fault: publish-in-transaction
  await client.query('COMMIT')
  await queue.add('mail', { order: order.id }, opts)
  await db.run('INSERT OR REPLACE INTO invoices VALUES (?)', order.id) // fault: replace-effect-row
  logger.info(`order of ${user.email}`) // fault: secret-logged
  logger.info({ password: input.password }, 'sign up') // fault: secret-logged
  logger.info({ userId: user.id }, 'the email was sent')
}

app.get('/health', async () => {
  const waiting = await queue.getWaitingCount() // fault: partial-health
  return { ok: waiting < 1000 }
})

process.on('SIGTERM', async () => { // fault: readd-on-stop
  for (const job of active) await queue.add(job.name, job.data, opts)
  await worker.close()
})
