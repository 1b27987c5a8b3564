import amqp from 'amqplib'
import cron from 'node-cron'
import { CronJob } from 'cron'
import { Kafka } from 'kafkajs'
import rdkafka from 'node-rdkafka'

const reader = new rdkafka.KafkaConsumer({ 'group.id': 'mail', 'enable.auto.commit': true }, {}) // fault: kafka-auto-commit
const careful = new rdkafka.KafkaConsumer({ 'group.id': 'mail', 'enable.auto.commit': false }, {})

cron.schedule('0 2 * * *', nightly) // fault: scheduler-per-process
const job = new CronJob('0 3 * * *', nightly) // fault: scheduler-per-process
setInterval(report, 60_000) // fault: interval-loop

export async function consume(channel: amqp.Channel) {
  await channel.consume('orders', handle, { noAck: true }) // fault: rabbit-auto-ack
  await channel.consume('refunds', async (message) => {
    await refund(message)
    channel.ack(message)
  })
}

const consumer = new Kafka({ brokers }).consumer({ groupId: 'search' })
await consumer.run({
  eachMessage: async ({ message }) => {
    try {
      await index(message.value)
    } catch (e) { // fault: swallowed-error
      logger.error(e)
    }
  },
})
await consumer.run({
  eachMessage: async ({ message }) => {
    for (let i = 0; i < 3; i++) { // fault: inner-retry
      try { return await index(message.value) } catch { await sleep(1000) }
    }
  },
})
