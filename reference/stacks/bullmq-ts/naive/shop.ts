/** The same shop as BullMQ's first steps teach it: default settings, `queue.add` after the insert. */
import { Queue, Worker } from 'bullmq';
import pg from 'pg';

const { REDIS_URL, STORE, CARRIER_URL, MAILER_URL, NOTE } = process.env;
const connection = { url: REDIS_URL! };
const pool = new pg.Pool({ connectionString: STORE! });

async function post(url: string, body: unknown): Promise<any> {
  const answer = await fetch(url, { method: 'POST', body: JSON.stringify(body), headers: { 'content-type': 'application/json' } });
  if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
  return answer.json();
}

const retries = { attempts: 3, backoff: { type: 'exponential', delay: 1000 } };
const [verb, ...rest] = process.argv.slice(2);
if (verb === 'worker') {
  const mails = new Queue('mails', { connection });
  new Worker('labels', async (job) => {
    const { parcel, address, crash } = job.data;
    if (crash) process.kill(process.pid, 'SIGKILL');
    if (!address) throw new Error('the parcel has no address');
    const label = await post(`${CARRIER_URL}/labels`, { parcel });
    await pool.query('INSERT INTO labels VALUES ($1, $2)', [parcel, label.id]);
    await mails.add('mail', { parcel, label: label.id }, retries);
  }, { connection });
  new Worker('mails', async (job) => {
    await post(`${MAILER_URL}/mails`, job.data);
    await pool.query('INSERT INTO mailed VALUES ($1, $2)', [job.data.parcel, job.data.label]);
  }, { connection });
  console.log('ready');
} else if (verb === 'create') {
  await pool.query('CREATE TABLE labels (parcel text, label text); CREATE TABLE mailed (parcel text, label text)');
  await pool.end();
} else {
  const queue = new Queue('labels', { connection });
  for (const parcel of rest.filter((word) => !word.startsWith('--'))) {
    await queue.add('label', { parcel, address: rest.includes('--no-address') ? '' : NOTE, crash: rest.includes('--crash') }, retries);
  }
  await queue.close();
}
