import { InjectQueue, Processor, WorkerHost } from '@nestjs/bullmq'
import { Cron } from '@nestjs/schedule'
import type { Job, Queue } from 'bullmq'
import { v4 as uuid } from 'uuid'
import got from 'got'

@Processor('billing')
export class BillingProcessor extends WorkerHost {
  constructor(@InjectQueue('billing') private readonly billingQueue: Queue, private readonly orm: DataSource) { super() }

  async process(job: Job) {
    try {
      await this.charge(job)
    } catch (err) { // fault: swallowed-error
      this.logger.error(`billing failed: ${err.message}`)
      return { success: false }
    }
  }

  async charge(job: Job) {
    const key = uuid()
    await got.post('https://pay.example', { headers: { 'Idempotency-Key': key } }) // fault: key-per-try
    this.logger.log('charged', job.data) // fault: payload-logged
  }

  @Cron('0 4 * * *') // fault: scheduler-per-process
  async nightly() {
    await this.billingQueue.add('close-day', {}) // fault: missing-attempts, missing-retention
  }

  async invoice(id: string) {
    await this.orm.transaction(async (manager) => {
      await manager.save(Invoice, { id })
      await this.billingQueue.add('mail', { id }, JOB) // fault: publish-in-transaction
    })
  }

  async resend(id: string) {
    const invoice = await this.repository.findOneBy({ id })
    await this.billingQueue.add('mail', invoice, JOB) // fault: row-in-payload
    await this.billingQueue.add('mail', { id }, { ...JOB, priority: 1 })
  }
}
