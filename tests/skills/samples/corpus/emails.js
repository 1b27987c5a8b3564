const { Queue, Worker } = require('bullmq')
const schedule = require('node-schedule')
const logger = require('pino')()
const emails = new Queue('emails', { connection: new IORedis(process.env.REDIS_URL) }) // fault: redis-default-timeout
emails.add('hi', { id: 1 }, { attempts: 3, removeOnComplete: true, removeOnFail: true }) // fault: remove-on-fail-count, add-without-id
schedule.scheduleJob('0 0 * * *', () => purge()) // fault: scheduler-per-process
module.exports = new Worker('emails', async job => { // fault: stall-default
  const res = await fetch(job.data.url, { method: 'POST', headers: { 'idempotency-key': crypto.randomUUID() } }) // fault: fetch-no-signal, key-per-try
  if (!res.ok) { // fault: retried-4xx
    throw new Error('bad response')
  }
  logger.info({ email: job.data.email }, 'sent') // fault: secret-logged
  try { await track(job) } catch (e) { logger.warn(e) } // fault: swallowed-error
}, { connection })
const shutdown = async () => {
  await emails.addBulk(inFlight.map(j => ({ name: j.name, data: j.data })))
  process.exit(0)
}
process.on('SIGTERM', shutdown) // fault: readd-on-stop
