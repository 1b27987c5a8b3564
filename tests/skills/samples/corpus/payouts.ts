import { Worker } from 'bullmq'

process.on('SIGTERM', () => worker.close())
const worker = new Worker('payouts', async (job) => {
  for (let i = 0; i < 3; i++) { // fault: inner-retry
    const answer = await fetch(bank, { method: 'POST', signal: AbortSignal.timeout(5000) })
    if (answer.ok) break
  }
  for (const page of pages) await fetch(page, { signal: AbortSignal.timeout(5000) })
  await pool.query('INSERT INTO payouts VALUES ($1)', [job.data.seller]) // fault: insert-without-marker
  await pool.query('INSERT INTO payouts VALUES ($1) ON CONFLICT DO NOTHING', [job.data.seller])
}, { connection, maxStalledCount: 50 })
