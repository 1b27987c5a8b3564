/**
 * Effects that happen once, and jobs that exist if, and only if, a transaction committed. PostgreSQL; for SQLite see sqlite.ts.
 *
 *     await transaction(pool, (tx) => announce(tx, 'labels', 'buy-label', `label-${parcel}`, { parcel }));   // in place of queue.add
 *     await once(pool, 'labels', key, data, async (tx) => { await tx.query('INSERT INTO labels …') });
 *
 * Promise: for one (consumer, key) the effect is committed at most once, with its marker, and every duplicate gets the result
 * of the run that counted. Announced jobs reach the queue when the transaction has committed, despite crashes and Redis
 * outages; sometimes twice, under the same job id.
 *
 * When it does not hold: effects outside the database. Give the provider a key of the business id, as `shop.ts` does, for as
 * long as it remembers keys (24 hours is usual); without keys, look up before you repeat.
 */
import { createHash } from 'node:crypto';
import type { JobsOptions, Queue } from 'bullmq';
import type { Pool, PoolClient } from 'pg';

export class KeyReused extends Error {}

export const TABLES = `
  CREATE TABLE IF NOT EXISTS inbox (consumer text, key text, fingerprint text NOT NULL, result jsonb,
    at timestamptz NOT NULL DEFAULT now(), PRIMARY KEY (consumer, key));
  CREATE TABLE IF NOT EXISTS outbox (id bigserial PRIMARY KEY, queue text NOT NULL, name text NOT NULL, key text NOT NULL,
    data jsonb NOT NULL);
  CREATE TABLE IF NOT EXISTS dead_letters (queue text, key text, name text NOT NULL, reason text NOT NULL,
    at timestamptz NOT NULL DEFAULT now(), PRIMARY KEY (queue, key));`;

export async function transaction<T>(pool: Pool, work: (tx: PoolClient) => Promise<T>): Promise<T> {
  const tx = await pool.connect();
  let broken: Error | undefined;
  try {
    await tx.query('BEGIN');
    const result = await work(tx);
    await tx.query('COMMIT');
    return result;
  } catch (error) {
    // A connection whose transaction may still be open must not go back to the pool.
    await tx.query('ROLLBACK').catch((gone: Error) => (broken = gone));
    throw error;
  } finally {
    tx.release(broken);
  }
}

// [once]
export async function once<T>(
  pool: Pool, consumer: string, key: string, payload: unknown, effect: (tx: PoolClient) => Promise<T>,
): Promise<T> {
  const mark = fingerprint(payload);
  return transaction(pool, async (tx) => {
    // The marker goes first: a concurrent duplicate waits here for our commit and then finds the row.
    const claimed = await tx.query(
      'INSERT INTO inbox (consumer, key, fingerprint) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING', [consumer, key, mark]);
    if (claimed.rowCount === 1) {
      const result = await effect(tx);
      await tx.query('UPDATE inbox SET result = $3 WHERE consumer = $1 AND key = $2',
        [consumer, key, JSON.stringify(result ?? null)]);
      return result;
    }
    const { rows } = await tx.query('SELECT fingerprint, result FROM inbox WHERE consumer = $1 AND key = $2', [consumer, key]);
    if (rows[0]?.fingerprint !== mark) throw new KeyReused(`${key} was used for another payload`);
    return rows[0].result as T;
  });
}
// [/once]

export async function announce(tx: PoolClient, queue: string, name: string, key: string, data: unknown): Promise<void> {
  await tx.query('INSERT INTO outbox (queue, name, key, data) VALUES ($1, $2, $3, $4)', [queue, name, key, JSON.stringify(data)]);
}

/** Move what was announced to the queues; how many. Any number of processes may call it. */
export async function relay(pool: Pool, queues: Record<string, Queue>, options: JobsOptions): Promise<number> {
  return transaction(pool, async (tx) => {
    const { rows } = await tx.query('SELECT * FROM outbox ORDER BY id LIMIT 100 FOR UPDATE SKIP LOCKED');
    for (const row of rows) {
      // A crash before the COMMIT adds it again: the same id is the same job.
      await queues[row.queue]?.add(row.name, row.data, { ...options, jobId: row.key });
    }
    await tx.query('DELETE FROM outbox WHERE id = ANY($1)', [rows.map((row) => row.id)]);
    return rows.length;
  });
}

/** Whatever the order of the fields. */
export function fingerprint(payload: unknown): string {
  const text = JSON.stringify(payload, (_, inner) =>
    inner && typeof inner === 'object' && !Array.isArray(inner)
      ? Object.fromEntries(Object.entries(inner).sort(([a], [b]) => (a < b ? -1 : 1)))
      : inner);
  return createHash('sha256').update(text).digest('hex');
}
